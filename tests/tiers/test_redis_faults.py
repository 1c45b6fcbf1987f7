"""The Redis tier where something goes wrong: no wrong byte, no long wait, no secret shown."""

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract import BLOCKS, KEY, OTHER, memory, read, space_of, stored, whole
from kvtier.core import Fault, ReadOutcome
from kvtier.errors import KVTierError
from kvtier.tiers.base import TierFault
from kvtier.tiers.redis import RedisOptions, RedisStore
from proxy import Canned, Proxy
from redis_servers import free_port, needs_redis, redis_server
from support import chain

pytestmark = needs_redis

TIMEOUT = 0.06
IN_TIME = TIMEOUT + 0.25
"""A call may end this late on a machine that others use too."""
SECRET = "correct-horse-battery"
LARGE = space_of(24 << 20, "large")
"""Its payloads do not fit into the sockets' buffers."""
ZEROS, ONES = memory(LARGE.payload_bytes), memory(LARGE.payload_bytes)
ONES[:] = b"\1" * len(ONES)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def proxy(server):
    with Proxy(server.port) as running:
        yield running


@pytest.fixture
def store_at():
    """A factory of stores, not opened; each is closed with the test."""
    with contextlib.ExitStack() as stack:

        def made(url, **options):
            store = RedisStore(RedisOptions(url, **{"timeout_seconds": TIMEOUT} | options))
            stack.callback(store.close)
            return store

        yield made


@pytest.fixture
def quick(server, store_at):
    """A store without a proxy, and with time enough."""
    return store_at(server.url, timeout_seconds=5)


def descriptors():
    """Return how many files and sockets this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def fault_of(call):
    """Return the fault that a call ends with, in time."""
    began = time.monotonic()
    with pytest.raises(TierFault) as caught:
        call()
    assert time.monotonic() - began < IN_TIME, caught.value
    return caught.value.fault


def test_a_reply_that_comes_late_is_never_taken_for_another_blocks(server, quick, store_at):
    """Case B10: calls that ran out of time, and at once others over the same pool; 200 rounds."""
    space, keys = space_of(name="shift"), chain("shift", 8)
    stored(quick, space, *keys)
    wanted = {key: whole(space, key) for key in keys}
    ends = Counter()

    def rounds(thread):
        choose = random.Random(thread)
        for _ in range(50):
            for key in choose.sample(keys, 2):
                try:
                    assert read(store, space, key) == wanted[key]
                    ends["right"] += 1
                except TierFault as fault:
                    ends[fault.fault] += 1

    with Proxy(server.port) as proxy:
        store = store_at(proxy.url, timeout_seconds=0.015, connections=4)
        proxy.delay = lambda: random.choice([0, 0, 0.02])
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(rounds, range(4)))
    assert set(ends) == {"right", Fault.TIMEOUT}
    assert min(ends.values()) > 20, ends


@pytest.mark.parametrize(
    "call",
    [
        lambda store, space: store.find(space, BLOCKS),
        lambda store, space: store.read(space, KEY, ONES[:]),
        lambda store, space: store.write(space, KEY, b"", ZEROS),
        lambda store, space: store.drop(space.digest, BLOCKS),
        lambda store, space: store.wipe(space.digest),
        lambda store, space: store.open(),
    ],
    ids=["find", "read", "write", "drop", "wipe", "open"],
)
def test_every_call_ends_in_time_while_redis_is_frozen(server, store_at, call):
    """Case B16."""
    store = store_at(server.url)
    store.open()
    with server.frozen():
        assert fault_of(lambda: call(store, LARGE)) is Fault.TIMEOUT
        assert fault_of(lambda: call(store, LARGE)) is Fault.TIMEOUT, "on a new connection too"
    store.open()
    assert store.find(LARGE, [OTHER]) == 0


@pytest.mark.parametrize("trouble", [{"silent_after": 700_000}, {"trickle": 0.002}])
def test_a_reply_that_stops_or_trickles_ends_in_time(server, quick, proxy, store_at, trouble):
    space = space_of(1 << 20, "stalls")
    stored(quick, space, KEY)
    store = store_at(proxy.url)
    for name, value in trouble.items():
        setattr(proxy, name, value)
    assert fault_of(lambda: read(store, space, KEY)) is Fault.TIMEOUT
    proxy.calm()
    assert read(store, space, KEY) == whole(space, KEY)


@pytest.mark.parametrize("cut", [0, 1, 5, 100, 300, 70_000, 1 << 20])
def test_a_reply_that_is_cut_gives_nothing(quick, proxy, store_at, cut):
    space = space_of(1 << 20, "cut")
    stored(quick, space, KEY)
    store = store_at(proxy.url, timeout_seconds=5)
    proxy.cut_after = cut
    with pytest.raises(TierFault) as caught:
        read(store, space, KEY)
    assert caught.value.fault is Fault.UNREACHABLE
    proxy.calm()
    assert read(store, space, KEY) == whole(space, KEY)


def test_a_network_that_flips_bits_never_gives_a_wrong_byte(quick, proxy, store_at):
    space, keys = space_of(3 * 4096, "flips"), chain("flips", 6)
    stored(quick, space, *keys)
    store = store_at(proxy.url, timeout_seconds=0.03)
    proxy.flips = 0.3
    seen = set()
    for key in keys * 30:
        try:
            outcome = read(store, space, key)
        except TierFault as fault:
            seen.add(fault.fault)
            continue
        seen.add(outcome if isinstance(outcome, ReadOutcome) else "right")
        assert isinstance(outcome, ReadOutcome) or outcome == whole(space, key), proxy.seed
        if outcome is not ReadOutcome.READ:
            stored(quick, space, key)
    assert {"right", ReadOutcome.CORRUPT} <= seen, proxy.seed


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*1\r\n:0\r\n",
        b"*3\r\n:1\r\n",
        b"*9\r\n",
        b"$9\r\n",
    ],
)
def test_what_is_no_reply_is_a_fault(store_at, junk):
    with Canned(junk) as canned:
        fault = fault_of(lambda: read(store_at(canned.url), space_of(), KEY))
    assert fault in {Fault.IO, Fault.TIMEOUT}


def test_bytes_after_a_reply_end_the_connection(store_at):
    with Canned(b":0\r\n:1\r\n") as canned:
        store = store_at(canned.url)
        assert store.find(space_of(), [KEY]) == 0
        assert store.find(space_of(), [KEY]) == 0, "not the second reply of the first connection"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", Fault.FULL),
        ("EXECABORT Transaction discarded because of: OOM command not allowed", Fault.FULL),
        ("READONLY You can't write against a read only replica.", Fault.READ_ONLY),
        ("MISCONF Redis is configured to save RDB snapshots, but", Fault.READ_ONLY),
        ("LOADING Redis is loading the dataset in memory", Fault.UNREACHABLE),
        ("CLUSTERDOWN The cluster is down", Fault.UNREACHABLE),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Fault.UNREACHABLE),
        ("ERR max number of clients reached", Fault.UNREACHABLE),
        ("NOPERM this user has no permissions to run the 'hset' command", Fault.UNREACHABLE),
        ("ERR something else", Fault.IO),
        ("ERR maximum of something else", Fault.IO),
    ],
)
def test_an_error_reply_means_what_it_says_for_the_tier(store_at, line, fault):
    with Canned(f"-{line}\r\n".encode() * 5) as canned:
        assert fault_of(lambda: stored(store_at(canned.url), space_of(), KEY)) is fault


@pytest.mark.parametrize("about", [b"redis_version:6.2.14", b"memcached:1"])
def test_a_server_that_is_too_old_or_none_is_refused(store_at, about):
    text = b"# Server\r\n" + about + b"\r\n"
    with Canned(b"$%d\r\n%b\r\n" % (len(text), text)) as canned:
        with pytest.raises(TierFault, match=r"needs 7 or later|no Redis") as caught:
            store_at(canned.url).open()
        assert caught.value.fault is Fault.IO


def test_at_maxmemory_writes_are_full_and_reads_go_on(server, quick):
    space = space_of(1 << 20, "full")
    stored(quick, space, KEY)
    server.ask("CONFIG", "SET", "maxmemory", "2mb")
    try:
        for _ in range(3):
            assert fault_of(lambda: stored(quick, space, OTHER)) is Fault.FULL
            assert read(quick, space, KEY) == whole(space, KEY)
        assert fault_of(lambda: stored(quick, space, KEY)) is Fault.FULL
        assert read(quick, space, KEY) == whole(space, KEY), "what was to be replaced stays"
        assert quick.find(space, [OTHER]) == 0
        quick.drop(space.digest, [KEY])
    finally:
        server.ask("CONFIG", "SET", "maxmemory", "0")
    stored(quick, space, OTHER)


def test_a_replica_takes_no_writes_and_reads_go_on(server, quick):
    space = space_of(name="replica")
    stored(quick, space, KEY)
    server.ask("REPLICAOF", "127.0.0.1", free_port())
    try:
        assert fault_of(lambda: stored(quick, space, OTHER)) is Fault.READ_ONLY
        assert read(quick, space, KEY) == whole(space, KEY)
    finally:
        server.ask("REPLICAOF", "NO", "ONE")


def test_a_large_write_that_is_cut_leaves_what_was_there(server, quick, store_at):
    quick.write(LARGE, KEY, b"", ONES)
    store, slot = store_at(server.url), memory(len(ONES))
    with server.frozen():
        assert fault_of(lambda: store.write(LARGE, KEY, b"", ZEROS)) is Fault.TIMEOUT
    assert quick.read(LARGE, KEY, slot) is ReadOutcome.READ
    assert slot == ONES
    quick.drop(LARGE.digest, [KEY])


def test_killed_and_started_again_it_is_used_again(tmp_path, store_at):
    """Case B15."""
    space = space_of(name="again")
    with redis_server(tmp_path) as server:
        store = store_at(server.url, timeout_seconds=2)
        store.open()
        stored(store, space, *BLOCKS)
        server.kill()
        assert fault_of(lambda: read(store, space, KEY)) is Fault.UNREACHABLE
        assert fault_of(lambda: store.find(space, BLOCKS)) is Fault.UNREACHABLE
        assert fault_of(store.open) is Fault.UNREACHABLE
        server.start()
        assert store.find(space, BLOCKS) == 0, "without a call that fails first"
        stored(store, space, KEY)
        assert read(store, space, KEY) == whole(space, KEY)


def test_connections_that_were_closed_while_idle_cost_no_failure(server, quick, proxy, store_at):
    space = space_of(name="idle")
    stored(quick, space, KEY)
    store = store_at(proxy.url, timeout_seconds=2)
    for _ in range(3):
        assert read(store, space, KEY) == whole(space, KEY)
        proxy.drop_connections()
        assert read(store, space, KEY) == whole(space, KEY)
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(0.01)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis://no-such-host.invalid"])
def test_what_cannot_be_reached_is_named(store_at, url):
    with pytest.raises(TierFault, match=url.removeprefix("redis://")) as caught:
        store_at(url, timeout_seconds=2).open()
    assert caught.value.fault is Fault.UNREACHABLE


def test_all_connections_in_use_is_a_timeout(server, quick, store_at):
    store = store_at(server.url, connections=1)
    store.open()
    with server.frozen(), ThreadPoolExecutor(3) as pool:
        faults = list(pool.map(lambda _: fault_of(lambda: store.find(space_of(), [KEY])), range(3)))
    assert faults == [Fault.TIMEOUT] * 3


def test_closing_waits_for_no_call_and_no_server(server, store_at):
    """Case B28."""
    store = store_at(server.url, timeout_seconds=30)
    store.open()
    ended = []

    def call():
        with pytest.raises(TierFault) as caught:
            store.find(space_of(), [KEY])
        ended.append(caught.value.fault)

    with server.frozen():
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.05)
        began = time.monotonic()
        store.close()
        store.close()
        thread.join(5)
        assert time.monotonic() - began < 1
    assert ended == [Fault.UNREACHABLE]
    with pytest.raises(TierFault, match="closed"):
        store.find(space_of(), [KEY])


def test_no_descriptor_is_left_after_failures(server, store_at):
    store = store_at(server.url)
    store.open()
    before = descriptors()
    with server.frozen():
        for _ in range(5):
            with pytest.raises(TierFault):
                store.find(space_of(), [KEY])
    for _ in range(20):
        with pytest.raises(TierFault):
            store_at("redis://127.0.0.1:1").open()
    assert descriptors() <= before


def test_no_secret_is_in_any_message_log_or_repr(server, proxy, store_at, caplog):
    """Case B56."""
    caplog.set_level(logging.DEBUG)
    server.ask("ACL", "SETUSER", "teller", "reset", "on", f">{SECRET}", "+@all", "~*")
    shown = []

    def fails(url, **options):
        try:
            store = store_at(url, **options)
            shown.append(repr(store))
            store.open()
        except KVTierError as error:
            shown.extend([str(error), repr(error), repr(error.__cause__)])
        else:
            raise AssertionError(url)

    good = RedisOptions(proxy.url, "teller", SECRET)
    store = store_at(good.url, username="teller", password=SECRET, timeout_seconds=2)
    store.open()
    proxy.cut_after = 0
    with pytest.raises(TierFault) as caught:
        read(store, space_of(), KEY)
    shown.extend([repr(good), repr(store), str(vars(store)), str(caught.value)])
    proxy.calm()
    at = f"127.0.0.1:{server.port}"
    fails(f"redis://teller:{SECRET}-wrong@{at}")
    assert "AUTH failed (WRONGPASS)" in shown[-3]
    fails(f"redis://:{SECRET}@127.0.0.1:1")
    fails(f"redis://teller:{SECRET}@{at}/many")
    fails(f"redis://teller:{SECRET}/x@{at}")
    fails(f"rediss://teller:{SECRET}@{at}")
    with Canned(f"-ERR unknown command 'AUTH', with args: '{SECRET}'\r\n".encode()) as canned:
        fails(canned.url, password=SECRET)
    assert "AUTH failed" in shown[-3]
    shown.extend(record.getMessage() for record in caplog.records)
    assert not [text for text in shown if SECRET in text or "teller" in text]


def test_a_slot_is_read_into_without_a_byte_past_its_end(quick):
    space = space_of(2 * 4096, "bounds")
    stored(quick, space, KEY)
    slot = memory(3 * 4096)
    assert quick.read(space, KEY, slot[: 2 * 4096]) is ReadOutcome.READ
    assert bytes(slot[2 * 4096 :]) == bytes(4096)
