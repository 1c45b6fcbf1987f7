"""What MQ remembers of blocks that it evicted: how often they had been used, by run.

A chain leaves tail first and comes back head first. So what left of it in a row is one entry, which
is found by its head, and is forgotten from its tail on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from ..core import BlockKey
from .ghosts import name_of, names_of, too_many
from .links import Link


class GhostRuns:
    """The uses of the blocks evicted last, in the order of eviction.

    Keys are kept as 64-bit names: two blocks that share one would share a count, which harms
    nothing but a guess. A ghost takes 8 bytes, and a run of them about 250. A ghost is missed, and
    in time forgotten, if it comes back although what it continues did not.
    """

    __slots__ = ("_blocks", "_ring", "_runs", "_torn")

    def __init__(self, ghosts: Iterable[tuple[int, int]] = ()) -> None:
        self._runs: dict[int, _GhostRun] = {}
        """By the names of their heads."""
        self._ring = _GhostRun(array("q"), 0, None)
        """From the run evicted first to the one evicted last."""
        self._blocks = 0
        self._torn = 0
        """Of so many of the oldest, what they continue need not be a ghost."""
        for name, uses in ghosts:
            self._append(_GhostRun(array("q", [name]), uses, None))
        self.tear()

    def remember(self, gone: Sequence[BlockKey], uses: int, parent: BlockKey | None) -> None:
        """Keep the `uses` (at least 1) of blocks that were evicted in a row, the tail first.

        The last one continued `parent`. Call `trim` then.
        """
        names = names_of(gone)
        last = self._ring.colder
        if last.parent == gone[0] and last.uses == uses:
            self._take(last)
            last.names += names
            last.parent = parent
            self._append(last)
        else:
            self._append(_GhostRun(names, uses, parent))

    def trim(self, most: int) -> None:
        """Forget the oldest ghosts if there are clearly more than `most`."""
        excess = self._blocks - most
        if not too_many(excess, most):
            return
        self._blocks -= excess
        self._torn = max(self._torn - excess, 0)
        while excess:
            oldest = self._ring.hotter
            gone = min(excess, len(oldest.names))
            excess -= gone
            if gone == len(oldest.names):
                oldest.unlink()
                del self._runs[oldest.names[-1]]
            else:
                del oldest.names[:gone]

    def tear(self) -> None:
        """Note that a block was dropped: what the ghosts up to now continue may be none."""
        self._torn = self._blocks

    def recall(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return and forget how often each block of a chain had been used; 0 if it is no ghost.

        Blocks that follow each other and were used the same come as one: their number, their uses.
        """
        if not self._torn and name_of(keys[0]) not in self._runs:
            return [(len(keys), 0)]
        names = names_of(keys)
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(names):
            blocks, uses = 1, 0
            if (run := self._runs.get(names[at])) is not None:
                blocks, uses = self._cut(run, names, at), run.uses
                run.parent = keys[at + blocks - 1]
            at += blocks
            if found and found[-1][1] == uses:
                blocks += found.pop()[0]
            found.append((blocks, uses))
        return found

    def copy(self) -> GhostRuns:
        """Return an independent copy."""
        other = GhostRuns()
        for run in self._walk():
            other._append(_GhostRun(run.names[:], run.uses, run.parent))
        other._torn = self._torn
        return other

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield the names with their uses, oldest first."""
        for run in self._walk():
            for name in run.names:
                yield name, run.uses

    def __len__(self) -> int:
        return self._blocks

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether a block is a ghost. O(ghosts)."""
        return any(name_of(key) in run.names for run in self._walk())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GhostRuns) and list(self.items()) == list(other.items())

    __hash__ = None  # type: ignore[assignment]

    def _walk(self) -> Iterator[_GhostRun]:
        run = self._ring.hotter
        while run is not self._ring:
            yield run
            run = run.hotter

    def _append(self, run: _GhostRun) -> None:
        """Take in the newest run."""
        self._find_by_head(run)
        run.link_below(self._ring)
        self._blocks += len(run.names)

    def _find_by_head(self, run: _GhostRun) -> None:
        """Let a run be found. Another one with the same head, which was missed before, goes."""
        if (missed := self._runs.get(run.names[-1])) is not None:
            self._take(missed)
        self._runs[run.names[-1]] = run

    def _take(self, run: _GhostRun) -> None:
        del self._runs[run.names[-1]]
        run.unlink()
        self._blocks -= len(run.names)

    def _cut(self, run: _GhostRun, names: array[int], at: int) -> int:
        """Forget what a run has in common with a chain from `at` on. Returns how much that is."""
        same = run.common(names, at)
        del self._runs[names[at]]
        del run.names[-same:]
        self._blocks -= same
        if run.names:
            self._find_by_head(run)
        else:
            run.unlink()
        return same


class _GhostRun(Link):
    """Names of blocks, the tail first, that had been used the same; the last continues `parent`."""

    __slots__ = ("names", "parent", "uses")

    def __init__(self, names: array[int], uses: int, parent: BlockKey | None) -> None:
        super().__init__()
        self.names = names
        self.uses = uses
        self.parent = parent

    def common(self, names: array[int], at: int) -> int:
        """Return how many blocks a chain has in common from `at` on, which is the head."""
        # A key says what all before it are.
        same, most = 1, min(len(self.names), len(names) - at)
        if self.names[-most] == names[at + most - 1]:
            return most
        while most - same > 1:
            middle = (same + most) // 2
            if self.names[-middle] == names[at + middle - 1]:
                same = middle
            else:
                most = middle
        return same
