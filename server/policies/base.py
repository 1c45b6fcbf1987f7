"""The contract of an eviction policy.

A policy is bookkeeping only: no I/O, no clock, no knowledge of leases or tiers. It orders the
blocks of one tier from coldest to hottest and keeps parents hotter than their children, so that a
chain loses its tail before its head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core import BlockKey


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy knows, for the next one to adopt: blocks and weights, coldest first."""

    blocks: tuple[tuple[BlockKey, int], ...]


class EvictionPolicy(ABC):
    """Orders blocks for eviction. Each operation takes O(1) or O(log n) a block."""

    name: ClassVar[str]

    @abstractmethod
    def insert(self, key: BlockKey, weight: int, parent: BlockKey | None) -> None:
        """Take in a new block of `weight` bytes, colder than its resident `parent`."""

    @abstractmethod
    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Record one request's use of a chain, head first. Blocks not resident are passed over."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Forget a resident block."""

    @abstractmethod
    def victims(self) -> Iterator[BlockKey]:
        """Yield resident blocks, coldest first. The caller may remove what was just yielded."""

    @abstractmethod
    def export(self) -> PolicyState:
        """Return what a successor can adopt."""

    @abstractmethod
    def adopt(self, state: PolicyState) -> None:
        """Take over a predecessor's state. Call it on a fresh policy."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of resident blocks."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether the block is resident."""
