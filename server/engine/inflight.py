"""Copies that workers have not all reported: which blocks and keys they concern.

A key that is being stored is not copied twice. A key that is being loaded makes other requests
with the same prefix wait for it, so that it is loaded once, and so that nobody builds on a block
whose load may yet fail. A device block that is being read for a store is fenced before it is
written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .. import protocol as wire
from .plan import Promise, StepPlan
from .requests import Tracked, joined
from .tracing import Span


@dataclass(slots=True)
class Candidate:
    """A block that is complete after a step and could be stored."""

    tracked: Tracked
    position: int
    key: bytes
    parent: bytes
    block: int


@dataclass(slots=True)
class Loading:
    """What one request loads: `slots` into `blocks[first:]`, under the keys from `first` on."""

    request: str
    lease: int
    by: Promise
    first: int
    keys: Sequence[bytes]
    slots: Sequence[int]
    blocks: Sequence[int]
    """All blocks of the request when the load was planned."""
    span: Span


@dataclass(slots=True)
class Plan:
    """One plan's copies. `candidates` and `slots` are parallel."""

    by: Promise
    loads: list[Loading]
    candidates: Sequence[Candidate]
    slots: Sequence[int]
    load_reports: int = 0
    store_reports: int = 0
    discarded: bool = False
    failed: set[int] = field(default_factory=set)
    """Slots that some rank could not load or write."""
    store_span: Span | None = None


class InFlight:
    """Plans under way. Nothing here waits."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._loads: dict[int, Plan] = {}
        self._stores: dict[int, Plan] = {}
        self._keys_loading: Counter[bytes] = Counter()
        self._keys_storing: set[bytes] = set()
        self._blocks_read: dict[int, int] = {}
        """Device block → latest plan that stores it."""

    def __bool__(self) -> bool:
        return bool(self._loads or self._stores)

    def planned(self, loading: Loading) -> None:
        """Take note of a load before its plan exists: its keys are on their way from now on."""
        self._keys_loading.update(loading.keys)

    def start(self, plan: StepPlan, one: Plan) -> None:
        """Take note of a plan's copies."""
        if one.loads:
            self._loads[plan.seq] = one
        if one.candidates:
            self._stores[plan.seq] = one
            for candidate in one.candidates:
                self._keys_storing.add(candidate.key)
                self._blocks_read[candidate.block] = plan.seq

    def loaded(self, seq: int, ranks: int, failed: set[int]) -> Plan | None:
        """Count reports of a plan's loads; return it once all ranks are through with them."""
        if (one := self._loads.get(seq)) is None:
            return None
        one.load_reports += ranks
        one.failed |= failed
        if one.load_reports < self._ranks:
            return None
        del self._loads[seq]
        for loading in one.loads:
            self._keys_loading.subtract(loading.keys)
        self._keys_loading += Counter()  # Without the zeros.
        return one

    def stored(self, seq: int, ranks: int, failed: set[int]) -> Plan | None:
        """Count reports of a plan's stores; return it once all ranks are through with them."""
        if (one := self._stores.get(seq)) is None:
            return None
        one.store_reports += ranks
        one.failed |= failed
        if one.store_reports < self._ranks:
            return None
        del self._stores[seq]
        for candidate in one.candidates:
            self._keys_storing.discard(candidate.key)
            if self._blocks_read.get(candidate.block) == seq:
                del self._blocks_read[candidate.block]
        return one

    def storing(self, key: bytes) -> bool:
        """Return whether a copy of the block into a slot is planned and not committed."""
        return key in self._keys_storing

    def loading_any(self, keys: Iterable[bytes]) -> bool:
        """Return whether one of these blocks is being loaded into the device."""
        return bool(self._keys_loading) and any(key in self._keys_loading for key in keys)

    @property
    def reads(self) -> bool:
        """Whether any device block is being read for a store."""
        return bool(self._blocks_read)

    def fences(self, written: Iterable[int]) -> list[int]:
        """Return the plans whose stores read one of the blocks that are about to be written."""
        return sorted({self._blocks_read[block] for block in written if block in self._blocks_read})

    def discard_stores(self) -> None:
        """Let nothing that is being stored become visible."""
        for one in self._stores.values():
            one.discarded = True

    def promises(self) -> list[Promise]:
        """Return who promised the slots of all copies under way."""
        loads = [loading.by for one in self._loads.values() for loading in one.loads]
        return loads + [one.by for one in self._stores.values()]


def above(candidates: Iterable[Candidate]) -> Iterator[bytes]:
    """Yield the chains that runs of candidates continue."""
    last = b""
    for one in candidates:
        if one.parent != last and one.position:
            yield joined(one.tracked.request.block_hashes[: one.position])
        last = one.key


def chains(pairs: Iterable[tuple[Candidate, int]], salt_key: bytes) -> list[wire.Chain]:
    """Return candidates and their slots as runs in which each block is the next one's parent."""
    found: list[wire.Chain] = []
    last = b""
    for candidate, slot in pairs:
        tenant = candidate.tracked.tenant(salt_key)
        if found and candidate.parent == last and tenant == found[-1].tenant:
            found[-1].keys += candidate.key
            found[-1].slots.append(slot)
        else:
            found.append(wire.Chain(candidate.parent, bytes(candidate.key), [slot], tenant))
        last = candidate.key
    return found
