"""Runs: blocks that follow each other in a chain and were used the same, as one place in a list.

What one request stores is one run, and stays one until another request uses a part of it. So a
request's use of a chain moves a few runs, however many blocks they have. Within a run the head is
hotter than the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, Self, TypeVar

from ..core import BlockKey
from .base import Known
from .links import Link


class Run(Link):
    """Blocks of one weight each, the head first, or a list's sentinel.

    `parent` is of the first one.
    """

    __slots__ = ("keys", "parent", "uses", "weight")

    def __init__(
        self, keys: list[BlockKey], weight: int, parent: BlockKey | None, uses: int
    ) -> None:
        super().__init__()
        self.keys = keys
        self.weight = weight
        self.parent = parent
        self.uses = uses

    def cut(self, at: int) -> Self:
        """Give up the blocks from `at` on. Returns them as a run right below this one."""
        other = type(self)(self.keys[at:], self.weight, self.keys[at - 1], self.uses)
        del self.keys[at:]
        other.link_below(self)
        return other


R = TypeVar("R", bound=Run)


class Runs(Generic[R]):
    """All runs of a policy, by block. Every operation is O(1) a block that it moves or compares."""

    def __init__(self) -> None:
        self.of: dict[BlockKey, R] = {}
        """The run of each resident block."""

    def add(self, run: R) -> None:
        """Take in the blocks of a run."""
        self.of.update(dict.fromkeys(run.keys, run))

    def extend(self, run: R, keys: Sequence[BlockKey]) -> None:
        """Take in blocks that follow a run's last one, as a part of it."""
        run.keys += keys
        self.of.update(dict.fromkeys(keys, run))

    def cut_out(self, run: R, chain: list[BlockKey], at: int) -> R:
        """Return the run that begins with `chain[at]`, which is in `run`, and is all in the chain.

        What `run` has before it or what the chain does not go on with becomes a run of its own.
        """
        first = chain[at]
        if run.keys[0] != first:
            run = self._cut(run, run.keys.index(first))
        keys = run.keys
        last = at + len(keys) - 1
        # A key says what all before it are.
        if last >= len(chain) or chain[last] != keys[-1]:
            pairs = enumerate(zip(islice(chain, at, None), keys, strict=False))
            self._cut(run, next((same for same, (a, b) in pairs if a != b), len(chain) - at))
        return run

    def next_resident(self, chain: list[BlockKey], at: int) -> int:
        """Return where the next resident block after `chain[at]` is, which is none; or the end."""
        at += 1
        if at < len(chain) and chain[at] not in self.of:
            # Behind a gap there is mostly nothing.
            if self.of.keys().isdisjoint(chain[at:]):
                return len(chain)
            while chain[at] not in self.of:
                at += 1
        return at

    def ending_with(self, key: BlockKey) -> R | None:
        """Return the run whose last block this is, if it is resident."""
        run = self.of.get(key)
        if run is not None and run.keys[-1] != key:
            self._cut(run, run.keys.index(key) + 1)
        return run

    def remove(self, key: BlockKey) -> R:
        """Forget a resident block. Returns its run, which leaves its list if nothing is left."""
        run = self.of.pop(key)
        if run.keys[-1] != key:
            self._cut(run, run.keys.index(key) + 1)
        run.keys.pop()
        if not run.keys:
            run.unlink()
        return run

    def make_room(
        self, ring: R, count: int, goes: Callable[[BlockKey], bool]
    ) -> Iterator[tuple[list[BlockKey], int]]:
        """Take out up to `count` blocks that go of a list, coldest first.

        Yields what went of each run, in the order in which it went, and its uses.
        """
        of = self.of
        for run in walk_runs(ring):
            keys = run.keys
            before = at = len(keys)
            least = max(before - count, 0)
            while at > least and goes(keys[at - 1]):
                at -= 1
            gone = keys[at:][::-1]
            del keys[at:]
            for key in gone:
                del of[key]
            if at > least:
                gone += self._pick(run, at - 1, count - len(gone), goes)
            if not keys:
                run.unlink()
            if gone:
                count -= len(gone)
                yield gone, run.uses
                if not count:
                    return

    def _pick(
        self, run: R, end: int, count: int, goes: Callable[[BlockKey], bool]
    ) -> list[BlockKey]:
        """Take out what goes of a run before its block at `end`, which stays."""
        gone: list[BlockKey] = []
        for key in reversed(run.keys[:end]):
            if len(gone) == count:
                break
            if goes(key):
                self.remove(key)
                gone.append(key)
        return gone

    def _cut(self, run: R, at: int) -> R:
        other = run.cut(at)
        self.add(other)
        return other


def walk_runs(ring: R) -> Iterator[R]:
    """Yield a list's runs, coldest first. The one just yielded may go, or be cut."""
    run = ring.hotter
    while run is not ring:
        hotter = run.hotter
        yield run
        run = hotter


def coldest_first(runs: Iterable[R]) -> Iterator[BlockKey]:
    """Yield the blocks of runs, tails first. The one just yielded may be removed."""
    for run in runs:
        keys = run.keys
        for at in range(len(keys) - 1, -1, -1):
            yield keys[at]


def known_of(run: Run) -> list[Known]:
    """Return what there is to hand over of a run, coldest first."""
    parents = [run.parent, *run.keys[:-1]]
    pairs = zip(run.keys, parents, strict=False)
    return [Known(key, run.weight, run.uses, parent) for key, parent in pairs][::-1]


def chains_of(blocks: Sequence[Known], marks: Sequence[int]) -> Iterator[tuple[list[Known], int]]:
    """Cut blocks, coldest first, into stretches that can be a run each: these are head first.

    Blocks of one stretch are of one weight, have the same uses, and the same of `marks`, which
    comes with it.
    """
    stretch: list[Known] = []
    before = 0
    for known, mark in zip(blocks, marks, strict=True):
        last = stretch[-1] if stretch else None
        same = last is not None and (last.parent, last.uses, last.weight, before) == (
            known.key,
            known.uses,
            known.weight,
            mark,
        )
        if stretch and not same:
            yield stretch[::-1], before
            stretch = []
        stretch.append(known)
        before = mark
    if stretch:
        yield stretch[::-1], before
