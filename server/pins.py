"""Pins: prefixes that an operator keeps in the host tier for a while.

A pin leases the blocks of a prefix, so that nothing evicts them and their slabs do not move. It is
a prefix without gaps, always: where a block of it is dropped, the pin ends before that block. All
pins together take at most a share of the tier. They do not outlive the server. Runs on the event
loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from .core import SLOT_INDEX_BITS, BlockKey
from .directory import Block, Namespace
from .errors import KVTierError
from .eviction import Evictor
from .sizes import format_size
from .waiting import Timer

PINS_AT_MOST = 1000
DEFAULT_SHARE = 0.25
"""Of the host tier's capacity that pins may take."""


class PinRefused(KVTierError):
    """There is nothing to pin, or no room for it."""


@dataclass(slots=True, eq=False)
class Pin:
    """One prefix that is kept. `expires` is a time of the server's clock."""

    label: str
    name: str
    space: Namespace
    blocks: list[Block]
    """Visible, head first, each the parent of the next one."""
    expires: float
    timer: Timer


class Pins:
    """All pins. `later(seconds, call)` makes a call on the loop after so many seconds."""

    def __init__(
        self,
        evictor: Evictor,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self.share = DEFAULT_SHARE
        self.pinned_bytes = 0
        """Of blocks that pins hold, each counted once."""
        self._evictor = evictor
        self._clock = clock
        self._later = later
        self._pins: dict[str, Pin] = {}
        """That which was made hot last stands last."""
        self._times: dict[Block, int] = {}
        """How many pins hold each block."""
        evictor.held_up = self._make_one_hot

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, block: object) -> bool:
        """Return whether a pin holds the block."""
        return block in self._times

    @property
    def budget_bytes(self) -> int:
        """What pins may take in all."""
        return int(self.share * self._evictor.host.options.capacity_bytes)

    def add(self, space: Namespace, keys: Sequence[BlockKey], seconds: float, name: str) -> Pin:
        """Keep what the host tier has of a chain for so many seconds. Raises PinRefused."""
        blocks = space.prefix(keys, 0)
        self._check(space, blocks)
        label = secrets.token_hex(6)
        timer = self._later(seconds, partial(self._end, label))
        pin = Pin(label, name, space, blocks, self._clock() + seconds, timer)
        self._pins[label] = pin
        for block in blocks:
            block.leases += 1
            if block not in self._times:
                self.pinned_bytes += space.pool.slot_bytes
            self._times[block] = self._times.get(block, 0) + 1
        return pin

    def remove(self, label: str) -> bool:
        """End a pin. Returns whether there was such a one."""
        if (pin := self._pins.pop(label, None)) is None:
            return False
        pin.timer.cancel()
        self._let_go(pin, 0)
        return True

    def _end(self, label: str) -> None:
        self.remove(label)

    def of(self, space: Namespace) -> list[Pin]:
        """Return a namespace's pins."""
        return [pin for pin in self._pins.values() if pin.space is space]

    def slabs(self) -> set[int]:
        """Return the numbers of slabs that pinned blocks lie in. O(pinned blocks)."""
        return {block.slot >> SLOT_INDEX_BITS for block in self._times}

    def discard(self, space: Namespace) -> None:
        """The namespace is reset: its pins end."""
        for pin in self.of(space):
            self.remove(pin.label)

    def cut(self, space: Namespace, gone: Collection[Block]) -> None:
        """Blocks are about to be dropped: pins end before the first of them that they hold."""
        if self._times.keys().isdisjoint(gone):
            return
        for pin in self.of(space):
            at = next((at for at, block in enumerate(pin.blocks) if block in gone), None)
            if at == 0:
                self.remove(pin.label)
            elif at is not None:
                self._let_go(pin, at)

    def _check(self, space: Namespace, blocks: Sequence[Block]) -> None:
        if not blocks:
            raise PinRefused(
                "Nothing of this prefix is in the host tier: use it, or prefetch it, and pin it "
                "then."
            )
        if len(self._pins) >= PINS_AT_MOST:
            raise PinRefused(f"There are {PINS_AT_MOST} pins: remove one first.")
        fresh = sum(block not in self._times for block in blocks) * space.pool.slot_bytes
        free = max(self.budget_bytes - self.pinned_bytes, 0)
        if fresh > free:
            raise PinRefused(
                f"This prefix takes {format_size(fresh)} more, and of the "
                f"{format_size(self.budget_bytes)} that pins may take (host.pin_share) "
                f"{format_size(free)} are free: remove a pin, or raise host.pin_share."
            )

    def _let_go(self, pin: Pin, at: int) -> None:
        """End the leases of a pin's blocks from `at` on."""
        gone = pin.blocks[at:]
        del pin.blocks[at:]
        for block in gone:
            self._times[block] -= 1
            if not self._times[block]:
                del self._times[block]
                self.pinned_bytes -= pin.space.pool.slot_bytes
        self._evictor.unlease(pin.space, gone)

    def _make_one_hot(self, space: Namespace) -> None:
        """Eviction passed over many blocks that may not go: let it not meet a pin's so soon again.

        One pin each time, so that no turn of the loop is held for all of them.
        """
        pin = next((pin for pin in self._pins.values() if pin.space is space), None)
        if pin is not None:
            self._pins[pin.label] = self._pins.pop(pin.label)
            space.touch([block.key for block in pin.blocks])
