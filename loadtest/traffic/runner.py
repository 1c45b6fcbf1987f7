"""Sends a workload to a server, and keeps what came of each request.

One event loop, one task a user (closed loop) or a request (open loop). No failure of a request ends
a run; the session that it belongs to goes on with its next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .records import Record, RecordFile
from .requests import Request, TrafficError, Workload
from .sources import Sources, sources_since, totals
from .stream import Client, Limits

LATE_SECONDS = 0.05
"""A request of the open loop that is sent later than this after its time counts as late."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """So many users, each of whom sends the next request when its last one has ended."""

    users: int

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.users} users, closed loop"


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Requests are sent at the workload's times, `rate` times as fast, whatever is under way."""

    rate: float = 1.0
    at_most: int = 1000
    """Requests under way; what comes beyond waits, and is late."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"arrivals at {self.rate:g} times the workload's pace, open loop"


Loop = Closed | Open


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a workload."""

    loop: Loop
    began: float
    """Seconds since the epoch."""
    seconds: float
    """From the first request's sending to the last one's end, less what it waited for its turn."""
    records: list[Record]
    """In the order in which they ended."""
    sources: Sources | None
    """Where prompt tokens came from, by the engine's own count; None if it has no metrics."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run needs seldom."""

    raw: Path | None = None
    """File that each record is appended to as it comes; made anew."""
    limits: Limits = field(default_factory=Limits)
    metrics: Sequence[str] = ()
    """URLs whose /metrics tell where tokens came from, if it is not the one that is asked: those of
    the engines, and that of a kvtier server, which knows its tiers apart."""
    done: Callable[[Record], None] = lambda _: None
    """Is told of each record."""
    turn: contextlib.AbstractAsyncContextManager[object] = field(
        default_factory=contextlib.nullcontext
    )
    """Held while a request of the closed loop is under way: runs that share it take turns."""


async def run(
    url: str,
    model: str,
    workload: Workload,
    loop: Loop,
    *,
    progress: bool = True,
    options: RunOptions = RunOptions(),
) -> Run:
    """Send the whole workload and return what came of it.

    Shows a bar on stderr with `progress`, if that is a terminal. Raises TrafficError if nothing can
    be sent at all: a URL that is none, no user.
    """
    _check(url, loop)
    turn = _Turn(options.turn)
    counting = options.metrics or [url]
    before = await totals(counting)
    wall, began = time.time(), time.perf_counter()
    client = Client(url, model, options.limits, began)
    records: list[Record] = []
    with contextlib.ExitStack() as ends:
        raw = options.raw and ends.enter_context(RecordFile(options.raw))
        advance = ends.enter_context(_bar(workload, shown=progress))

        def keep(record: Record) -> None:
            if raw:
                raw.append(record)
            records.append(record)
            options.done(record)
            advance(record)

        try:
            if isinstance(loop, Closed):
                await _closed(client, workload, loop, keep, turn)
            else:
                await _open(client, workload, loop, keep)
        finally:
            await client.close()
    return Run(
        loop=loop,
        began=wall,
        seconds=max(each.ended for each in records)
        - min(each.sent for each in records)
        - turn.waited,
        records=records,
        sources=sources_since(before, await totals(counting)),
    )


Keep = Callable[[Record], None]


class _Ready:
    """Requests that may be sent now, in the workload's order; the others wait for theirs to end."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._followers: dict[str, list[int]] = {}
        self._ready: list[int] = []
        for number, request in enumerate(requests):
            if request.after is None:
                self._ready.append(number)
            else:
                self._followers.setdefault(request.after, []).append(number)
        self._left = len(requests)
        self._changed = asyncio.Condition()

    async def next(self) -> Request | None:
        """Wait for one that may be sent; None when all have been given out."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready or not self._left)
            if not self._left:
                return None
            self._left -= 1
            if not self._left:
                self._changed.notify_all()
            return self._requests[heapq.heappop(self._ready)]

    async def ended(self, request: Request) -> None:
        """Let those that waited for it go."""
        async with self._changed:
            for number in self._followers.pop(request.name, []):
                heapq.heappush(self._ready, number)
            self._changed.notify_all()


class _Turn:
    """One run's turns among others, and for how long it waited between them."""

    def __init__(self, shared: contextlib.AbstractAsyncContextManager[object]) -> None:
        self._shared = shared
        self._taken = False
        self.waited = 0.0
        """Seconds, without those before the first turn."""

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        began = time.perf_counter()
        async with self._shared:
            if self._taken:
                self.waited += time.perf_counter() - began
            self._taken = True
            yield


async def _closed(
    client: Client, workload: Workload, loop: Closed, keep: Keep, turn: _Turn
) -> None:
    ready = _Ready(workload.requests)

    async def user() -> None:
        while (request := await ready.next()) is not None:
            async with turn.take():
                keep(await client.send(request))
            await ready.ended(request)

    async with asyncio.TaskGroup() as users:
        for _ in range(loop.users):
            users.create_task(user())


async def _open(client: Client, workload: Workload, loop: Open, keep: Keep) -> None:
    began = time.perf_counter()
    ended = {request.name: asyncio.Event() for request in workload.requests}
    room = asyncio.Semaphore(loop.at_most)

    async def arrive(request: Request) -> None:
        due = began + request.at / loop.rate
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        if request.after is not None:
            await ended[request.after].wait()
        async with room:
            keep(await client.send(request, max(time.perf_counter() - due, 0.0)))
        ended[request.name].set()

    async with asyncio.TaskGroup() as arrivals:
        for request in workload.requests:
            arrivals.create_task(arrive(request))


def _check(url: str, loop: Loop) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise TrafficError(f"{url} is no URL: {error}.") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise TrafficError(f"{url} is no URL of a server: name one such as http://127.0.0.1:8000.")
    if isinstance(loop, Closed) and loop.users < 1:
        raise TrafficError("No user sends nothing: name 1 or more.")
    if isinstance(loop, Open) and (loop.rate <= 0 or loop.at_most < 1):
        raise TrafficError(f"At a rate of {loop.rate:g} nothing arrives: name one above 0.")


@contextlib.contextmanager
def _bar(workload: Workload, *, shown: bool) -> Iterator[Keep]:
    """Show a bar on a terminal's stderr, and nothing elsewhere."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    failed = 0
    with progress:
        task = progress.add_task(workload.name, total=len(workload.requests), failed="")

        def advance(record: Record) -> None:
            nonlocal failed
            failed += record.failure is not None
            progress.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        yield advance
