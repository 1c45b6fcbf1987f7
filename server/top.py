"""`kvtier top`: a running server's readings, again and again, with what changed in between."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .asking import AskError, login, read
from .core import Role, Tier
from .output import plain_console, print_json
from .sizes import rough_size
from .stats import Stats
from .tier_readings import SessionReading, TierReading, TierTraffic

QUIT = b"qQ\x03\x04"
NOTHING = "-"
"""Where nothing is known."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a server said, and when."""

    at: float
    stats: Stats
    tiers: list[TierReading]
    sessions: list[SessionReading]


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier. What only some tiers have is None for others; rates are of the last interval."""

    tier: Tier
    hit_ratio: float | None
    interval_hit_ratio: float | None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    blocks: int | None = None
    evictions: int | None = None
    evictions_per_second: float | None = None
    queued_read_bytes: int | None = None
    queued_write_bytes: int | None = None
    breaker: str | None = None


@dataclass(frozen=True, slots=True)
class TopReading:
    """All that one picture shows. Without an interval before it, rates are None."""

    version: str
    ready: bool
    interval_seconds: float | None
    lookups: int
    lookups_per_second: float | None
    hit_ratio: float
    sessions: dict[Role, int]
    tiers: list[TierRow]


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Which server, and how often."""

    url: str
    interval: float = 2.0
    token_file: Path | None = None
    once: bool = False


def run_top(options: TopOptions, *, as_json: bool) -> None:
    """Show the server until q or Ctrl-C, or once if there is no terminal. Blocks.

    Raises AskError if the server does not answer at first, SettingsError.
    """
    console = plain_console()
    headers = login(options.token_file)
    url = options.url.rstrip("/")
    first = observe(url, headers)
    if as_json:
        print_json(compare(None, first))
    elif options.once or not console.is_terminal:
        console.print(render(compare(None, first), url))
    else:
        with contextlib.suppress(KeyboardInterrupt), _keys() as quit_within:
            _watch(console, first, lambda: observe(url, headers), options, quit_within)


def observe(url: str, headers: Mapping[str, str]) -> Moment:
    """Return what the server says now. Blocks. Raises AskError."""
    stats = read(url, "/v1/stats", Stats, headers)
    tiers = read(url, "/v1/tiers", list[TierReading], headers)
    sessions = read(url, "/v1/sessions", list[SessionReading], headers)
    return Moment(time.monotonic(), stats, tiers, sessions)


def compare(before: Moment | None, now: Moment) -> TopReading:
    """Return what the second moment shows, with rates since the first one."""
    if before is not None and now.stats.lookups < before.stats.lookups:
        before = None  # Another server, which counts from 0.
    seconds = now.at - before.at if before else None
    lookups = now.stats.lookups - before.stats.lookups if before else None
    return TopReading(
        version=now.stats.version,
        ready=now.stats.ready,
        interval_seconds=seconds,
        lookups=now.stats.lookups,
        lookups_per_second=_rate(lookups, seconds),
        hit_ratio=now.stats.total_hit_ratio,
        sessions={role: sum(each.role is role for each in now.sessions) for role in Role},
        tiers=[_row(traffic, before, now, seconds) for traffic in now.stats.traffic],
    )


def render(reading: TopReading, url: str, said: str = "") -> RenderableType:
    """Return one picture; `said` is what went wrong since."""
    ready = ("ready", "green") if reading.ready else ("allocating memory", "yellow")
    counts = ", ".join(f"{count} {role}s" for role, count in reading.sessions.items())
    head = Text.assemble((f"kvtier {reading.version}", "bold"), f" at {url}, ", ready)
    line = (
        f"{_number(reading.lookups_per_second)} lookups/s, {reading.lookups:,} in total, "
        f"{reading.hit_ratio:.1%} of all tokens hit; sessions: {counts}"
    )
    parts: list[RenderableType] = [head, Text(line), Text(), _table(reading)]
    if said:
        parts += [Text(), Text(said, style="red")]
    return Group(*parts)


def _row(
    traffic: TierTraffic, before: Moment | None, now: Moment, seconds: float | None
) -> TierRow:
    tier = traffic.tier
    asked, hit = traffic.tokens_asked, traffic.tokens_hit
    total = hit / asked if asked else None
    for old in before.stats.traffic if before else ():
        if old.tier is tier:
            asked, hit = asked - old.tokens_asked, hit - old.tokens_hit
    lately = hit / asked if before and asked > 0 else None
    reading = next((each for each in now.tiers if each.tier is tier), None)
    if reading is None:
        return TierRow(tier, total, lately)
    earlier = [each.evictions for each in before.tiers if each.tier is tier] if before else []
    evicted = reading.evictions - earlier[0] if earlier else None
    lower = reading.lower
    return TierRow(
        tier,
        total,
        lately,
        used_bytes=reading.used_bytes,
        capacity_bytes=reading.capacity_bytes,
        blocks=reading.blocks,
        evictions=reading.evictions,
        evictions_per_second=_rate(evicted, seconds),
        queued_read_bytes=lower.queued_read_bytes if lower else None,
        queued_write_bytes=lower.queued_write_bytes if lower else None,
        breaker=lower.breaker if lower else None,
    )


def _table(reading: TopReading) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    since = reading.interval_seconds
    lately = f"hits {since:.0f} s" if since else "hits lately"
    for name in ("used", "full", "blocks", lately, "hits", "evictions/s", "to read", "to write"):
        table.add_column(name, justify="right")
    table.add_column("breaker")
    for row in reading.tiers:
        size, most = row.used_bytes, row.capacity_bytes
        table.add_row(
            Text(row.tier, style="bold"),
            _bytes(size),
            NOTHING if size is None or not most else f"{size / most:.0%}",
            NOTHING if row.blocks is None else f"{row.blocks:,}",
            _share(row.interval_hit_ratio),
            _share(row.hit_ratio),
            _number(row.evictions_per_second),
            _bytes(row.queued_read_bytes),
            _bytes(row.queued_write_bytes),
            _breaker(row.breaker),
        )
    return table


def _breaker(state: str | None) -> Text:
    if state is None:
        return Text(NOTHING)
    return Text(state.replace("_", " "), style="green" if state == "closed" else "red")


def _bytes(size: int | None) -> str:
    return NOTHING if size is None else rough_size(size)


def _share(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.1%}"


def _number(rate: float | None) -> str:
    return NOTHING if rate is None else f"{rate:,.1f}"


def _rate(count: int | None, seconds: float | None) -> float | None:
    return count / seconds if count is not None and count >= 0 and seconds else None


def _watch(
    console: Console,
    first: Moment,
    observed: Callable[[], Moment],
    options: TopOptions,
    quit_within: Callable[[float], bool],
) -> None:
    """Show a picture each interval until one should quit. A server that is gone may come back."""
    before: Moment | None = None
    last, said = first, ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(compare(before, last), options.url, said), refresh=True)
            if quit_within(options.interval):
                return
            try:
                before, last, said = last, observed(), ""
            except AskError as error:
                said = f"{error} (q quits)"


def _never_within(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Give what waits so many seconds for a key that quits, and says whether one came."""
    if not sys.stdin.isatty():
        yield _never_within
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def quit_within(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left)[0]:
                key = os.read(keyboard, 1)
                if not key or key in QUIT:
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield quit_within
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
