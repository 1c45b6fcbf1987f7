"""Transfers over host memory that come as late as their contract allows.

An engine on CPU copies at once, so a fence that is forgotten or a block that is freed too early
does no harm there. Here it gives wrong bytes: from the call on, what a transfer writes is rubbish,
and it is carried out only when its caller has polled it often enough, or fenced it, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from kvtier.engine.paging import Copy, HostPaging, Paging, Transfer

RUBBISH = 0x5A


class LateTransfer:
    """Copies that are carried out at the `polls`-th call of `done`."""

    def __init__(self, carry_out: Callable[[], object], polls: int) -> None:
        self._carry_out: Callable[[], object] | None = carry_out
        self._polls = polls

    def done(self) -> bool:
        self._polls -= 1
        if self._polls <= 0:
            self.finish()
        return self._carry_out is None

    def finish(self) -> None:
        """Carry it out now, if it was not."""
        if self._carry_out is not None:
            self._carry_out()
            self._carry_out = None


class LatePaging(Paging):
    """Asynchronous, over the pages of `inner`."""

    asynchronous = True

    def __init__(self, inner: HostPaging, polls: int) -> None:
        self.layers, self.layout = inner.layers, inner.layout
        self.shard_bytes = inner.shard_bytes
        self._inner = inner
        self._polls = polls
        self._transfers: list[LateTransfer] = []
        self._slabs: dict[int, torch.Tensor] = {}
        self.late = 0
        """Transfers so far: a test can see that there were any."""

    def attach(self, slab: torch.Tensor) -> None:
        assert slab.data_ptr() not in self._slabs, "a slab is attached once"
        self._slabs[slab.data_ptr()] = slab

    def detach(self, slab: torch.Tensor) -> None:
        self._finish_all()
        self._slabs.pop(slab.data_ptr(), None)

    def begin_step(self) -> None:
        """Nothing is put off until then."""

    def load(self, copies: Sequence[Copy]) -> Transfer:
        self._check(copies)
        rubbish = torch.full((self.shard_bytes,), RUBBISH, dtype=torch.uint8)
        self._inner.load([Copy(copy.block, rubbish) for copy in copies])
        return self._late(partial(self._inner.load, list(copies)))

    def store(self, copies: Sequence[Copy]) -> Transfer:
        self._check(copies)
        for copy in copies:
            copy.shard.fill_(RUBBISH)
        return self._late(partial(self._inner.store, list(copies)))

    def fence(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            if isinstance(transfer, LateTransfer):
                transfer.finish()

    def close(self) -> None:
        self._finish_all()
        self._slabs.clear()
        self._inner.close()

    def _late(self, carry_out: Callable[[], object]) -> LateTransfer:
        transfer = LateTransfer(carry_out, self._polls)
        self._transfers.append(transfer)
        self.late += 1
        return transfer

    def _finish_all(self) -> None:
        for transfer in self._transfers:
            transfer.finish()
        self._transfers.clear()

    def _check(self, copies: Sequence[Copy]) -> None:
        for _, shard in copies:
            start, size = shard.data_ptr(), shard.numel()
            assert size == self.shard_bytes
            assert any(
                slab.data_ptr() <= start and start + size <= slab.data_ptr() + slab.numel()
                for slab in self._slabs.values()
            ), "a shard lies in an attached slab"
