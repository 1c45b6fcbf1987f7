"""What became visible and what went in a namespace, told to those who watch.

A log holds the latest changes, and only while somebody watches; each watcher has its place in it.
Who begins, or falls behind what the log holds, gets a snapshot: a walk over the visible blocks,
piece by piece, while the cache goes on. Changes are told before the next piece, so that in the end
a watcher knows what there is. Runs on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

from .core import BlockKey

KEYS_AT_ONCE = 1024
"""Changes that are told at once, and slots that a snapshot looks at at once.

Telling takes about a microsecond a key where no block continues another one.
"""
CHANGES_KEPT = 65_536
"""A watcher that has more to hear than this gets a snapshot instead."""
NOWHERE = -1
"""The place of a watcher that needs a snapshot."""

Placed: TypeAlias = tuple[BlockKey, BlockKey]
"""A visible block and its parent, which is empty at the head of a chain."""
Change: TypeAlias = tuple[BlockKey, BlockKey | None]
"""A block that became visible, with its parent, or a block that went, with None."""
Run: TypeAlias = list[BlockKey]
"""A parent and the blocks that continue it, each the one before."""


class News(NamedTuple):
    """What a watcher is told at once: `removed` goes first, then `stored` comes."""

    whole: bool
    """Forget everything: a snapshot begins."""
    stored: list[Run]
    removed: list[BlockKey]


class Peer(Protocol):
    """Who hears the news."""

    @property
    def behind(self) -> bool:
        """Whether it has not taken yet what it was told. `Teller.resume` when it has."""

    def tell(self, news: News) -> None:
        """Hand the news over without waiting."""


class ChangeLog:
    """The latest changes of one namespace.

    `pieces` starts a walk over its visible blocks. A piece holds what is visible at its moment; a
    block that became visible after the walk's start may be left out.
    """

    def __init__(self, pieces: Callable[[], Iterator[list[Placed]]]) -> None:
        self.pieces = pieces
        self.watchers: list[Watcher] = []
        self.idle = True
        """Some watcher has heard everything, and waits for `note` to wake it."""
        self._kept: list[Change] = []
        self._forgotten = 0
        """Changes before the first one that is kept."""

    @property
    def end(self) -> int:
        """The place after the last change."""
        return self._forgotten + len(self._kept)

    def note(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Take down a change, for watchers only: call it if there are any."""
        self._kept.append((key, parent))
        if len(self._kept) >= CHANGES_KEPT + KEYS_AT_ONCE:
            self._forget(KEYS_AT_ONCE)
        if self.idle:
            self.idle = False
            for watcher in self.watchers:
                watcher.teller.resume(watcher)

    def since(self, place: int) -> list[Change] | None:
        """Return the next changes from `place` on; None if they are too many or not kept."""
        at = place - self._forgotten
        if at < 0 or len(self._kept) - at > CHANGES_KEPT:
            return None
        return self._kept[at : at + KEYS_AT_ONCE]

    def trim(self) -> None:
        """Forget what all watchers have heard."""
        heard = min((one.place for one in self.watchers), default=self.end) - self._forgotten
        if heard >= KEYS_AT_ONCE or heard == len(self._kept):
            self._forget(heard)

    def _forget(self, count: int) -> None:
        del self._kept[:count]
        self._forgotten += count


class Watcher:
    """One peer's place in a log, and in the walk of its snapshot if there is one under way."""

    def __init__(self, log: ChangeLog, peer: Peer, teller: Teller) -> None:
        self.log = log
        self.peer = peer
        self.teller = teller
        self.place = NOWHERE
        self.queued = False
        self._walk: Iterator[list[Placed]] = iter(())

    def next_news(self) -> News | None:
        """Return what comes next, which may be nothing after all; None if all was heard."""
        changes = self.log.since(self.place)
        if changes is None:
            self.place = self.log.end
            self._walk = self.log.pieces()
            return News(whole=True, stored=[], removed=[])
        if changes:
            self.place += len(changes)
            return _net(changes)
        piece = next(self._walk, None)
        return None if piece is None else News(False, _runs(piece), [])


class Teller:
    """Tells all watchers in turn, one piece of news in a turn of the loop."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._queue: deque[Watcher] = deque()
        self._called = False

    def watch(self, log: ChangeLog, peer: Peer) -> Watcher:
        """Begin to tell `peer` of the log's namespace, with a snapshot first."""
        watcher = Watcher(log, peer, self)
        log.watchers.append(watcher)
        self.resume(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """End it. Nothing is told from now on."""
        watcher.log.watchers.remove(watcher)
        watcher.log.trim()
        if watcher.queued:
            self._queue.remove(watcher)

    def resume(self, watcher: Watcher) -> None:
        """See to a watcher that may have news to hear, and time to hear them."""
        if not watcher.queued:
            watcher.queued = True
            self._queue.append(watcher)
            self._call()

    def _turn(self) -> None:
        self._called = False
        if not self._queue:
            return
        watcher = self._queue.popleft()
        watcher.queued = False
        if not watcher.peer.behind:
            self._tell(watcher)
        if self._queue:
            self._call()

    def _tell(self, watcher: Watcher) -> None:
        news = watcher.next_news()
        watcher.log.trim()
        if news is None:
            watcher.log.idle = True
            return
        self.resume(watcher)
        if any(news):
            watcher.peer.tell(news)

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._call_soon(self._turn)


def _net(changes: list[Change]) -> News:
    """Return the difference that the changes make in the end.

    What came and went again is left out. What went and came again is told: a snapshot under way
    may have passed over it, because it lies in another slot now.
    """
    known: dict[BlockKey, bool] = {}
    last: dict[BlockKey, BlockKey | None] = {}
    for key, parent in changes:
        known.setdefault(key, parent is None)
        last.pop(key, None)
        last[key] = parent
    stored = [(key, parent) for key, parent in last.items() if parent is not None]
    removed = [key for key, parent in last.items() if parent is None and known[key]]
    return News(False, _runs(stored), removed)


def _runs(placed: list[Placed]) -> list[Run]:
    runs: list[Run] = []
    end: BlockKey | None = None
    for key, parent in placed:
        if parent == end:
            runs[-1].append(key)
        else:
            runs.append([parent, key])
        end = key
    return runs
