"""The scheduler side: what to load, what to store, and what to tell the server, step by step.

It asks the server once a request (a lookup), and otherwise only talks when blocks filled. Slots
for stores come from a small stock, so that a step waits for the server only when the stock is too
small. A slot belongs to the session it was promised in: after a reconnection, what was promised
before is never committed, and the server is told when no worker copies for it any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import protocol as wire
from ..client import Client
from .plan import StepPlan, WorkerReport
from .stats import MISSES, ConnectorStats

STOCK = 32
"""Slots that the server is asked to keep ready for this engine."""
STEPS_BETWEEN_ASKS = 8
"""Steps without asking, after the server could not give enough slots."""


class Promise(NamedTuple):
    """Who promised slots: a server's start and the session with it; `NOBODY` if none."""

    server: str
    session: int


NOBODY = Promise("", 0)


@dataclass(slots=True)
class Match:
    """A lookup's answer, until vLLM has allocated blocks for it."""

    first: int
    last: int
    slots: list[int]
    by: Promise


@dataclass(slots=True)
class Tracked:
    """A request that vLLM has not finished. Positions count blocks of the request."""

    request: Any
    stored: int = 0
    """Blocks before this one are held by the server, or on their way, or not ours to store."""
    refill: list[int] = field(default_factory=list)
    """Blocks before `stored` that the device holds and the server does not."""
    match: Match | None = None


@dataclass(slots=True)
class Candidate:
    """A block that is complete after this step and could be stored."""

    request: str
    position: int
    key: bytes
    parent: bytes
    block: int


@dataclass(slots=True)
class Outstanding:
    """A plan that workers have not all carried out. `candidates` and `slots` are parallel."""

    by: Promise
    candidates: list[Candidate]
    slots: list[int]
    loading: list[str]
    reports: int = 0
    discarded: bool = False


class SchedulerSide:
    """The half of the connector that lives beside vLLM's scheduler."""

    def __init__(self, client: Client, block_tokens: int, ranks: int) -> None:
        self._client = client
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._requests: dict[str, Tracked] = {}
        self._loads: list[tuple[str, Match, list[int]]] = []
        self._trailing: list[tuple[Tracked, list[int]]] = []
        self._storing: set[bytes] = set()
        """Keys whose copies are planned and not committed: nothing is copied twice."""
        self._outstanding: dict[int, Outstanding] = {}
        self._outbox = wire.Step(seq=0)
        self._stock: list[int] = []
        self._by = NOBODY
        self._settled = NOBODY
        self._seq = 0
        self._asks_paused = 0

    # vLLM's hooks, in the order of a request's life.

    def matched_tokens(self, request: Any, computed: int) -> int:
        """Return how many tokens after `computed` the server has ready, leased to the request."""
        self._meet()
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        first = computed // self._block_tokens
        last = self._reusable(request)
        match = tracked.match
        if match is not None and (match.by, match.first, match.last) == (self._by, first, last):
            return len(match.slots) * self._block_tokens
        self._forget_match(tracked)
        tracked.stored, tracked.refill = first, []
        if last <= first or bypassed(request) or request.skip_reading_prefix_cache:
            return 0
        keys = b"".join(request.block_hashes[:last])
        found = self._client.lookup(request.request_id, keys, first)
        if found is None:
            return 0
        tracked.match = Match(first, last, found.slots, self._by)
        tracked.refill = found.absent
        return len(found.slots) * self._block_tokens

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Plan the load of `external` tokens into the request's `blocks`."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or bypassed(request):
            return
        match, tracked.match = tracked.match, None
        first, loaded = tracked.stored, external // self._block_tokens
        if match is not None and loaded:
            match.slots = match.slots[:loaded]
            self._loads.append((request.request_id, match, [*blocks[first : first + loaded]]))
        elif match is not None and match.slots:
            self._outbox.releases.append(request.request_id)
        elif match is None and first:
            self._outbox.touches.append(b"".join(request.block_hashes[:first]))
        tracked.stored = first + loaded
        if not request.num_preemptions:
            self._outbox.asked += self._reusable(request)
            self._outbox.device += first
            self._outbox.host += loaded

    def plan_step(self, scheduler_output: Any) -> StepPlan:
        """Return the copies of this step."""
        self._meet()
        plan = StepPlan(finished=[tracked.request.request_id for tracked, _ in self._trailing])
        loads, self._loads = self._loads, []
        by = loads[0][1].by if loads else self._by
        for _, match, blocks in loads:
            plan.loads += zip(blocks, match.slots, strict=True)
        candidates: list[Candidate] = []
        slots: list[int] = []
        if self._by is not NOBODY and by == self._by:
            candidates = self._candidates(scheduler_output)
            slots = self._take_slots(len(candidates)) if candidates else []
            candidates = candidates[: len(slots)]
            self._plan_stores(plan, candidates, slots)
        self._trailing = []
        if plan.loads or plan.stores or plan.finished:
            self._seq += 1
            plan.seq, plan.server, plan.session = self._seq, by.server, by.session
            loading = [request for request, _, _ in loads]
            self._outstanding[plan.seq] = Outstanding(by, candidates, slots, loading)
        self._settle()
        self._flush()
        return plan

    def reported(self, report: WorkerReport) -> None:
        """Commit what all ranks have copied, and end the leases of what they have loaded."""
        self._meet()
        for seq, ranks in report.done.items():
            if (done := self._outstanding.get(seq)) is None:
                continue
            done.reports += ranks
            if done.reports >= self._ranks:
                del self._outstanding[seq]
                self._finish(done, report.failed)
        self._flush()

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """Forget a request. Returns True if its blocks must wait for a last store."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._forget_match(tracked)
        full = min(request.num_computed_tokens // self._block_tokens, len(request.block_hashes))
        ended_well = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        if not ended_well or bypassed(request) or self._by is NOBODY:
            return False
        if tracked.stored >= min(full, len(blocks)):
            return False
        self._trailing.append((tracked, [*blocks]))
        return True

    def reset(self) -> bool:
        """Drop the namespace's blocks on the server; what is being copied is never committed."""
        for outstanding in self._outstanding.values():
            outstanding.discarded = True
        return self._client.reset() is not None

    def take_stats(self) -> ConnectorStats | None:
        """Return the misses by reason since the last call; None if there were none."""
        failures, self._client.failures = self._client.failures, Counter()
        if not failures:
            return None
        return ConnectorStats({f"{MISSES}:{why}": count for why, count in failures.items()})

    def close(self) -> None:
        """Leave the server."""
        self._client.close()

    # Loads and stores.

    def _plan_stores(
        self, plan: StepPlan, candidates: Sequence[Candidate], slots: Sequence[int]
    ) -> None:
        for candidate, slot in zip(candidates, slots, strict=True):
            plan.stores.append((candidate.block, slot))
            self._storing.add(candidate.key)
            tracked = self._requests.get(candidate.request)
            if tracked is not None:
                tracked.stored = max(tracked.stored, candidate.position + 1)

    def _candidates(self, scheduler_output: Any) -> list[Candidate]:
        """Return the blocks that are complete after this step, each key once, parents first."""
        found: dict[bytes, Candidate] = {}
        for ended, its_blocks in self._trailing:
            self._add_candidates(found, ended, its_blocks, ended.request.num_computed_tokens)
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or bypassed(tracked.request):
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
        full = min(computed // self._block_tokens, len(hashes), len(blocks))
        for position in [*tracked.refill, *range(tracked.stored, full)]:
            key = hashes[position]
            if key not in self._storing and key not in found:
                parent = hashes[position - 1] if position else b""
                found[key] = Candidate(
                    tracked.request.request_id, position, key, parent, blocks[position]
                )
            elif position == tracked.stored:
                tracked.stored += 1
        tracked.refill = []

    def _take_slots(self, need: int) -> list[int]:
        """Return up to `need` slots, from the stock or, if that is too small, by asking."""
        self._stock += self._client.grants()
        short = need - len(self._stock)
        if short > 0 and self._asks_paused:
            self._asks_paused -= 1
        elif short > 0:
            step, self._outbox = self._outbox, wire.Step(seq=0)
            step.need, step.stock = short, STOCK
            granted = self._client.step(step)
            self._stock += [] if granted is None else granted.slots
            if need > len(self._stock):
                self._asks_paused = STEPS_BETWEEN_ASKS
        if self._client.meet() is None:
            self._stock = []
        taken, self._stock = self._stock[:need], self._stock[need:]
        return taken

    def _finish(self, done: Outstanding, failed: set[int]) -> None:
        self._storing.difference_update(candidate.key for candidate in done.candidates)
        if done.by != self._by:
            return
        self._outbox.releases += done.loading
        if done.discarded:
            self._outbox.aborts += done.slots
            return
        self._outbox.aborts += [slot for slot in done.slots if slot in failed]
        self._outbox.commits += chains(
            (candidate, slot)
            for candidate, slot in zip(done.candidates, done.slots, strict=True)
            if slot not in failed
        )

    # The session with the server.

    def _meet(self) -> None:
        """Drop what an earlier session was promised, if the present one is new."""
        welcome = self._client.meet()
        by = NOBODY if welcome is None else Promise(welcome.server, welcome.session)
        if by != self._by:
            self._by = by
            self._stock = []
            self._outbox = wire.Step(seq=0)
            self._asks_paused = 0

    def _settle(self) -> None:
        """Say once a session that no worker copies for an earlier one any more."""
        if self._by is not NOBODY and self._settled != self._by:
            older = (done.by for done in self._outstanding.values())
            if not any(by.server == self._by.server and by != self._by for by in older):
                self._outbox.settled = True
                self._settled = self._by

    def _flush(self) -> None:
        """Send what there is to say, one way."""
        step = self._outbox
        if len(self._stock) < STOCK // 2 and (step.commits or step.aborts):
            step.stock = STOCK
        said = step.commits or step.aborts or step.releases or step.touches
        if said or step.asked or step.settled:
            self._outbox = wire.Step(seq=0)
            self._client.send_step(step)

    def _forget_match(self, tracked: Tracked) -> None:
        if tracked.match is not None and tracked.match.slots:
            self._outbox.releases.append(tracked.request.request_id)
        tracked.match = None

    def _reusable(self, request: Any) -> int:
        """Return the blocks that a cache may serve: at least one token is left to compute."""
        return min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))


def bypassed(request: Any) -> bool:
    """Return whether a request's KV is not, or not only, what its block hashes say."""
    return (
        request.pooling_params is not None
        or request.lora_request is not None
        or request.prompt_embeds is not None
    )


def chains(pairs: Iterable[tuple[Candidate, int]]) -> list[wire.Chain]:
    """Return candidates and their slots as runs in which each block is the next one's parent."""
    found: list[wire.Chain] = []
    last = b""
    for candidate, slot in pairs:
        if found and candidate.parent == last:
            found[-1].keys += candidate.key
            found[-1].slots.append(slot)
        else:
            found.append(wire.Chain(candidate.parent, bytes(candidate.key), [slot]))
        last = candidate.key
    return found
