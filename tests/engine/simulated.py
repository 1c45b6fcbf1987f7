"""Both halves of the connector on a real data plane, with simulated requests and ranks.

What vLLM does between the hooks is played here step by step, so that faults can be put exactly
between two of them: a lost block, a rank that fails, a server that dies or comes back.
"""

from __future__ import annotations

import hashlib
import logging
from types import SimpleNamespace

import torch
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from kvtier.engine.account import Account
from kvtier.engine.paging import HostPaging
from kvtier.engine.scheduler import SchedulerOptions, SchedulerSide
from kvtier.engine.tracing import make_tracer
from kvtier.engine.worker import Place, WorkerSide
from kvtier.integrity import check_integrity
from support import MANIFEST, manifest

TOKENS = MANIFEST.block_tokens
BLOCKS = 64
LOG = logging.getLogger("test.engine")


class Request:
    """The parts of vLLM's request that the connector reads. `blocks` are its pages."""

    def __init__(self, name, prompt="p", tokens=4 * TOKENS + 1, blocks=range(16)):
        self.request_id = name
        self.num_tokens = tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.pooling_params = self.lora_request = self.prompt_embeds = None
        self.kv_transfer_params = self.trace_headers = self.cache_salt = None
        self.skip_reading_prefix_cache = False
        self.status = SimpleNamespace(name="FINISHED_STOPPED")
        self.all_token_ids = [ord(prompt[0])] * tokens
        self.blocks = list(blocks)
        parent, self.block_hashes = prompt.encode(), []
        for _ in range(tokens // TOKENS):
            parent = hashlib.sha256(parent).digest()
            self.block_hashes.append(parent)


class CacheManager:
    """vLLM's cache manager, as far as it forgets blocks."""

    def __init__(self):
        self.evicted = set()

    def evict_blocks(self, blocks):
        self.evicted |= blocks


class Engine:
    """A scheduler side and its ranks, over caches whose bytes say what was computed.

    `ranks` report; each group of `replicas` of them holds the same bytes. `page` makes a rank's
    paging out of one for host memory.
    """

    def __init__(
        self, plane, name="engine", ranks=1, replicas=1, page=None, fields=None, **options
    ):
        self.manifest = manifest(shards=ranks // replicas, **(fields or {}))
        self.caches, self.workers, self.pagings = [], [], []
        self.replicas = replicas
        for rank in range(ranks):
            caches = [torch.zeros(BLOCKS, 2, TOKENS, 16) for _ in range(2)]
            paging = HostPaging(caches, BLOCKS)
            paging = page(paging) if page else paging
            hello = plane.hello(Role.WORKER, name, rank, self.manifest)
            client = Client(ClientOptions(plane.path, **options), hello, LOG)
            place = Place(rank // replicas, rank % replicas, replicas)
            worker = WorkerSide(client, paging, self.manifest, place, LOG)
            worker.start()
            self.caches.append(caches)
            self.workers.append(worker)
            self.pagings.append(paging)
        self.scheduler_client = plane.client(engine=name, manifest=self.manifest, **options)
        self.scheduler = SchedulerSide(
            Account(self.scheduler_client, LOG),
            SchedulerOptions(
                TOKENS, self.manifest.shard_bytes, ranks, self.pagings[0].asynchronous
            ),
            LOG,
            make_tracer(None, LOG),
            None,
        )
        self.manager = self.scheduler.cache_manager = CacheManager()

    def close(self):
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def value(self, rank, key, layer):
        return float(int.from_bytes(key[:2], "big") + rank // self.replicas * 0.25 + layer * 0.5)

    def holds(self, rank, block, key):
        return all(
            bool((self.caches[rank][layer][block] == self.value(rank, key, layer)).all())
            for layer in range(2)
        )

    def admit(self, request, computed=0):
        """Do what vLLM does when it takes up a request. Returns the matched tokens."""
        matched = self.scheduler.matched_tokens(request, computed)
        if matched is not None:
            self.scheduler.allocated(request, request.blocks, matched)
            request.num_computed_tokens = computed + matched
        return matched

    def plan(self, scheduled):
        """`scheduled`: request → tokens to compute in this step."""
        tables = {request.request_id: (request.blocks,) for request in scheduled}
        return self.scheduler.plan_step(
            SimpleNamespace(
                num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
                kv_connector_block_state=SimpleNamespace(get_block_ids=tables.__getitem__),
            )
        )

    def compute(self, scheduled):
        """Write what the model would: each block that is complete after this step."""
        for request, tokens in scheduled.items():
            after = request.num_computed_tokens + tokens
            first = request.num_computed_tokens // TOKENS
            for position in range(first, min(after // TOKENS, len(request.block_hashes))):
                self.fill(request.blocks[position], request.block_hashes[position])
            request.num_computed_tokens = after

    def fill(self, block, key):
        """Write what the model would into one block, on all ranks."""
        for rank, caches in enumerate(self.caches):
            for layer in range(2):
                caches[layer][block] = self.value(rank, key, layer)

    def step(self, scheduled):
        """One engine step. Returns the blocks that no rank or not every rank could load."""
        return self.carry_out(self.plan(scheduled), scheduled)[0]

    def carry_out(self, plan, scheduled):
        """Do a plan on all ranks. Returns blocks that failed to load, and requests received."""
        for worker in self.workers:
            worker.begin(plan)
            if not self.scheduler.asynchronous:
                worker.load(plan)
        self.compute(scheduled)
        for worker in self.workers:
            if self.scheduler.asynchronous:
                worker.load(plan)
            worker.store(plan)
        return self.collect()

    def collect(self):
        """What vLLM takes from the ranks at the end of a step."""
        report, failed, received = None, set(), []
        for worker in self.workers:
            received.append(worker.take_finished()[1])
            failed |= worker.take_failed_blocks()
            if (own := worker.take_report()) is not None:
                report = own if report is None else report.aggregate(own)
        if report is not None:
            self.scheduler.reported(report)
        return failed, received

    def run(self, name, prompt="p", tokens=4 * TOKENS + 1, first_block=0, computed=0):
        """Serve a prompt in one step. Returns the request and its matched tokens."""
        request = Request(name, prompt, tokens, range(first_block, first_block + 16))
        return request, self.serve(request, computed)

    def serve(self, request, computed=0):
        """Serve a request in one step. Returns its matched tokens."""
        matched = self.admit(request, computed)
        self.step({request: request.num_tokens - request.num_computed_tokens})
        return matched


def lose(worker, slot):
    """Let a rank not find one slot."""
    take = worker._slabs.shard
    worker._slabs.shard = lambda asked: None if asked == slot else take(asked)


def blocks(plane):
    """Return how many blocks are visible, after a check that all agrees."""
    plane.do(check_integrity, plane.cache)
    return plane.do(plane.readings.tiers)[0].blocks


def leased(plane):
    """Return how many leases of blocks there are."""
    return sum(session.leased_blocks for session in plane.do(plane.readings.sessions))


def end_session(plane, client):
    """Let the server close a client's connection."""
    number = client.meet().session

    def close():
        for each in list(plane.plane.open):
            if each._session.number == number:
                each.close("error")

    plane.do(close)
