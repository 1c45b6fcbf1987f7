"""The Redis tier against real servers: what every store promises, and what only Redis has.

What goes wrong is in `test_redis_faults.py`, clusters are in `test_redis_cluster.py`.
"""

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract import (
    BLOCKS,
    KEY,
    LARGE_BYTES,
    OTHER,
    PARENT,
    Compressing,
    StoreContract,
    memory,
    read,
    space_of,
    stored,
    whole,
)
from kvtier.core import Fault, ReadOutcome
from kvtier.errors import SettingsError
from kvtier.tiers import redis_records
from kvtier.tiers.base import TierFault
from kvtier.tiers.redis import RedisOptions, RedisStore, shown_url
from proxy import Proxy
from redis_servers import needs_redis, redis_server, tls_redis
from support import chain

pytestmark = needs_redis

SECRET = "s3cr3t/with?signs"
SECRET_IN_URL = "s3cr3t%2Fwith%3Fsigns"
COMMANDS = ["+get", "+set", "+multi", "+exec", "+unlink", "+hset", "+pexpire"]
COMMANDS += ["+hmget", "+exists", "+scan", "+info", "+select"]
"""What docs/operations.md lets the user of a server alone do."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    with tls_redis(tmp_path_factory.mktemp("tls")) as running:
        yield running


@pytest.fixture
def stores():
    """A factory of opened stores; each is closed with the test."""
    with contextlib.ExitStack() as stack:

        def opened(url, kind=RedisStore, **options):
            options = {"timeout_seconds": 5.0, "ttl_seconds": 600, "connections": 8} | options
            store = kind(RedisOptions(url, **options))
            stack.callback(store.close)
            store.open()
            return store

        yield opened


def name_of(space, key):
    return f"kvtier:{space.digest}:{key.hex()}"


def damage(ask, space, key, how):
    """Change a record as `StoreContract.damage` wants it."""
    name = name_of(space, key)
    field = () if ask("TYPE", name) == b"string" else ("1",)
    if how == "swap":
        ask("COPY", name_of(space, OTHER), name, "REPLACE")
        return
    value = bytearray(ask("HGET" if field else "GET", name, *field))
    middle = len(value) // 2
    value[middle] ^= 4
    changed = bytes(value if how == "flip" else value[:middle])
    ask("HSET" if field else "SET", name, *field, changed)


class TestOverTcp(StoreContract):
    @pytest.fixture
    def store(self, server, stores):
        server.ask("FLUSHALL")
        return stores(server.url)

    @pytest.fixture
    def peer(self, server, stores):
        return stores(server.unix_url)

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def damage(self, store, space, key, how):
        damage(self.server.ask, space, key, how)


class TestRecordsInPieces(TestOverTcp):
    """Records of all sizes lie as those of large payloads do."""

    @pytest.fixture(autouse=True)
    def _pieces(self, monkeypatch):
        monkeypatch.setattr(redis_records, "WHOLE_BYTES", 0)
        monkeypatch.setattr(redis_records, "PIECE_BYTES", 5000)


class CompressingStore(Compressing, RedisStore):
    """Writes compressed records."""


class TestCompressedRecords(TestOverTcp):
    @pytest.fixture
    def store(self, server, stores):
        server.ask("FLUSHALL")
        return stores(server.url, CompressingStore)


class TestCompressedRecordsInPieces(TestRecordsInPieces, TestCompressedRecords):
    """Their pieces are fewer than those of a raw payload."""


class TestOverTls(StoreContract):
    @pytest.fixture
    def store(self, tls, stores):
        server, url, authority = tls
        server.ask("FLUSHALL")
        return stores(url, ca_file=authority)

    @pytest.fixture
    def peer(self, tls, stores):
        _, url, authority = tls
        return stores(url, ca_file=authority)

    @pytest.fixture(autouse=True)
    def _server(self, tls):
        self.server = tls[0]

    def damage(self, store, space, key, how):
        damage(self.server.ask, space, key, how)


def test_a_record_is_one_string_and_a_large_one_is_a_hash_of_pieces(server, stores):
    store = stores(server.url)
    for size, kind in (
        (redis_records.WHOLE_BYTES, b"string"),
        (redis_records.WHOLE_BYTES + 4096, b"hash"),
    ):
        space = space_of(size, "kinds")
        slot = memory(size)
        store.write(space, KEY, PARENT, slot)
        name = name_of(space, KEY)
        assert server.ask("TYPE", name) == kind
        slot[:] = b"\1" * size
        assert store.read(space, KEY, slot) is ReadOutcome.READ
        assert slot == bytes(size)
        server.ask("DEL", name)


@pytest.mark.parametrize("size", [4096, 65_536, 1_474_560, 1 << 20, 4 << 20, 5 << 20, 24 << 20])
def test_the_bytes_of_a_record_are_what_redis_takes_for_it(server, stores, size):
    space = space_of(size, "bytes")
    written = stores(server.url).write(space, KEY, PARENT, memory(size))
    taken = server.ask("MEMORY", "USAGE", name_of(space, KEY), "SAMPLES", 0)
    assert 0.97 < written.record_bytes / taken < 1.03
    server.ask("DEL", name_of(space, KEY))


@pytest.mark.parametrize("seconds", [0, 3600])
def test_a_record_expires_as_long_after_its_write_as_was_set(server, stores, seconds):
    space = space_of(name=f"ttl {seconds}")
    stored(stores(server.url, ttl_seconds=seconds), space, KEY)
    left = server.ask("PTTL", name_of(space, KEY))
    assert left == -1 if not seconds else 0.98 < left / (seconds * 1000) <= 1


def test_an_evicted_record_is_not_found(server, stores):
    store, space = stores(server.url), space_of(name="evicted")
    stored(store, space, *BLOCKS)
    server.ask("DEL", name_of(space, BLOCKS[2]))
    assert store.find(space, BLOCKS) == 2
    assert read(store, space, BLOCKS[2]) is ReadOutcome.MISSING


SPOILT = {
    "a string that is too short": (redis_records.WHOLE_BYTES, "SETRANGE", "0", "no header"),
    "a string that is too long": (redis_records.WHOLE_BYTES, "APPEND", "more"),
    "a list": (redis_records.WHOLE_BYTES, "LPUSH", "an element"),
    "an empty string": (redis_records.WHOLE_BYTES, "SET", ""),
    "a string in a hash's place": (0, "SET", "a string"),
    "a short header": (0, "HSET", "0", "too short"),
    "no header": (0, "HDEL", "0"),
    "a piece that is missing": (0, "HDEL", "1"),
    "a piece that is empty": (0, "HSET", "1", ""),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_no_whole_record_is_corrupt_and_gone(server, stores, what, monkeypatch):
    whole_bytes, command, *words = SPOILT[what]
    monkeypatch.setattr(redis_records, "WHOLE_BYTES", whole_bytes)
    store, space = stores(server.url), space_of(LARGE_BYTES, "spoilt")
    stored(store, space, KEY)
    if command == "LPUSH":
        server.ask("DEL", name_of(space, KEY))
    server.ask(command, name_of(space, KEY), *words)
    assert read(store, space, KEY) is ReadOutcome.CORRUPT
    assert server.ask("EXISTS", name_of(space, KEY)) == 0


def test_what_is_in_redis_is_not_listed(server, stores):
    store, space = stores(server.url), space_of(name="listed")
    stored(store, space, KEY)
    assert list(store.scan()) == []


def test_a_wipe_removes_thousands_and_leaves_other_keys(server, stores):
    store, space = stores(server.url), space_of(name="thousands")
    keys = chain("thousands", 3000)
    script = "for i, key in ipairs(ARGV) do redis.call('SET', key, 'x') end"
    server.ask("EVAL", script, 0, *(name_of(space, key) for key in keys))
    server.ask("SET", f"kvtier:{'0' * 64}:other", "stays")
    store.wipe(space.digest)
    assert store.find(space, keys) == 0
    assert server.ask("EXISTS", *(name_of(space, key) for key in keys)) == 0
    assert server.ask("GET", f"kvtier:{'0' * 64}:other") == b"stays"


@pytest.mark.parametrize("count", [1, 400, 3000])
def test_find_is_one_round_trip_for_any_number_of_keys(server, stores, count):
    space, keys = space_of(4096, "trips"), chain("trips", count)
    stored(stores(server.url), space, *keys[:40])
    with Proxy(server.port) as proxy:
        store = stores(proxy.url)
        proxy.settle, proxy.turns = 0.02, 0
        assert store.find(space, keys) == min(count, 40)
        assert proxy.turns == 1


@pytest.mark.parametrize("there", [True, False])
def test_read_and_write_are_one_round_trip_each(server, stores, there):
    space = space_of(LARGE_BYTES, "trips")
    with Proxy(server.port) as proxy:
        store = stores(proxy.url)
        store.find(space, [KEY])
        proxy.settle, proxy.turns = 0.02, 0
        if there:
            stored(store, space, KEY)
            assert proxy.turns == 1
        read(store, space, KEY if there else OTHER)
        assert proxy.turns == (2 if there else 1)


def test_a_user_with_the_commands_of_the_documentation_can_do_everything(server, stores):
    server.ask("ACL", "SETUSER", "cache", "reset", "on", f">{SECRET}", "~kvtier:*", *COMMANDS)
    store = stores(f"redis://cache:{SECRET_IN_URL}@127.0.0.1:{server.port}/3")
    space = space_of(name="permitted")
    stored(store, space, *BLOCKS)
    assert read(store, space, KEY) == whole(space, KEY)
    store.drop(space.digest, [KEY])
    assert store.find(space, BLOCKS) == 1
    store.wipe(space.digest)
    assert store.find(space, BLOCKS) == 0
    large = space_of(redis_records.WHOLE_BYTES + 4096, "permitted")
    store.write(large, KEY, PARENT, memory(large.payload_bytes))
    assert store.read(large, KEY, memory(large.payload_bytes)) is ReadOutcome.READ
    store.wipe(large.digest)


def test_settings_beside_the_url_go_before_what_is_in_it(server, stores):
    server.ask("ACL", "SETUSER", "beside", "reset", "on", f">{SECRET}", "~kvtier:*", *COMMANDS)
    url = f"redis://cache:wrong@127.0.0.1:{server.port}"
    store = stores(url, username="beside", password=SECRET)
    assert store.find(space_of(), [KEY]) == 0


def test_a_password_alone_is_the_default_users(tmp_path, stores):
    with redis_server(tmp_path / "locked") as locked:
        locked.ask("CONFIG", "SET", "requirepass", SECRET)
        store = stores(f"redis://:{SECRET_IN_URL}@127.0.0.1:{locked.port}")
        assert store.find(space_of(), [KEY]) == 0
        with pytest.raises(TierFault, match="wants a password") as caught:
            stores(locked.url)
        assert caught.value.fault is Fault.UNREACHABLE


def test_a_database_is_selected_by_its_number(server, stores):
    space = space_of(name="database")
    stored(stores(f"{server.url}/5"), space, KEY)
    assert stores(server.url).find(space, [KEY]) == 0
    assert stores(f"{server.unix_url}?db=5").find(space, [KEY]) == 1


def test_a_certificate_of_nobody_known_is_refused(tls, stores):
    _, url, _ = tls
    with pytest.raises(TierFault, match="certificate verify failed") as caught:
        stores(url)
    assert caught.value.fault is Fault.UNREACHABLE


def test_a_certificate_of_another_host_is_refused(tls, stores):
    _, url, authority = tls
    with pytest.raises(TierFault, match="certificate"):
        stores(url.replace("localhost", "127.0.0.1"), ca_file=authority)


def test_opening_says_once_what_a_cache_should_have_set_otherwise(server, stores, caplog):
    server.ask("CONFIG", "SET", "save", "60 1")
    try:
        store = stores(server.url)
        store.open()
    finally:
        server.ask("CONFIG", "SET", "save", "")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in ("set maxmemory,", "allkeys-lru", "switch saving off"):
        assert words in record.getMessage()


def test_a_cache_that_is_set_up_as_documented_gets_no_advice(server, stores, caplog):
    server.ask("CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru")
    try:
        stores(server.url)
    finally:
        server.ask("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")
    assert caplog.records == []


def test_threads_use_no_more_connections_than_were_set(server, stores):
    space, keys = space_of(name="bounded"), chain("bounded", 60)
    with Proxy(server.port) as proxy:
        store = stores(proxy.url, connections=2)
        stored(store, space, *keys[:10])
        assert proxy.connections == 1, "one thread needs one connection"
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda key: stored(store, space, key), keys))
        assert proxy.connections == 2
    assert stores(server.url).find(space, keys) == len(keys)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache.example", "redis://cache.example:6379/0"),
        (f"redis://user:{SECRET_IN_URL}@cache:6400/2", "redis://***@cache:6400/2"),
        (f"rediss://:{SECRET_IN_URL}@[::1]:6400", "rediss://***@[::1]:6400/0"),
        ("unix:///run/redis.sock?db=3", "unix:///run/redis.sock"),
        (f"redis://user:{SECRET}@cache:6400", "a URL that cannot be read"),
        (f"http://{SECRET}", "a URL that cannot be read"),
    ],
)
def test_a_url_is_shown_without_user_and_password(url, shown):
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "must begin with"),
        ("cache:6379", "must begin with"),
        ("redis://", "no host"),
        ("redis://cache:port", "host or port"),
        ("redis://cache:70000", "host or port"),
        ("redis://cache/first", "must be a number"),
        ("redis://cache?db=1", "after a '?'"),
        (f"redis://user:{SECRET}@cache", "host or port|must be a number|after a"),
        ("redis://user:half#rest@cache", "%23"),
        ("unix://relative.sock", "path from the root"),
        ("unix:///a.sock?password=x", "db only"),
    ],
)
def test_a_url_that_says_nothing_is_refused_without_being_quoted(url, why):
    with pytest.raises(SettingsError, match=why) as caught:
        RedisStore(RedisOptions(url))
    for secret in ("s3cr3t", "half", "rest@"):
        assert secret not in str(caught.value)


def test_a_cluster_has_neither_databases_nor_unix_sockets():
    for url in ("redis://cache/1", "unix:///run/redis.sock"):
        with pytest.raises(SettingsError, match="cluster"):
            RedisStore(RedisOptions(url, cluster=True))


def test_an_authority_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"ca\.pem"):
        RedisStore(RedisOptions("rediss://cache", ca_file=tmp_path / "ca.pem"))
