"""What a running server says about itself, for a person in a terminal or as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .asking import login, read
from .core import SlotState, StoreOutcome, Tier
from .output import plain_console, print_json
from .sizes import rough_size
from .stats import Stats
from .tier_readings import NamespaceReading, SessionReading, TierReading

BAR_WIDTH = 30
NEARLY_FULL = 0.95
_LEVELS = {Tier.HOST: "L1", Tier.DISK: "L2", Tier.REDIS: "L2"}


@dataclass(frozen=True, slots=True)
class Status:
    """All readings of one server."""

    stats: Stats
    tiers: list[TierReading]
    sessions: list[SessionReading]
    namespaces: list[NamespaceReading]


def show_status(url: str, *, as_json: bool, token_file: Path | None = None) -> None:
    """Print the status of the server at `url`. Blocks. Raises AskError, SettingsError."""
    url = url.rstrip("/")
    status = read_status(url, token_file)
    console = plain_console()
    if as_json:
        print_json(status)
    else:
        console.print(render(status, url))


def read_status(url: str, token_file: Path | None = None) -> Status:
    """Return all readings of the server at `url`. Blocks. Raises AskError, SettingsError."""
    headers = login(token_file)
    return Status(
        stats=read(url, "/v1/stats", Stats, headers),
        tiers=read(url, "/v1/tiers", list[TierReading], headers),
        sessions=read(url, "/v1/sessions", list[SessionReading], headers),
        namespaces=read(url, "/v1/namespaces", list[NamespaceReading], headers),
    )


def render(status: Status, url: str) -> RenderableType:
    """Return the status as something that rich prints."""
    ready = ("ready", "green") if status.stats.ready else ("allocating memory", "yellow")
    parts: list[RenderableType] = [
        Text.assemble((f"kvtier {status.stats.version}", "bold"), f" at {url}, ", ready),
        Panel(_tiers(status.tiers), title="Tiers", title_align="left"),
        Panel(_hits(status.stats), title="Hits since the start", title_align="left"),
        Panel(_sessions(status.sessions), title="Sessions", title_align="left"),
        Panel(_namespaces(status.namespaces), title="Namespaces", title_align="left"),
    ]
    return Group(*parts)


def _tiers(readings: list[TierReading]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for reading in readings:
        share = reading.used_bytes / reading.capacity_bytes
        table.add_row(
            Text(reading.tier, style="bold"),
            _bar(share),
            f"{share:.0%}",
            f"{rough_size(reading.used_bytes)} of {rough_size(reading.capacity_bytes)}",
            f"{reading.blocks:,} blocks",
        )
        table.add_row("", Text(f"policy {reading.policy}, {_about(reading)}", style="dim"))
        table.add_row("", Text(f"{reading.evictions:,} evictions, {_under_way(reading)}"))
    return table


def _about(reading: TierReading) -> str:
    if reading.host is not None:
        return "huge pages" if reading.host.huge_pages else "normal pages"
    lower = reading.lower
    assert lower is not None, "a tier is the host tier or a lower one"
    if not lower.up:
        return "left alone for now: the server's log says why"
    speed = f", reads at {rough_size(int(lower.read_bandwidth))}/s" if lower.read_bandwidth else ""
    return f"written {lower.write_mode.replace('_', ' ')}{speed}"


def _under_way(reading: TierReading) -> str:
    if reading.host is not None:
        slots = reading.host.slots
        in_use = sum(slots[state] for state in (SlotState.RESERVED, SlotState.LIMBO))
        return f"{in_use:,} slots promised"
    assert reading.lower is not None, "a tier is the host tier or a lower one"
    return f"{rough_size(reading.lower.queued_write_bytes)} to be written"


def _bar(share: float) -> Bar:
    colour = "yellow" if share > NEARLY_FULL else "green"
    return Bar(1, 0, share, width=BAR_WIDTH, color=colour, bgcolor="bright_black")


def _hits(stats: Stats) -> RenderableType:
    device = stats.traffic[0]
    if not device.tokens_asked:
        return Text("No prompt has had a whole block yet.", style="dim")
    whole = f"{device.tokens_asked:,} prompt tokens in whole blocks did not have to be computed."
    lines = [
        f"[bold]{stats.total_hit_ratio:.1%}[/] of {whole}",
        f"  device (L0) held {device.hit_ratio:.1%} of them: {device.tokens_hit:,} tokens.",
    ]
    lines += [
        f"  {tier.tier} ({_LEVELS[tier.tier]}) held {tier.hit_ratio:.1%} of the "
        f"{tier.tokens_asked:,} tokens that the tiers above did not: {tier.tokens_hit:,} tokens."
        for tier in stats.traffic[1:]
    ]
    return Text.from_markup("\n".join([*lines, _stores(stats.stores)]))


def _stores(stores: dict[StoreOutcome, int]) -> str:
    others = [
        f"{count:,} {outcome.replace('_', ' ')}"
        for outcome, count in stores.items()
        if count and outcome is not StoreOutcome.COMMITTED
    ]
    kept = f"{stores[StoreOutcome.COMMITTED]:,} of {sum(stores.values()):,} offered blocks stored"
    return f"{kept} ({', '.join(others)})." if others else f"{kept}."


def _sessions(readings: list[SessionReading]) -> RenderableType:
    if not readings:
        return Text("No engine is connected.", style="dim")
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "role", "rank", "pid", "namespace"):
        table.add_column(heading, overflow="fold")
    for heading in ("age", "leased blocks", "reserved slots"):
        table.add_column(heading, justify="right")
    for reading in readings:
        table.add_row(
            reading.engine,
            reading.role,
            str(reading.rank),
            str(reading.pid),
            reading.namespace[:12],
            _age(reading.age_seconds),
            f"{reading.leased_blocks:,}",
            f"{reading.reserved_slots:,}",
        )
    return table


def _namespaces(readings: list[NamespaceReading]) -> RenderableType:
    if not readings:
        return Text("No engine has connected yet.", style="dim")
    table = Table(box=None, pad_edge=False)
    for heading in ("namespace", "model", "KV dtype"):
        table.add_column(heading, overflow="fold")
    for heading in ("block tokens", "blocks", "used", "sessions"):
        table.add_column(heading, justify="right")
    for reading in readings:
        table.add_row(
            reading.digest[:12],
            reading.manifest.model,
            reading.manifest.kv_dtype,
            f"{reading.manifest.block_tokens:,}",
            f"{reading.blocks:,}",
            rough_size(reading.used_bytes),
            f"{reading.sessions:,}",
        )
    return table


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
