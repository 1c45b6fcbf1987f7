"""The Redis tier on a real cluster: what every store promises, lost nodes and moving slots."""

import binascii
import contextlib

import pytest
from contract import KEY, StoreContract, read, space_of, stored, whole
from kvtier.core import Fault, ReadOutcome
from kvtier.tiers.base import TierFault
from kvtier.tiers.redis import RedisOptions, RedisStore
from redis_servers import knows_all_slots, needs_redis, redis_cluster, redis_server
from support import chain, until
from test_redis import damage, name_of

pytestmark = [needs_redis, pytest.mark.slow]

SPACE = space_of(name="cluster")
KEYS = chain("cluster", 60)
"""So many that every node has some, and so has every twentieth run of them."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster(nodes):
    """The nodes, empty."""
    for node in nodes:
        node.ask("FLUSHALL")
    return nodes


@pytest.fixture
def store_at():
    with contextlib.ExitStack() as stack:

        def made(node, **options):
            settings = {"timeout_seconds": 5, "connections": 8, "cluster": True} | options
            store = RedisStore(RedisOptions(node.url, **settings))
            stack.callback(store.close)
            store.open()
            return store

        yield made


def slot_of(key):
    return binascii.crc_hqx(name_of(SPACE, key).encode(), 0) % 16384


def owner_of(cluster, key):
    """Return the index of the node that has a key's slot."""
    size = len(cluster)
    return next(at for at in range(size) if slot_of(key) < 16384 * (at + 1) // size)


class TestOnACluster(StoreContract):
    @pytest.fixture
    def store(self, cluster, store_at):
        self.cluster = cluster
        return store_at(cluster[0])

    @pytest.fixture
    def peer(self, cluster, store_at):
        return store_at(cluster[-1])

    def damage(self, store, space, key, how):
        # Names of two keys lie on two nodes: their records are copied by dump and restore.
        def ask(command, *words):
            if command != "COPY":
                return self._owner(words[0]).ask(command, *words)
            dump = self._owner(words[0]).ask("DUMP", words[0])
            return self._owner(words[1]).ask("RESTORE", words[1], 0, dump, "REPLACE")

        damage(ask, space, key, how)

    def _owner(self, name):
        slot = binascii.crc_hqx(name.encode(), 0) % 16384
        size = len(self.cluster)
        return next(n for at, n in enumerate(self.cluster) if slot < 16384 * (at + 1) // size)


def test_records_lie_on_all_nodes_and_are_found_from_any(cluster, store_at):
    stored(store_at(cluster[0]), SPACE, *KEYS)
    assert all(node.ask("DBSIZE") > 5 for node in cluster)
    for node in cluster:
        assert store_at(node).find(SPACE, KEYS) == len(KEYS)
    store_at(cluster[1]).wipe(SPACE.digest)
    assert [node.ask("DBSIZE") for node in cluster] == [0, 0, 0]


def test_a_slot_that_moved_is_followed_within_the_call(cluster, store_at):
    store = store_at(cluster[0])
    stored(store, SPACE, *KEYS[:10])
    before = owner_of(cluster, KEY)
    after = (before + 1) % len(cluster)
    slot = slot_of(KEY)

    def give_to(index):
        identity = cluster[index].ask("CLUSTER", "MYID")
        for node in cluster:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", identity)

    give_to(after)
    try:
        assert store.find(SPACE, [KEY]) == 0
        stored(store, SPACE, KEY)
        assert read(store, SPACE, KEY) == whole(SPACE, KEY)
        assert cluster[after].ask("EXISTS", name_of(SPACE, KEY)) == 1
        assert store.find(SPACE, KEYS[:10]) == 10
        store.drop(SPACE.digest, [KEY])
    finally:
        give_to(before)
    assert read(store, SPACE, KEY) is ReadOutcome.MISSING


def test_a_slot_on_its_way_is_a_miss_and_takes_no_write(cluster, store_at):
    store = store_at(cluster[0])
    before = owner_of(cluster, KEY)
    after = (before + 1) % len(cluster)
    slot = slot_of(KEY)
    source, target = cluster[before], cluster[after]
    identities = [node.ask("CLUSTER", "MYID") for node in (source, target)]
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", identities[0])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", identities[1])
    try:
        assert read(store, SPACE, KEY) is ReadOutcome.MISSING
        assert store.find(SPACE, [KEY]) == 0
        with pytest.raises(TierFault) as caught:
            stored(store, SPACE, KEY)
        assert caught.value.fault is Fault.UNREACHABLE
    finally:
        for node in (source, target):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
    stored(store, SPACE, KEY)


def test_a_cluster_without_one_of_its_nodes_fails_in_time_and_comes_back(cluster, store_at):
    store = store_at(cluster[0], timeout_seconds=1)
    stored(store, SPACE, *KEYS)
    lost = cluster[2]
    lost.kill()
    for _ in range(3):
        with pytest.raises(TierFault) as caught:
            store.find(SPACE, KEYS)
        assert caught.value.fault is Fault.UNREACHABLE
    lost.start()
    until(lambda: all(map(knows_all_slots, cluster)), "the cluster's return")
    store.open()
    lost_keys = [key for key in KEYS if owner_of(cluster, key) == 2]
    assert read(store, SPACE, lost_keys[0]) is ReadOutcome.MISSING
    kept = [key for key in KEYS if key not in lost_keys]
    assert store.find(SPACE, kept) == len(kept)
    stored(store, SPACE, *lost_keys)
    assert store.find(SPACE, KEYS) == len(KEYS)


def test_a_node_that_is_lost_need_not_be_the_one_of_the_url(cluster, store_at):
    """The first node is frozen: where slots lie is asked of the others, within the time."""
    store = store_at(cluster[0], timeout_seconds=0.4)
    stored(store, SPACE, *KEYS)
    others = [key for key in KEYS if owner_of(cluster, key) != 0]
    with cluster[0].frozen():
        with pytest.raises(TierFault) as caught:
            store.find(SPACE, KEYS)
        assert caught.value.fault is Fault.TIMEOUT
        assert read(store, SPACE, others[0]) == whole(SPACE, others[0])
    until(lambda: all(map(knows_all_slots, cluster)), "the cluster's return")


def test_each_node_of_a_frozen_cluster_is_waited_for_together(cluster, store_at):
    store = store_at(cluster[0], timeout_seconds=0.3)
    with contextlib.ExitStack() as stack:
        for node in cluster:
            stack.enter_context(node.frozen())
        with pytest.raises(TierFault) as caught:
            store.find(SPACE, KEYS)
        assert caught.value.fault is Fault.TIMEOUT
    until(lambda: all(map(knows_all_slots, cluster)), "the cluster's return")


def test_a_node_of_a_cluster_without_the_setting_says_what_to_set(cluster):
    store = RedisStore(RedisOptions(cluster[0].url, timeout_seconds=5))
    try:
        foreign = next(key for key in KEYS if owner_of(cluster, key) != 0)
        with pytest.raises(TierFault, match=r"redis\.cluster"):
            stored(store, SPACE, foreign)
    finally:
        store.close()


def test_the_setting_without_a_cluster_says_so(tmp_path, store_at):
    with (
        redis_server(tmp_path) as alone,
        pytest.raises(TierFault, match="cluster support disabled"),
    ):
        store_at(alone)
