"""Changes of policy while the server runs: export on the loop, adopt in a thread, then the journal.

Runs on the event loop, which an export holds for some tenths of a microsecond to two microseconds a
block. Swaps of one holder come one after the other.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from .policies import POLICIES, EvictionPolicy
from .policies.handover import Handover


class Holder(Protocol):
    """What has a policy: a pool of the host tier, or the index of a lower tier."""

    policy: EvictionPolicy


class Swaps:
    """All swaps under way."""

    def __init__(self) -> None:
        self._latest: dict[int, asyncio.Task[None]] = {}
        """By holder, which lives as long as the server."""

    def begin(self, holder: Holder, name: str) -> None:
        """Let a policy of that name take over as soon as it can."""
        before = self._latest.get(id(holder))
        swap = _swap(holder, name, before)
        self._latest[id(holder)] = asyncio.get_running_loop().create_task(swap)

    async def close(self) -> None:
        """Give up what is under way: the old policies stay."""
        for task in self._latest.values():
            task.cancel()
        await asyncio.gather(*self._latest.values(), return_exceptions=True)


async def _swap(holder: Holder, name: str, before: asyncio.Task[None] | None) -> None:
    if before is not None:
        await asyncio.wait([before])
    old = holder.policy
    if old.name == name:
        return
    state = old.export()
    meanwhile = holder.policy = Handover(old)
    new = POLICIES[name]()
    try:
        await asyncio.to_thread(new.adopt, state)
        while not meanwhile.tell(new):  # noqa: ASYNC110  # Other work comes in between.
            await asyncio.sleep(0)
    except BaseException:
        holder.policy = old
        raise
    if old.parents is not None:
        new.follow(old.parents)
    holder.policy = new
