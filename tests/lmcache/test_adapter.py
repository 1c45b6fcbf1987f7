"""LMCache's adapter against real servers: right bytes or a miss, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
from fleet import VALUE_BYTES, buffer, key, value
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.errors import EngineError
from kvtier.lmcache.batches import SIZES_AT_MOST
from kvtier.lmcache.keys import block_key
from kvtier.lmcache_adapter import KVTierAdapter
from support import until

NAMES = range(12)


def some(names, size=VALUE_BYTES, **parts):
    return {key(name, **parts): value(name, size) for name in names}


def bytes_of(names, size=VALUE_BYTES):
    return [value(name, size) for name in names]


def rest(server):
    """Wait until no session holds a lease or a reservation beyond its small stock."""

    def quiet():
        return not any(one["leased_blocks"] for one in server.json("/v1/sessions"))

    until(quiet, "the end of all leases")


def nothing_held(server):
    """Wait until no session is open: its leases and reservations ended with it."""
    until(lambda: server.json("/v1/sessions") == [], "the end of all sessions")
    slots = server.json("/v1/tiers")[0]["host"]["slots"]
    assert slots["reserved"] == slots["limbo"] == slots["promoting"] == 0


def metric(server, name):
    """Return the sum of a metric over its labels, which `name` may begin to give."""
    pattern = re.compile(rf"^{re.escape(name)}.* (\S+)$", re.MULTILINE)
    return sum(float(found) for found in pattern.findall(server.get("/metrics")[1]))


def test_what_was_set_exists_and_comes_back_byte_for_byte(server, join):
    member = join(server.socket)
    assert member.set(some(NAMES)) == (True, "")
    assert member.exists([*some(NAMES)]) == [True] * len(NAMES)
    assert member.get([*some(NAMES)]) == bytes_of(NAMES)
    rest(server)


def test_sealed_values_come_back_and_have_a_namespace_of_their_own(server, join):
    plain, sealed = join(server.socket), join(server.socket, verify_loads=True)
    assert sealed.set(some(NAMES))[0]
    assert sealed.get([*some(NAMES)]) == bytes_of(NAMES)
    assert plain.get([*some(NAMES)]) == [None] * len(NAMES)


def test_of_a_batch_each_key_hits_or_misses_for_itself(server, join):
    member = join(server.socket)
    here = [1, 2, 5, 9]
    assert member.set(some(here))[0]
    keys = [*some(NAMES)]
    assert member.exists(keys) == [name in here for name in NAMES]
    found = member.get(keys)
    assert found == [value(name) if name in here else None for name in NAMES]
    rest(server)


def test_an_empty_batch_ends_well(server, join):
    member = join(server.socket)
    assert member.set({}) == (True, "")
    assert member.get([]) == member.exists([]) == member.delete([]) == []


def test_another_size_is_a_miss_and_leaves_the_buffer_alone(server, join):
    member = join(server.socket)
    assert member.set(some([1]))[0]
    view = buffer(b"x" * (VALUE_BYTES - 1))
    assert member.wait(member.adapter.submit_batch_get([key(1)], [view]))[2] == [False]
    assert bytes(view) == b"x" * (VALUE_BYTES - 1)


def test_values_of_several_sizes_come_back_in_one_batch(server, join):
    member = join(server.socket)
    sizes = {name: 5000 + 777 * (name % 3) for name in NAMES}
    keys = [key(name) for name in NAMES]
    wanted = [value(name, sizes[name]) for name in NAMES]
    assert member.set(dict(zip(keys, wanted, strict=True)))[0]
    assert member.exists(keys) == [True] * len(NAMES)
    views = [buffer(bytes(size)) for size in sizes.values()]
    assert member.wait(member.adapter.submit_batch_get(keys, views))[2] == [True] * len(NAMES)
    assert [*map(bytes, views)] == wanted


def test_more_sizes_than_are_kept_are_refused_and_the_others_live_on(server, join):
    member = join(server.socket)
    for size in range(100, 100 + SIZES_AT_MOST):
        assert member.set({key(size): value(size, size)})[0]
    ok, error = member.set({key("more"): value("more", 99)})
    assert (ok, error) == (False, "1 of 1 not stored")
    assert member.get([key(100)], 100) == bytes_of([100], 100)


def test_a_new_adapter_finds_what_an_earlier_one_stored(server, join):
    first = join(server.socket)
    assert first.set(some(NAMES))[0]
    first.adapter.close()
    nothing_held(server)
    second = join(server.socket)
    assert second.exists([*some(NAMES)]) == [True] * len(NAMES)
    assert second.get([*some(NAMES)]) == bytes_of(NAMES)


def test_two_adapters_share_and_may_store_the_same(server, join):
    one, two = join(server.socket), join(server.socket)
    batches = [
        (member, member.adapter.submit_batch_set([*some(NAMES)], [*map(buffer, bytes_of(NAMES))]))
        for member in (one, two)
        for _ in range(4)
    ]
    assert all(member.wait(number)[0] for member, number in batches)
    assert one.get([*some(NAMES)]) == two.get([*some(NAMES)]) == bytes_of(NAMES)
    one.adapter.close()
    two.adapter.close()
    nothing_held(server)


@pytest.mark.parametrize(
    "other", [{"label": "other"}, {"chunk_tokens": 16}, {"dtype": "bfloat16"}], ids=str
)
def test_what_does_not_agree_is_not_shared(server, join, other):
    one, two = join(server.socket), join(server.socket, **other)
    assert one.set(some(NAMES))[0]
    assert two.exists([*some(NAMES)]) == [False] * len(NAMES)
    assert two.get([*some(NAMES)]) == [None] * len(NAMES)


def test_models_ranks_groups_and_salts_are_told_apart(server, join):
    member = join(server.socket)
    assert member.set(some([1]))[0]
    others = [key(1, model="m"), key(1, rank=1), key(1, group=1), key(1, salt="s"), key(2)]
    assert member.exists(others) == [False] * len(others)


def test_a_salt_cannot_be_read_from_what_the_server_says(server, join):
    member = join(server.socket)
    salted = some([1], salt="tell-nobody")
    assert member.set(salted)[0]
    assert member.get([*salted]) == bytes_of([1])
    pages = ("/metrics", "/v1/sessions", "/v1/namespaces", "/v1/stats", "/v1/tenants")
    assert "tell-nobody" not in "".join(server.get(page)[1] for page in pages) + server.log


def test_what_was_deleted_is_gone(server, join):
    member = join(server.socket)
    assert member.set(some(NAMES))[0]
    evictions = 'kvtier_evictions_total{policy="auto",reason="engine",tier="host"}'
    before = metric(server, evictions)
    gone = [key(3), key(4), key("never stored")]
    assert member.delete(gone) == [True] * 3
    assert member.exists([*some(NAMES)]) == [name not in {3, 4} for name in NAMES]
    assert metric(server, evictions) == before + 2


def test_questions_are_the_uses_that_hit_ratios_count(server, join):
    member = join(server.socket, tenant="acme", chunk_tokens=16)
    assert member.set(some([0, 1, 2]))[0]
    assert member.exists([*some(NAMES)]).count(True) == 3
    assert member.get([*some([0, 1, 2])]) == bytes_of([0, 1, 2])

    def tenant():
        return next((one for one in server.json("/v1/tenants") if one["tenant"] == "acme"), None)

    until(lambda: tenant() and tenant()["lookups"], "the account")
    [host] = [one for one in tenant()["traffic"] if one["tier"] == "host"]
    assert (host["tokens_asked"], host["tokens_hit"]) == (16 * len(NAMES), 16 * 3)
    assert (tenant()["lookups"], tenant()["stored_blocks"]) == (1, 3)


def test_more_than_fits_evicts_and_what_is_there_is_right(server, join):
    member = join(server.socket)
    names = range(24)
    for at in range(0, 24, 6):
        assert member.set(some(names[at : at + 6], 7 << 20)) == (True, "")
    found = member.get([key(name) for name in names], 7 << 20)
    assert None in found
    assert found[-1] is not None
    for name, got in zip(names, found, strict=True):
        assert got in {None, value(name, 7 << 20)}, name


def test_a_value_larger_than_the_tier_takes_fails(server, join):
    member = join(server.socket)
    assert member.set(some([1], 100 << 20)) == (False, "1 of 1 not stored")
    assert member.set(some([2])) == (True, "")


def test_values_on_disk_come_back_after_the_server(serve, join, tmp_path):
    options = ("--disk", tmp_path / "blocks")
    first = serve(*options).ready()
    member = join(first.socket)
    assert member.set(some(NAMES))[0]
    written = 'kvtier_writes_total{outcome="written",tier="disk"}'
    until(lambda: metric(first, written) == len(NAMES), "the writes")
    first.end()
    second = serve(*options).ready()
    until(lambda: member.get([*some(NAMES)]) == bytes_of(NAMES), "the connections")
    assert metric(second, "kvtier_promotions_total") == len(NAMES)
    all_gone = [True] * len(NAMES)
    until(lambda: member.delete([*some(NAMES)]) == all_gone, "the connection that drops")
    assert member.get([*some(NAMES)]) == [None] * len(NAMES)
    member.adapter.close()
    nothing_held(second)


def test_what_several_sessions_have_to_say_is_said_once(tmp_path, join, caplog):
    member = join(tmp_path / "nobody.sock")
    for _ in range(5):
        member.set(some([1]))
        member.get([key(1)])
    assert caplog.text.count("no kvtier server at") == 1


def test_without_a_server_sets_fail_and_gets_miss_at_once(tmp_path, join):
    member = join(tmp_path / "nobody.sock", wait_ms=60_000)
    assert member.set(some([1])) == (False, "there is no kvtier server now")
    assert member.get([key(1)]) == [None]
    assert member.exists([key(1)]) == [False]
    assert member.delete([key(1)]) == [False]


def test_a_server_killed_among_batches_costs_misses_and_comes_back(serve, join):
    server = serve().ready()
    member = join(server.socket)
    assert member.set(some(NAMES))[0]
    numbers, views = [], []
    for turn in range(40):
        views.append([*map(buffer, bytes_of(NAMES))])
        numbers.append(member.adapter.submit_batch_set([*some(NAMES)], views[-1]))
        views.append([buffer(bytes(VALUE_BYTES)) for _ in NAMES])
        numbers.append(member.adapter.submit_batch_get([*some(NAMES)], views[-1]))
        if turn == 20:
            member.wait(numbers[3])
            server.end(signal.SIGKILL)
    for number, buffers in zip(numbers, views, strict=True):
        _, _, each = member.wait(number)
        for name, view, there in zip(NAMES, buffers, each or [], strict=bool(each)):
            assert not there or bytes(view) == value(name)
    assert member.get([*some(NAMES)]) == [None] * len(NAMES)
    again = serve().ready()
    until(lambda: member.set(some(NAMES))[0], "a server that takes values")
    until(lambda: member.get([*some(NAMES)]) == bytes_of(NAMES), "hits")
    member.adapter.close()
    nothing_held(again)


def test_a_frozen_server_costs_its_deadline_and_comes_back(serve, join):
    server = serve().ready()
    member = join(server.socket, deadline_ms=500)
    assert member.set(some(NAMES))[0]
    assert member.get([*some(NAMES)]) == bytes_of(NAMES)
    server.process.send_signal(signal.SIGSTOP)
    try:
        assert member.get([*some(NAMES)]) == [None] * len(NAMES)
        assert not member.set(some(["new"]))[0]
        assert member.exists([*some(NAMES)]) == [False] * len(NAMES)
    finally:
        server.process.send_signal(signal.SIGCONT)
    until(lambda: member.get([*some(NAMES)]) == bytes_of(NAMES), "hits")
    rest(server)


def test_a_batch_whose_time_is_over_before_its_turn_fails(server, join):
    member = join(server.socket, wait_ms=1)
    numbers = [
        member.adapter.submit_batch_set([key(name)], [buffer(value(name, 8 << 20))])
        for name in range(50)
    ]
    errors = {member.wait(number)[1] for number in numbers}
    assert errors - {"", "1 of 1 not stored"} == {"the time for it was over before its turn"}


def test_closing_with_work_in_flight_completes_everything_and_holds_nothing(server, join):
    member = join(server.socket)
    numbers = []
    for _ in range(30):
        views = [buffer(value(name, 1 << 20)) for name in range(4)]
        numbers.append(member.adapter.submit_batch_set([*some(range(4))], views))
        numbers.append(member.adapter.submit_batch_get([*some(range(4))], views))
    member.adapter.close()
    done = {number: each for number, *each in member.adapter.drain_completions()}
    assert sorted(done) == sorted(numbers)
    late = member.adapter.submit_batch_exists([key(1)])
    assert member.adapter.drain_completions() == [(late, False, "the adapter is closed", [False])]
    nothing_held(server)
    member.adapter.close()


def test_a_missing_label_stops_the_start_and_names_the_fix():
    with pytest.raises(EngineError, match='add "label" with a text'):
        KVTierAdapter(socket="/nowhere")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"label": ""}, "label is ''"),
        ({"label": 7}, "label is 7"),
        ({"label": "a\nb"}, "must be a text"),
        ({"label": "l", "lable": "l"}, "unknown key 'lable': did you mean label?"),
        ({"label": "l", "chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"label": "l", "wait_ms": True}, "wait_ms is True"),
        ({"label": "l", "verify_loads": 1}, "must be true or false"),
    ],
)
def test_parameters_that_do_not_fit_stop_the_start(parameters, reason):
    with pytest.raises(EngineError, match=re.escape(reason)):
        KVTierAdapter(**parameters)


def test_hashes_of_64_bits_are_refused_with_the_fix(server, join):
    member = join(server.socket)
    ok, error = member.set({"model@00000000@0@0123456789abcdef": value(1)})
    assert not ok
    assert "--hash-algorithm blake3" in error
    assert member.exists(["model@00000000@0@0123456789abcdef"]) == [False]


@given(st.text())
def test_what_is_no_key_of_lmcache_is_never_stored(text):
    assert block_key(text) is None


@settings(max_examples=30)
@given(
    st.lists(
        st.from_regex(r"[^@]{1,30}@[0-9a-f]{8}@[0-9a-f]@[0-9a-f]{64}(@[^@]{1,20})?", fullmatch=True)
        | st.text(max_size=80),
        unique=True,
        max_size=8,
    )
)
def test_any_keys_come_back_with_their_own_bytes_or_not_at_all(fuzzed, keys):
    good = [one for one in keys if block_key(one) is not None]
    assert fuzzed.set({one: value(one, 64) for one in keys})[0] == (good == keys)
    assert fuzzed.get(keys, 64) == [value(one, 64) if one in good else None for one in keys]
    assert fuzzed.exists(keys) == [one in good for one in keys]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """An adapter that lasts for all examples."""
    from fleet import Member
    from plane import Plane

    plane = Plane(tmp_path_factory.mktemp("fuzz") / "k.sock", 2000)
    member = Member(plane.path, label="fuzz")
    yield member
    member.adapter.close()
    plane.stop()


def test_buffers_that_cannot_be_used_are_misses(server, join):
    member = join(server.socket)
    readonly = memoryview(bytes(100))
    strided = memoryview(bytearray(200))[::2]
    for view in (readonly, strided, memoryview(bytearray())):
        assert not member.wait(member.adapter.submit_batch_set([key(1)], [view]))[0]
        assert member.wait(member.adapter.submit_batch_get([key(1)], [view]))[2] == [False]
    assert not member.wait(member.adapter.submit_batch_set([key(1), key(2)], [readonly]))[0]


def test_it_needs_neither_lmcache_nor_vllm_nor_torch(server):
    code = (
        "import sys; from kvtier.lmcache_adapter import KVTierAdapter as K; "
        f"K(label='l', socket={str(server.socket)!r}).close(); "
        "assert not {'lmcache', 'vllm', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_change_of_bytes_in_memory_is_a_miss_for_who_verifies(planes, join):
    plane = planes()
    member = join(plane.path, verify_loads=True)
    assert member.set({key(1): value(1, 1000)})[0]
    [space] = [one for one in plane.cache.directory.namespaces.values() if one.blocks]
    [block] = space.blocks.values()
    plane.host.memory(block.slot, space.pool)[500] ^= 1
    assert member.get([key(1)], 1000) == [None]
    until(lambda: not plane.do(lambda: space.blocks), "the drop of the block")
    assert member.exists([key(1)]) == [False]


def test_batches_beyond_the_bound_fail_at_once(planes, join, monkeypatch):
    monkeypatch.setattr("kvtier.lmcache.lanes.BATCHES_AT_MOST", 2)
    member = join(planes().path)
    views = [buffer(value(1, 1000))]
    numbers = [member.adapter.submit_batch_set([key(1)], views) for _ in range(500)]
    errors = {member.wait(number)[1] for number in numbers}
    assert errors == {"", "too many batches wait already"}
