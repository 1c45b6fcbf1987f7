"""vLLM's KV events of the server's tiers: replayed, they give exactly what the tiers hold."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm.distributed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier.core import Tier
from kvtier.engine import events
from kvtier.engine.events import KEYS_A_TAKE, EventFeed
from kvtier.protocol import Changed, Stored
from support import chain
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

pytestmark = pytest.mark.vllm
TOKENS = 16
TIERS = (Tier.HOST, "disk", "redis")
"""The last two are any tiers below the host."""
MEDIA = {Tier.HOST: "CPU", "disk": "STORAGE", "redis": "STORAGE"}
FAMILY = [[b"", *chain(name, 4)] for name in ("a", "b", "c")]
"""Chains of blocks, each after its parent."""


def changed(stored=(), removed=(), tier=Tier.HOST, whole=False):
    """Return a frame; `stored` are runs, a parent and its blocks each."""
    runs = [Stored(run[0], b"".join(run[1:])) for run in stored]
    return Changed(tier=tier, whole=whole, stored=runs, removed=b"".join(removed))


untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy: how long an example takes says nothing."""


class Router:
    """Takes events as a router does. What is stored twice or removed in vain is an error."""

    def __init__(self):
        self.media = {"CPU": set(), "STORAGE": set()}

    def hear(self, told):
        for event in told:
            blocks = self.media[event.medium]
            hashes = set(event.block_hashes)
            assert len(hashes) == len(event.block_hashes) > 0
            if isinstance(event, BlockRemoved):
                assert hashes <= blocks
                blocks -= hashes
            else:
                assert event.block_hashes[0] != event.parent_block_hash
                assert not hashes & blocks
                blocks |= hashes

    def holds(self, medium):
        return self.media[medium]


def hashes(keys):
    return {maybe_convert_block_hash(key) for key in keys}


def drain(feed, router):
    """Take until nothing is left to say."""
    while feed.behind:
        router.hear(feed.take(()))


def keys_of(runs):
    return [key for run in runs for key in run[1:]]


cuts = st.tuples(st.sampled_from(FAMILY), st.integers(0, 3), st.integers(1, 4)).map(
    lambda cut: cut[0][cut[1] : cut[1] + cut[2] + 1]
)
"""Runs: a parent and what follows it."""
frames = st.fixed_dictionaries(
    {"tier": st.sampled_from(TIERS), "whole": st.booleans()},
    optional={
        "stored": st.lists(cuts.filter(lambda run: len(run) > 1), max_size=3),
        "removed": st.lists(st.sampled_from(keys_of(FAMILY)), max_size=4, unique=True),
    },
)


@untimed
@given(steps=st.lists(st.one_of(st.lists(frames, max_size=4), st.just("lost")), max_size=8))
def test_replayed_events_give_exactly_what_the_tiers_hold(steps):
    feed, router = EventFeed(TOKENS), Router()
    held = {tier: set() for tier in TIERS}
    for step in steps:
        if step == "lost":
            held = {tier: set() for tier in TIERS}
            router.hear(feed.lost())
            continue
        for frame in step:
            blocks = set() if frame["whole"] else held[frame["tier"]]
            blocks = blocks - set(frame.get("removed", ()))
            held[frame["tier"]] = blocks | set(keys_of(frame.get("stored", ())))
        router.hear(feed.take([changed(**frame) for frame in step]))
    drain(feed, router)
    for medium in ("CPU", "STORAGE"):
        blocks = [held[tier] for tier in TIERS if MEDIA[tier] == medium]
        assert router.holds(medium) == hashes(set().union(*blocks))


def test_a_snapshot_is_told_as_the_difference():
    feed, router = EventFeed(TOKENS), Router()
    first, second = FAMILY[0], FAMILY[1]
    router.hear(feed.take([changed([first, second])]))
    whole = [changed(whole=True), changed([second])]
    assert feed.take([*whole, changed([first])]) == []
    told = feed.take(whole)
    assert [type(event) for event in told] == [BlockRemoved]
    assert set(told[0].block_hashes) == hashes(first[1:])


def test_a_block_that_went_and_came_again_is_no_news():
    feed = EventFeed(TOKENS)
    feed.take([changed([FAMILY[0]])])
    assert feed.take([changed([FAMILY[0][:2]], removed=FAMILY[0][1:2])]) == []


def test_a_block_is_in_storage_until_the_last_tier_there_drops_it():
    feed = EventFeed(TOKENS)
    run = FAMILY[0]
    assert len(feed.take([changed([run], tier="disk"), changed([run], tier="redis")])) == 1
    assert feed.take([changed(removed=run[1:], tier="disk")]) == []
    (event,) = feed.take([changed(removed=run[1:], tier="redis")])
    assert (event.medium, set(event.block_hashes)) == ("STORAGE", hashes(run[1:]))


def test_a_lost_server_holds_nothing_and_a_new_one_what_it_tells():
    feed, router = EventFeed(TOKENS), Router()
    router.hear(feed.take([changed([FAMILY[0]]), changed([FAMILY[1]], tier="disk")]))
    router.hear(feed.lost())
    assert not feed.behind
    assert router.media == {"CPU": set(), "STORAGE": set()}
    router.hear(feed.take([changed([FAMILY[2]], whole=True)]))
    assert router.holds("CPU") == hashes(FAMILY[2][1:])


def test_what_a_lost_server_told_last_is_forgotten_with_it():
    feed, router = EventFeed(TOKENS), Router()
    frames = [changed([[b"", *chain(f"{n}", 4096)]]) for n in range(4)]
    router.hear(feed.take(frames))
    assert feed.behind
    router.hear(feed.lost())
    drain(feed, router)
    assert router.holds("CPU") == set()


def test_no_call_looks_at_more_keys_than_there_is_time_for():
    feed, router = EventFeed(TOKENS), Router()
    names = [chain(f"{n}", 4096) for n in range(6)]

    def looked_at(told):
        router.hear(told)
        return sum(len(event.block_hashes) for event in told)

    counts = [looked_at(feed.take([changed([[b"", *keys]]) for keys in names]))]
    while feed.behind:
        counts.append(looked_at(feed.take(())))
    assert sum(counts) == 6 * 4096
    assert max(counts) <= KEYS_A_TAKE
    counts = [looked_at(feed.lost())]
    while feed.behind:
        counts.append(looked_at(feed.take(())))
    assert sum(counts) == 6 * 4096
    assert max(counts) <= KEYS_A_TAKE


def test_a_key_that_is_cut_short_is_left_out():
    feed, router = EventFeed(TOKENS), Router()
    key = FAMILY[0][1]
    router.hear(feed.take([Changed(stored=[Stored(b"", key + b"rest")], removed=b"short")]))
    assert router.holds("CPU") == hashes([key])


# What routers read: the same as in vLLM's events of the device.


@pytest.fixture
def request_of():
    """Makes vLLM's requests of random-looking tokens."""
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(TOKENS, sha256_cbor)

    def make(name, blocks=5, **options):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        tokens = [(seed + 7919 * n) % 50_000 for n in range(blocks * TOKENS + 3)]
        params = SamplingParams(max_tokens=1)
        return Request(name, tokens, params, None, block_hasher=hasher, **options)

    return make


def device_event(request, first, end, lora=None):
    """Return what vLLM publishes when the blocks `first` to `end` are in the device's cache."""
    pool = BlockPool(64, enable_caching=True, hash_block_size=TOKENS, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(end), first, end, TOKENS, 0)
    (event,) = pool.take_events()
    return event


def run_of(request, first, end):
    parent = request.block_hashes[first - 1] if first else b""
    return [parent, *request.block_hashes[first:end]]


@pytest.mark.parametrize(("first", "end"), [(0, 5), (0, 1), (2, 5)])
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_salt": "pepper"}, {"lora_request": LoRARequest("adapter", 1, "/nowhere")}],
)
def test_a_block_of_this_engine_is_published_as_the_device_publishes_it(
    request_of, first, end, options
):
    request = request_of("r", **options)
    feed = EventFeed(TOKENS)
    feed.remember(request, first, end)
    (event,) = feed.take([changed([run_of(request, first, end)])])
    device = device_event(request, first, end)
    assert device.medium == "GPU"
    assert (event.medium, event.locality) == ("CPU", "LOCAL")
    for field in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name",
                  "extra_keys", "group_idx"):  # fmt: skip
        assert getattr(event, field) == getattr(device, field), field


def test_a_block_of_another_engine_is_published_by_its_hash_alone():
    (event,) = EventFeed(TOKENS, 0, "full_attention").take([changed([FAMILY[0][1:], FAMILY[1]])])
    assert isinstance(event, BlockStored)
    assert set(event.block_hashes) == hashes([*FAMILY[0][2:], *FAMILY[1][1:]])
    assert (event.token_ids, event.parent_block_hash, event.extra_keys) == ([], None, None)
    assert (event.block_size, event.group_idx) == (TOKENS, 0)
    assert event.kv_cache_spec_kind == "full_attention"


def test_known_and_unknown_blocks_of_one_run_do_not_share_an_event(request_of):
    request = request_of("r")
    feed = EventFeed(TOKENS)
    feed.remember(request, 0, 2)
    feed.remember(request, 4, 5)
    told = feed.take([changed([run_of(request, 0, 5)])])
    keys = [maybe_convert_block_hash(key) for key in request.block_hashes]
    found = {tuple(event.block_hashes): (event.parent_block_hash, event.token_ids)
             for event in told}  # fmt: skip
    tokens = [*request.all_token_ids]
    assert found == {
        (keys[0], keys[1]): (None, tokens[: 2 * TOKENS]),
        (keys[2], keys[3]): (None, []),
        (keys[4],): (keys[3], tokens[4 * TOKENS : 5 * TOKENS]),
    }


def test_parents_are_published_before_what_follows_them(request_of):
    request = request_of("r", blocks=6)
    feed = EventFeed(TOKENS)
    feed.remember(request, 0, 6)
    pieces = [run_of(request, position, position + 1) for position in (5, 2, 0, 3, 1, 4)]
    (event,) = feed.take([changed(pieces)])
    assert event.parent_block_hash is None
    assert event.block_hashes == [*map(maybe_convert_block_hash, request.block_hashes)]
    assert event.token_ids == [*request.all_token_ids][: 6 * TOKENS]


def test_only_so_many_blocks_are_remembered_and_the_latest_of_them(request_of, monkeypatch):
    monkeypatch.setattr(events, "BLOCKS_REMEMBERED", 3)
    feed = EventFeed(TOKENS)
    old, new = request_of("old"), request_of("new")
    feed.remember(old, 0, 2)
    feed.remember(old, 0, 1)
    feed.remember(new, 0, 2)
    told = feed.take([changed([run_of(old, 0, 2), run_of(new, 0, 2)])])
    known = {each for event in told if event.token_ids for each in event.block_hashes}
    assert known == hashes([old.block_hashes[0], *new.block_hashes[:2]])


def test_events_of_both_kinds_go_over_vllms_wire(request_of):
    request = request_of("r", cache_salt="pepper")
    feed = EventFeed(TOKENS)
    feed.remember(request, 0, 5)
    run = run_of(request, 0, 5)
    told = feed.take([changed([run, FAMILY[0]])]) + feed.take([changed(removed=run[1:3])])
    assert {type(event) for event in told} == {BlockStored, BlockRemoved}
    sent = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=told))
    assert msgspec.msgpack.decode(sent, type=KVEventBatch).events == told


def test_image_keys_stand_at_the_blocks_that_hold_the_image(request_of):
    def image(identifier, offset):
        where = SimpleNamespace(offset=offset, length=TOKENS)
        return SimpleNamespace(identifier=identifier, mm_position=where)

    request = request_of("r")
    request.mm_features = [image("first", 4), image("second", 3 * TOKENS)]
    feed = EventFeed(TOKENS)
    feed.remember(request, 1, 5)
    (event,) = feed.take([changed([run_of(request, 1, 5)])])
    assert event.extra_keys == device_event(request, 1, 5).extra_keys
    assert event.extra_keys[0] == (("first", 4 - TOKENS),)
