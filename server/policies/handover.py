"""A change of policy while requests go on, in which nothing of what was learnt is lost.

The old policy decides until the new one has taken over its state, which takes microseconds a block
and is done in a thread. What happens meanwhile is written down, and the new one is told of it
before it decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import ClassVar

from ..core import BlockKey
from .base import EvictionPolicy, PolicyState

TOLD_AT_ONCE = 200
"""Entries of the journal of which the new policy is told in one turn of the loop."""


class Handover(EvictionPolicy):
    """Stands in for the old policy, and keeps a journal for the new one."""

    name: ClassVar[str] = "handover"

    def __init__(self, old: EvictionPolicy) -> None:
        self.old = old
        self._journal: deque[Callable[[EvictionPolicy], None]] = deque()

    @property
    def deciding(self) -> str:
        """The old policy's name."""
        return self.old.deciding

    def tell(self, new: EvictionPolicy) -> bool:
        """Tell the new policy some of what happened. Returns whether it knows all by now."""
        for _ in range(min(len(self._journal), TOLD_AT_ONCE)):
            self._journal.popleft()(new)
        return not self._journal

    def insert(self, keys: Sequence[BlockKey], weight: int, parent: BlockKey | None) -> None:
        """Take in blocks."""
        self.old.insert(keys, weight, parent)
        kept = list(keys)
        self._journal.append(lambda new: new.insert(kept, weight, parent))

    def touch(self, chain: Sequence[BlockKey]) -> None:
        """Record a use."""
        self.old.touch(chain)
        kept = list(chain)
        self._journal.append(lambda new: new.touch(kept))

    def remove(self, key: BlockKey) -> None:
        """Forget a block."""
        self.old.remove(key)
        self._journal.append(lambda new: new.remove(key))

    def evict(self, key: BlockKey) -> None:
        """Take out a block."""
        self.old.evict(key)
        self._evicted(key)

    def make_room(self, count: int, goes: Callable[[BlockKey], bool]) -> int:
        """Evict up to `count` blocks that may go, as the old policy orders them."""
        return self.old.make_room(count, partial(self._goes, goes))

    def victims(self) -> Iterator[BlockKey]:
        """Yield what the old policy yields."""
        return self.old.victims()

    def export(self) -> PolicyState:
        """Return what the old policy knows."""
        return self.old.export()

    def adopt(self, state: PolicyState) -> None:  # noqa: ARG002
        """Nothing is handed to what stands in."""
        raise AssertionError("a handover begins with a policy that knows something")

    @property
    def resident(self) -> Collection[BlockKey]:
        """The blocks that are there."""
        return self.old.resident

    def _goes(self, goes: Callable[[BlockKey], bool], key: BlockKey) -> bool:
        if not goes(key):
            return False
        self._evicted(key)
        return True

    def _evicted(self, key: BlockKey) -> None:
        self._journal.append(lambda new: new.evict(key))
