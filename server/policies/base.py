"""The contract of an eviction policy.

A policy is bookkeeping only: no I/O, no clock, no knowledge of leases or tiers, and it is not told
the tier's capacity: what is resident when a block is evicted is the capacity. It orders the blocks
of one tier from coldest to hottest and keeps parents hotter than their children, so that a chain
loses its tail before its head.

One request counts as one use of each of its blocks: one `touch` of the whole chain that it asked
for, and an `insert` of what was not there. Weights are in bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from ..core import BlockKey
from .ghost_runs import GhostRuns
from .ghosts import Ghosts

NOTHING: Mapping[str, float] = MappingProxyType({})


class Parents(Protocol):
    """Who knows how the resident blocks of a tier continue each other."""

    @property
    def torn(self) -> bool:
        """Whether the parent of any resident block is not resident."""

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """Return the parent of a resident block; None for a head, and for what is not resident."""


class Known(NamedTuple):
    """What a policy knows of one resident block."""

    key: BlockKey
    weight: int
    uses: int
    """Requests that used it, as far as the policy counts them; at least 1."""
    parent: BlockKey | None
    """None at the head of a chain. The parent need not be resident."""

    def node(self) -> tuple[BlockKey, int, BlockKey | None, int]:
        """Return what a policy's own record of a block begins with."""
        return self.key, self.weight, self.parent, self.uses


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy knows, for the next one to adopt."""

    blocks: tuple[Known, ...]
    """Coldest first; a parent stands after its children."""
    ghosts: Ghosts | GhostRuns = field(default_factory=Ghosts)
    """Uses of blocks that are not resident any more."""
    learnt: Mapping[str, float] = field(default_factory=dict)
    """Numbers that only a policy of the same kind understands, by name."""


class EvictionPolicy(ABC):
    """Orders blocks for eviction. Each operation takes O(1) or O(log n) a block, or less.

    A block leaves in one of two ways: `evict` says that it went for room, and that it is worth
    remembering; `remove` that it was dropped and means nothing.
    """

    name: ClassVar[str]
    parents: Parents | None = None
    """Whom the policy may ask; see `follow`."""

    def follow(self, parents: Parents) -> None:
        """Ask for parents from now on, so that not all have to be kept here.

        They are known from before a block is taken in until it is taken out, or said to go.
        """
        self.parents = parents

    @property
    def deciding(self) -> str:
        """The name of the policy that says what goes at present."""
        return self.name

    @abstractmethod
    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks of `weight` bytes each, none of them resident, each colder than the last.

        They follow each other in a chain; the first one continues `parent`.
        """

    @abstractmethod
    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Record one request's use of the chain that it asked for, from the first block on.

        It includes blocks that are not resident: they tell a policy what a hit would have been.
        """

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Forget a resident block that is dropped."""

    def evict(self, key: BlockKey) -> None:
        """Take out a resident block that goes for room. It may be remembered as a ghost."""
        self.remove(key)

    def make_room(self, count: int, goes: Callable[[BlockKey], bool]) -> int:
        """Evict up to `count` of the victims: those of which `goes` says so. Returns how many.

        `goes` makes no call of this policy.
        """
        left = count
        for key in self.victims() if count else ():
            if goes(key):
                self.evict(key)
                left -= 1
                if not left:
                    break
        return count - left

    @abstractmethod
    def victims(self) -> Iterator[BlockKey]:
        """Yield resident blocks, coldest first, a parent never before its resident children.

        The caller may remove or evict what was just yielded, may pass it over, and may stop at any
        time; it makes no other call meanwhile. A parent whose children are all passed over may be
        left out. What is evicted as it comes leaves nothing behind.
        """

    @abstractmethod
    def export(self) -> PolicyState:
        """Return what a successor can adopt, independent of this policy. O(blocks)."""

    @abstractmethod
    def adopt(self, state: PolicyState) -> None:
        """Take over a predecessor's state: its order, and what fits of the rest. O(blocks).

        Call it once, on a policy that is empty.
        """

    @property
    @abstractmethod
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there, as a live view in which to look one up takes O(1)."""

    def leading(self, chain: Sequence[BlockKey]) -> int:
        """Return how many blocks of a chain are resident, from the first one on."""
        resident = self.resident
        for at, key in enumerate(chain):
            if key not in resident:
                return at
        return len(chain)

    def fill(self, chain: Sequence[BlockKey], start: int, weight: int) -> int:
        """Take in what is not resident of a chain from `start` on. Returns how many that was."""
        resident = self.resident
        filled, at, end = 0, start, len(chain)
        while at < end:
            begin = at
            while at < end and chain[at] not in resident:
                at += 1
            if at > begin:
                self.insert(chain[begin:at], weight, chain[begin - 1] if begin else None)
                filled += at - begin
            at += 1
        return filled

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        return len(self.resident)

    def __contains__(self, key: object) -> bool:
        """Return whether the block is resident."""
        return key in self.resident


def credited_uses(blocks: Sequence[Known]) -> list[int]:
    """Return each block's uses, but no more than those of any hotter one.

    What a predecessor counted thus counts here without changing the order that it had settled on.
    """
    credited = [0] * len(blocks)
    least = max((known.uses for known in blocks), default=1)
    for at in range(len(blocks) - 1, -1, -1):
        least = credited[at] = min(least, blocks[at].uses)
    return credited
