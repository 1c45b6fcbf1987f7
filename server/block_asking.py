"""`kvtier blocks` and `kvtier pins`: ask a running server, and show what it says. Blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from rich.table import Table

from .asking import AskError, Server
from .block_readings import (
    DropReading,
    Gone,
    LookupReading,
    PinList,
    PinReading,
    PrefetchReading,
    PrefixList,
)
from .output import plain_console, print_json
from .prompt_input import PromptInput
from .sizes import rough_size

BUSY = 429
RETRY_SECONDS = 0.5
RETRIES_AT_MOST = 120
"""So often a drop asks again that another one holds up, or that is not done."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A server, and how its answers are shown."""

    server: Server
    as_json: bool

    def show(self, found: object, *told: Table | str) -> None:
        """Print an answer: as JSON, or as it is told."""
        if self.as_json:
            print_json(found)
        else:
            plain_console().print(*told, sep="\n")


def look_up(asker: Asker, prompt: PromptInput) -> None:
    """Show which tiers hold which blocks of a prompt. Raises AskError, PromptError."""
    found = asker.server.ask(LookupReading, "POST", "/v1/blocks/lookup", prompt.body())
    table = _table("tier", "blocks", "which")
    for tier in found.tiers:
        ranges = ", ".join(f"{begin} to {end - 1}" for begin, end in tier.ranges) or "none"
        table.add_row(tier.tier, f"{tier.blocks:,}", ranges if tier.known else f"{ranges}; unsure")
    asker.show(
        found,
        f"{found.blocks:,} blocks of {found.block_tokens} tokens; of these, the first "
        f"{found.matched_blocks:,} are there ({found.matched_tokens:,} tokens).",
        table,
    )


def drop(asker: Asker, prompt: PromptInput, tier: str, *, dry_run: bool) -> None:
    """Drop a namespace, or a block with all below it, until it is done. Raises AskError."""
    body = prompt.body() | {"tier": tier, "dry_run": dry_run}
    total: dict[str, Gone] = {}
    for _ in range(RETRIES_AT_MOST):
        try:
            found = asker.server.ask(DropReading, "POST", "/v1/blocks/drop", body)
        except AskError as error:
            if error.status != BUSY:
                raise
            time.sleep(RETRY_SECONDS)
            continue
        for gone in found.gone:
            total.setdefault(gone.tier, Gone(gone.tier)).add(gone.blocks, gone.bytes)
        if found.done:
            break
    else:
        raise AskError("The server is still at it: ask again in a while.")
    found = DropReading(found.namespace, found.done, dry_run, list(total.values()))
    table = _table("tier", "blocks", "bytes")
    for gone in found.gone:
        table.add_row(gone.tier, f"{gone.blocks:,}", rough_size(gone.bytes))
    asker.show(found, "Would be dropped:" if dry_run else "Dropped:", table)


def prefetch(asker: Asker, prompt: PromptInput) -> None:
    """Bring a prompt's blocks to the host tier. Raises AskError, PromptError."""
    found = asker.server.ask(PrefetchReading, "POST", "/v1/blocks/prefetch", prompt.body())
    asker.show(
        found,
        f"{found.on_their_way:,} of {found.blocks:,} blocks are on their way to the host tier; "
        f"`kvtier blocks lookup` tells when they are there.",
    )


def list_prefixes(
    asker: Asker, namespace: str | None, order: str, limit: int, cursor: str | None
) -> None:
    """Show the largest or most used prefixes. Raises AskError."""
    wanted = {"namespace": namespace, "cursor": cursor, "order": order, "limit": limit}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    found = asker.server.ask(PrefixList, "GET", f"/v1/prefixes?{query}")
    table = _table("head", "blocks", "bytes", "depth", "ends", "uses", "")
    for one in found.prefixes:
        counts = (one.depth, one.ends, one.uses)
        note = "pinned" if one.pinned else "without its head" if one.parent else ""
        table.add_row(
            one.head, f"{one.blocks:,}", rough_size(one.bytes), *map("{:,}".format, counts), note
        )
    more = [] if found.next is None else [f"More: --cursor {found.next}"]
    asker.show(found, f"{found.total:,} prefixes in the host tier.", table, *more)


def list_pins(asker: Asker) -> None:
    """Show all pins. Raises AskError."""
    found = asker.server.ask(PinList, "GET", "/v1/pins")
    pinned, most = rough_size(found.pinned_bytes), rough_size(found.pins_at_most_bytes)
    asker.show(found, f"{pinned} of {most} that pins may take.", _pins(found.pins))


def add_pin(asker: Asker, prompt: PromptInput, seconds: float, name: str) -> None:
    """Pin a prompt's blocks. Raises AskError, PromptError."""
    body = prompt.body() | {"ttl_seconds": seconds, "name": name}
    found = asker.server.ask(PinReading, "POST", "/v1/pins", body)
    asker.show(found, _pins([found]))


def remove_pin(asker: Asker, pin: str) -> None:
    """End a pin. Raises AskError."""
    asker.server.ask(type(None), "DELETE", f"/v1/pins/{quote(pin, safe='')}")
    asker.show({"removed": pin}, f"Pin {pin} is removed.")


def _pins(pins: Sequence[PinReading]) -> Table:
    table = _table("pin", "name", "blocks", "bytes", "tokens", "ends in", "namespace")
    for pin in pins:
        table.add_row(
            pin.id,
            pin.name,
            f"{pin.blocks:,}",
            rough_size(pin.bytes),
            f"{pin.tokens:,}",
            f"{pin.expires_in_seconds:,.0f} s",
            pin.namespace[:12],
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
