"""Runs: blocks that follow each other in a chain and were used the same, as one place in a list.

What one request stores is one run, and stays one until another request uses a part of it. So a
request's use of a chain moves a few runs, however many blocks they have. Within a run the head is
hotter than the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain as joined
from itertools import islice, takewhile
from typing import Generic, Self, TypeVar

from ..core import BlockKey
from .base import Known, Parents
from .links import Link

INDEX_STEP = 16
"""One block of a run in this many is in the index, where parents are known."""
ENDS_AT_MOST = 64
"""Runs of which it is remembered where they end: it is there that blocks come and go."""


class Run(Link):
    """Blocks of one weight each, the head first, or a list's sentinel.

    `parent` is of the first one. One block in `step`, from the first one on, is in the index.
    """

    __slots__ = ("keys", "parent", "step", "uses", "weight")

    def __init__(
        self, keys: list[BlockKey], weight: int, parent: BlockKey | None, uses: int
    ) -> None:
        super().__init__()
        self.keys = keys
        self.weight = weight
        self.parent = parent
        self.uses = uses
        self.step = 1

    def cut(self, at: int) -> Self:
        """Give up the blocks from `at` on. Returns them as a run right below this one."""
        other = type(self)(self.keys[at:], self.weight, self.keys[at - 1], self.uses)
        other.step = self.step
        del self.keys[at:]
        other.link_below(self)
        return other

    def end(self) -> BlockKey | None:
        """Return the last block, or what the first one continued if none is left."""
        return self.keys[-1] if self.keys else self.parent


R = TypeVar("R", bound=Run)


class Runs(Generic[R]):
    """All runs of a policy, by block. Every operation is O(1) a block that it moves or compares.

    Who asks for a whole chain finds each run by its first block. Where parents are known, most
    blocks are not in the index: one is found by going up its chain, `INDEX_STEP` blocks at most.
    """

    def __init__(self) -> None:
        self.of: dict[BlockKey, R] = {}
        """The run of the first block of each run, and of others."""
        self.blocks = 0
        self._parents: Parents | None = None
        self._ends: dict[BlockKey, R] = {}

    def follow(self, parents: Parents) -> None:
        """Keep few of the blocks in the index that come from now on."""
        self._parents = parents

    def find(self, key: BlockKey) -> R | None:
        """Return the run of a block, or None if it is not resident."""
        run = self.of.get(key)
        if run is not None or self._parents is None:
            return run
        run = self._ends.get(key)
        if run is not None and run.keys and run.keys[-1] == key:
            return run
        above = key
        for _ in range(1, INDEX_STEP):
            parent = self._parents.parent_of(above)
            if parent is None:
                break
            if (run := self.of.get(parent)) is not None:
                return run if key in run.keys else None
            above = parent
        return None

    def resident(self) -> Collection[BlockKey]:
        """Return a live view of all blocks."""
        return self.of if self._parents is None else _Resident(self)

    def ends_with(self, run: R) -> None:
        """Remember the run of a block that is asked for soon, its last one."""
        if self._parents is not None:
            if len(self._ends) >= ENDS_AT_MOST:
                self._ends.clear()
            self._ends[run.keys[-1]] = run

    def add(self, run: R) -> None:
        """Take in the blocks of a run."""
        run.step = 1 if self._parents is None else INDEX_STEP
        self.blocks += len(run.keys)
        self._index(run, run.keys)

    def extend(self, run: R, keys: Sequence[BlockKey]) -> None:
        """Take in blocks that follow a run's last one, as a part of it."""
        first = -len(run.keys) % run.step
        run.keys += keys
        self.blocks += len(keys)
        self._index(run, keys[first:])

    def cut_out(self, run: R, chain: Sequence[BlockKey], at: int) -> R:
        """Return the run that begins with `chain[at]`, which is in `run`, and is all in the chain.

        What `run` has before it or what the chain does not go on with becomes a run of its own.
        """
        keys = run.keys
        if keys[0] != chain[at]:
            run = self._cut(run, keys.index(chain[at]))
            keys = run.keys
        last = at + len(keys) - 1
        # A key says what all before it are.
        if last >= len(chain) or chain[last] != keys[-1]:
            pairs = enumerate(zip(islice(chain, at, None), keys, strict=False))
            self._cut(run, next((same for same, (a, b) in pairs if a != b), len(chain) - at))
        return run

    def next_resident(self, chain: Sequence[BlockKey], at: int) -> int:
        """Return where the next resident block after `chain[at]` is, which is none; or the end."""
        if self._parents is not None and not self._parents.torn:
            return len(chain)
        at += 1
        if at < len(chain) and chain[at] not in self.of:
            # Behind a gap there is mostly nothing; what is there begins a run.
            if self.of.keys().isdisjoint(chain[at:]):
                return len(chain)
            while chain[at] not in self.of:
                at += 1
        return at

    def ending_with(self, key: BlockKey) -> R | None:
        """Return the run whose last block this is, if it is resident."""
        run = self.find(key)
        if run is not None and run.keys[-1] != key:
            self._cut(run, run.keys.index(key) + 1)
        return run

    def remove(self, key: BlockKey) -> R:
        """Forget a resident block. Returns its run, which leaves its list if nothing is left."""
        run = self.find(key)
        assert run is not None, "what is removed is resident"
        self._take(run, key)
        return run

    def make_room(
        self, ring: R, count: int, goes: Callable[[BlockKey], bool]
    ) -> Iterator[tuple[list[BlockKey], R]]:
        """Take out up to `count` blocks that go of a list, coldest first.

        Yields what went in a row, the tail first, and the run that it was the end of.
        """
        for run in walk_runs(ring):
            keys = run.keys
            least = max(len(keys) - count, 0)
            gone = list(takewhile(goes, reversed(keys[least:])))
            stays = len(keys) - len(gone)
            if gone:
                self._drop_tail(run, stays)
                count -= len(gone)
                yield gone, run
            for key in reversed(keys[: stays - 1]) if stays > least else ():
                if not count:
                    break
                if goes(key):
                    count -= 1
                    self._take(run, key)
                    yield [key], run
            if not count:
                return

    def coldest_first(self, ring: R) -> Iterator[BlockKey]:
        """Yield the blocks of a list, tails first. The one just yielded may be removed."""
        for run in walk_runs(ring):
            keys = run.keys
            for at in range(len(keys) - 1, -1, -1):
                if at == len(keys) - 1:
                    self.ends_with(run)
                yield keys[at]

    def _index(self, run: R, keys: Sequence[BlockKey]) -> None:
        """Put one block in a run's `step` into the index, the first one included."""
        self.of.update(dict.fromkeys(keys[:: run.step], run))

    def _take(self, run: R, key: BlockKey) -> None:
        """Take a block out of its run."""
        if run.keys[-1] != key:
            self._cut(run, run.keys.index(key) + 1)
        self._drop_tail(run, len(run.keys) - 1)

    def _drop_tail(self, run: R, stays: int) -> None:
        """Forget what a run has behind its first blocks, of which so many stay."""
        keys = run.keys
        self.blocks -= len(keys) - stays
        for key in keys[stays + -stays % run.step :: run.step]:
            del self.of[key]
        del keys[stays:]
        if not keys:
            run.unlink()

    def _cut(self, run: R, at: int) -> R:
        other = run.cut(at)
        if run.step > 1:
            for key in other.keys[-at % run.step :: run.step]:
                del self.of[key]
        self._index(other, other.keys)
        return other


class _Resident(Collection[BlockKey]):
    """The blocks of runs of which not all are in the index."""

    def __init__(self, runs: Runs[R]) -> None:
        self._runs = runs

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._runs.find(key) is not None

    def __iter__(self) -> Iterator[BlockKey]:
        runs = {id(run): run for run in self._runs.of.values()}
        return joined.from_iterable(run.keys for run in runs.values())

    def __len__(self) -> int:
        return self._runs.blocks


def walk_runs(ring: R) -> Iterator[R]:
    """Yield a list's runs, coldest first. The one just yielded may go, or be cut."""
    run = ring.hotter
    while run is not ring:
        hotter = run.hotter
        yield run
        run = hotter


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
