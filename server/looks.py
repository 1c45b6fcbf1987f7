"""Looks through a lower tier's medium: what is there at the start, and what others write later.

A look is one job of the tier's pool. What it sees comes to the index a part at a time, and to the
policy in the order of use. Runs on the event loop, but for the job itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .records import Order, RecordIndex
from .tiers.base import RecordStore
from .tiers.pool import Steps

RESCAN_SECONDS = 5.0
"""How often a directory that other servers may share is looked through for changes."""
PAUSES = 20
"""After a look that took long, the next one comes after so many times as long."""
ORDERED_AT_ONCE = 250
"""Records of a look that the policy is told of in one turn of the loop."""
NEVER = float("inf")


class Looks:
    """The looks of one tier, one after the other. `over` is told whether each went well."""

    def __init__(
        self,
        store: RecordStore,
        index: RecordIndex,
        steps: Steps,
        clock: Callable[[], float],
        over: Callable[[bool], None],
    ) -> None:
        self.again = NEVER
        """When the next one is due; never before the first one, and while one is under way."""
        self._store = store
        self._index = index
        self._steps = steps
        self._clock = clock
        self._over = over
        self._since = 0.0

    def begin(self) -> Callable[[], None]:
        """Begin a look. Returns its work, for a thread; call `seen` when that is done."""
        self.again = NEVER
        self._since = self._clock()
        self._index.begin_look()
        return self._scan

    def seen(self, well: bool) -> None:
        """The medium was looked through: what it showed is on its way to the index."""
        self._steps.hand_in(partial(self._all_known, well))

    def soon(self) -> None:
        """Something changed on the medium that only a look shows."""
        self.again = min(self.again, self._clock())

    def _scan(self) -> None:
        """Hand over what the store holds, a part at a time. Runs in a thread."""
        order = Order()
        for listing in self._store.scan():
            order.note(listing)
            self._steps.hand_in(partial(self._index.take_in, listing))
        found = order.coldest_first()
        for at in range(0, len(found), ORDERED_AT_ONCE):
            self._steps.hand_in(partial(self._index.order, found[at : at + ORDERED_AT_ONCE]))

    def _all_known(self, well: bool) -> None:
        now = self._clock()
        self.again = now + max(RESCAN_SECONDS, PAUSES * (now - self._since))
        self._over(well)
