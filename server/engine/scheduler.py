"""The scheduler side: what to load, what to store, and what to tell the server, step by step.

It asks the server once a request (a lookup), and otherwise only talks when blocks filled. While a
request loads a prefix, others with the same prefix wait: so it is loaded once, and nobody computes
on top of a block whose load may fail. If one fails, vLLM computes it again, what vLLM's own prefix
cache had taken for loaded is forgotten, and nothing computed on top of it is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import Logger
from typing import Any

from .. import protocol as wire
from ..core import Tier, seal_seed
from .account import Account
from .events import EventFeed
from .inflight import Candidate, InFlight, Loading, Plan, above, chains
from .lookups import Lookups
from .meter import Meter
from .plan import NOBODY, Load, Move, StepPlan, WorkerReport
from .requests import Awaited, Tracked, joined, track
from .stats import BYPASSED, MISSES, ConnectorStats
from .tracing import LOAD, STORE, Span, Tracer

IDLE_SECONDS = 0.005
"""For which a step waits for the answer to a lookup, at most, if the one before was empty."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What the scheduler side knows of its engine. `ranks` report each plan."""

    block_tokens: int
    block_bytes: int
    """Of all ranks."""
    ranks: int
    asynchronous: bool
    """Loads go on beside the model, and vLLM must be told so."""


class SchedulerSide:
    """The half of the connector that lives beside vLLM's scheduler."""

    def __init__(
        self,
        account: Account,
        options: SchedulerOptions,
        log: Logger,
        tracer: Tracer,
        events: EventFeed | None,
    ) -> None:
        self.asynchronous = options.asynchronous
        self.cache_manager: Any = None
        """vLLM's own, once it is bound: to forget blocks whose load failed."""
        self._account = account
        self._block_tokens = options.block_tokens
        self._block_bytes = options.block_bytes
        self._log = log
        self._tracer = tracer
        self._lookups = Lookups(account, tracer, options.block_tokens)
        self._meter = Meter()
        self._events = events
        self._events_by = NOBODY
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Loading] = []
        self._trailing: list[tuple[Tracked, list[int]]] = []
        self._inflight = InFlight(options.ranks)
        self._bypassed: Counter[str] = Counter()
        self._seq = 0
        self._idle = False
        """The last step computed and copied nothing."""

    # vLLM's hooks, in the order of a request's life.

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Return how many tokens after `computed` the server has ready, leased to the request.

        None asks vLLM to come back with this request in a later step.
        """
        self._account.meet()
        tracked = self._track(request)
        first = computed // self._block_tokens
        last = tracked.reusable(self._block_tokens)
        hashes = request.block_hashes[:last]
        if self._inflight.loading_any(hashes):
            return None
        found = self._lookups.known(tracked, first, last, self._patience())
        if found is None:
            tracked.stored, tracked.refill = first, []
            if not self._may_ask(tracked, first, last):
                return 0
            found = self._lookups.ask(tracked, hashes, first)
        if isinstance(found, Awaited):
            return None
        return 0 if found is None else len(found.slots) * self._block_tokens

    def _patience(self) -> float:
        """Return for how many seconds this step may wait for the answer to a lookup.

        An engine that has nothing else to do would ask again and again, and take the cores from
        those that read: it waits a little, once a step.
        """
        patience, self._idle = (IDLE_SECONDS if self._idle else 0.0), False
        return patience

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Plan the load of `external` tokens into the request's `blocks`."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.bypass:
            return
        match, tracked.match = tracked.match, None
        first, loaded = tracked.stored, external // self._block_tokens
        if match is not None and loaded:
            keys = request.block_hashes[first : first + loaded]
            slots = match.slots[:loaded]
            span = self._tracer.span(LOAD, request.trace_headers)
            loading = Loading(
                request.request_id, match.lease, match.by, first, keys, slots, [*blocks], span
            )
            self._loads.append(loading)
            self._inflight.planned(loading)
        elif match is not None:
            self._lookups.release(match)
        elif first and not tracked.admitted:
            self._account.say.touches.append(joined(request.block_hashes[:first]))
        tracked.stored = first + loaded
        if not tracked.admitted:
            tracked.admitted = True
            self._count(tracked, first, match.origins(loaded) if match else (0, 0, 0))

    def plan_step(self, scheduler_output: Any) -> StepPlan:
        """Return the copies of this step."""
        self._account.meet()
        loads, self._loads = self._loads, []
        plan = StepPlan(
            by=self._account.by,
            loads=[_load(loading) for loading in loads],
            finished=[tracked.request.request_id for tracked, _ in self._trailing],
        )
        candidates: Sequence[Candidate] = ()
        slots: list[int] = []
        if plan.by is not NOBODY and (candidates := self._candidates(scheduler_output)):
            key = self._account.salt_key
            tenants = (candidate.tracked.tenant(key) for candidate in candidates)
            slots = self._account.take_slots(len(candidates), above(candidates), tenants)
            for cut in candidates[len(slots) :]:
                cut.tracked.refused = True
            candidates = candidates[: len(slots)]
            self._mark_stored(candidates)
        self._trailing = []
        plan.stores = [
            Move(one.block, slot, seal_seed(one.key))
            for one, slot in zip(candidates, slots, strict=True)
        ]
        if self._inflight.reads:
            plan.fences = self._inflight.fences(self._written(scheduler_output, loads))
        if plan.loads or plan.stores or plan.finished:
            self._seq += 1
            plan.seq = self._seq
            one = Plan(plan.by, loads, candidates, slots)
            if candidates:
                headers = candidates[0].tracked.request.trace_headers
                one.store_span = self._tracer.span(STORE, headers)
            self._inflight.start(plan, one)
        self._account.settle(self._inflight.promises())
        measure = self._meter.take()
        self._account.say.prefill_tokens, self._account.say.prefill_seconds = measure
        self._account.flush()
        self._meter.planned(scheduler_output.num_scheduled_tokens.values())
        self._idle = not (scheduler_output.num_scheduled_tokens or self.busy)
        return plan

    def stepped(self) -> None:
        """A step has its output."""
        self._meter.stepped()

    def reported(self, report: WorkerReport) -> None:
        """Commit what all ranks have copied, and end the leases of what they have loaded."""
        self._account.meet()
        for seq, ranks in report.loaded.items():
            if (done := self._inflight.loaded(seq, ranks, report.unloaded)) is not None:
                self._finish_loads(done, report.unreadable)
        for seq, ranks in report.stored.items():
            if (done := self._inflight.stored(seq, ranks, report.unwritten)) is not None:
                self._finish_stores(done)
        self._account.flush()

    def distrust(self) -> None:
        """Let nothing under way become visible: blocks that it may stand on were not loaded.

        Whose load it was is not known: beside others, as a child of MultiConnector, any one's.
        """
        self._inflight.discard_stores()

    def finished(self, request: Any, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request.

        Returns whether its blocks must wait for a last store, and what to tell the user.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._lookups.forget(tracked)
        answer = {"kvtier": {"error": tracked.refusal}} if tracked.refusal else None
        ended_well = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        if not ended_well or not _stores(tracked) or self._account.by is NOBODY:
            return False, answer
        full = tracked.cacheable(request.num_computed_tokens, self._block_tokens)
        if tracked.stored >= min(full, len(blocks)):
            return False, answer
        self._trailing.append((tracked, [*blocks]))
        return True, answer

    def reset(self) -> bool:
        """Drop the namespace's blocks on the server; what is being copied is never committed."""
        self._inflight.discard_stores()
        for tracked in self._requests.values():
            self._lookups.forget(tracked)
        self._account.flush()
        self._account.reset()
        return True

    @property
    def busy(self) -> bool:
        """Whether copies are under way that a further step must report."""
        return bool(self._inflight)

    def take_events(self) -> Iterable[Any]:
        """Return what became of blocks in the server's tiers, as vLLM's KV events."""
        if self._events is None:
            return ()
        self._account.meet()
        lost = []
        if self._events_by not in (NOBODY, self._account.by):
            lost = self._events.lost()
        self._events_by = self._account.by
        return [*lost, *self._events.take(self._account.changes())]

    def take_stats(self) -> ConnectorStats | None:
        """Return misses and bypasses by reason since the last call; None if there were none."""
        counts = {f"{MISSES}:{why}": n for why, n in self._account.take_failures().items()}
        counts |= {f"{BYPASSED}:{why}": n for why, n in self._bypassed.items()}
        self._bypassed.clear()
        return ConnectorStats(counts) if counts else None

    def close(self) -> None:
        """Leave the server."""
        self._account.close()
        self._tracer.close()

    # Lookups and loads.

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = track(request, self._block_tokens)
            if tracked.bypass is not None:
                self._bypassed[tracked.bypass] += 1
            if tracked.refusal:
                self._log.warning("a request goes past the cache: %s", tracked.refusal)
        return tracked

    def _end(self, span: Span, blocks: int, failed: int) -> None:
        span.end(
            tokens=blocks * self._block_tokens,
            bytes=blocks * self._block_bytes,
            failed_blocks=failed,
            tier=Tier.HOST,
        )

    def _finish_loads(self, done: Plan, unreadable: set[int]) -> None:
        for loading in done.loads:
            if loading.by == self._account.by:
                worthless = [slot for slot in loading.slots if slot in unreadable]
                self._account.say.unreadable += worthless
                self._account.say.releases.append(loading.lease)
            positions = enumerate(loading.slots, loading.first)
            lost = [at for at, slot in positions if slot in done.failed]
            if lost:
                self._forget_from(loading, lost)
            self._end(loading.span, len(loading.slots), len(lost))

    def _forget_from(self, loading: Loading, lost: Sequence[int]) -> None:
        """Undo what was built on blocks that could not be loaded.

        vLLM's prefix cache has entries for them and for what follows already, and would serve
        them to others before they are computed again.
        """
        if self.cache_manager is not None:
            self.cache_manager.evict_blocks(set(loading.blocks[lost[0] :]))
        if (tracked := self._requests.get(loading.request)) is not None:
            tracked.refill = [at for at in tracked.refill if at < lost[0]]
            tracked.stored = min(tracked.stored, lost[0])
            tracked.load_failed = True

    def _may_ask(self, tracked: Tracked, first: int, last: int) -> bool:
        """Return whether the server may have something for a request."""
        if last <= first or tracked.bypass or not tracked.controls.load:
            return False
        return not (tracked.request.skip_reading_prefix_cache or tracked.load_failed)

    def _count(self, tracked: Tracked, device: int, lower: tuple[int, int, int]) -> None:
        asked = tracked.reusable(self._block_tokens)
        if asked:
            tenant = tracked.tenant(self._account.salt_key)
            self._account.say.asked.append(wire.Asked(tenant, asked, device, *lower))

    # Stores.

    def _mark_stored(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            tracked, position = candidate.tracked, candidate.position
            tracked.stored = max(tracked.stored, position + 1)
            if self._events is not None:
                self._events.remember(tracked.request, position, position + 1)

    def _candidates(self, scheduler_output: Any) -> list[Candidate]:
        """Return the blocks that are complete after this step, each key once, parents first."""
        found: dict[bytes, Candidate] = {}
        for ended, its_blocks in self._trailing:
            self._add_candidates(found, ended, its_blocks, ended.request.num_computed_tokens)
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or not _stores(tracked):
                continue
            computed = tracked.request.num_computed_tokens + scheduled
            if tracked.refill or computed // self._block_tokens > tracked.stored:
                blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
                self._add_candidates(found, tracked, blocks, computed)
        return list(found.values())

    def _add_candidates(
        self, found: dict[bytes, Candidate], tracked: Tracked, blocks: Sequence[int], computed: int
    ) -> None:
        hashes = tracked.request.block_hashes
        full = min(tracked.cacheable(computed, self._block_tokens), len(blocks))
        for position in [*tracked.refill, *range(tracked.stored, full)]:
            key = hashes[position]
            if not self._inflight.storing(key) and key not in found:
                parent = hashes[position - 1] if position else b""
                found[key] = Candidate(tracked, position, key, parent, blocks[position])
            elif position == tracked.stored:
                tracked.stored += 1
        tracked.refill = []

    def _written(self, scheduler_output: Any, loads: Iterable[Loading]) -> list[int]:
        """Return the device blocks that this step writes, by computing or by loading."""
        written: list[int] = []
        for loading in loads:
            written += loading.blocks[loading.first :]
        for request_id in scheduler_output.num_scheduled_tokens:
            blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0]
            tracked = self._requests.get(request_id)
            computed = 0 if tracked is None else tracked.request.num_computed_tokens
            written += blocks[computed // self._block_tokens :]
        return written

    def _finish_stores(self, done: Plan) -> None:
        if done.store_span is not None:
            failed = sum(slot in done.failed for slot in done.slots)
            self._end(done.store_span, len(done.slots), failed)
        if done.by != self._account.by:
            return
        lost = set(done.slots) if done.discarded else done.failed
        pairs = zip(done.candidates, done.slots, strict=True)
        self._account.say.aborts += [slot for slot in done.slots if slot in lost]
        stored = (pair for pair in pairs if pair[1] not in lost)
        self._account.say.commits += chains(stored, self._account.salt_key)


def _load(loading: Loading) -> Load:
    blocks = loading.blocks[loading.first : loading.first + len(loading.slots)]
    moves = [
        Move(block, slot, seal_seed(key))
        for block, slot, key in zip(blocks, loading.slots, loading.keys, strict=True)
    ]
    return Load(loading.request, loading.by, moves)


def _stores(tracked: Tracked) -> bool:
    return tracked.bypass is None and tracked.controls.store and not tracked.refused
