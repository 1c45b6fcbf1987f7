"""`kvtier doctor`: what each check finds, with what is wrong made so, and a real server."""

import dataclasses
import json
import logging
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.config import load_settings
from kvtier.core import Manifest, Role, Tier, WriteMode
from kvtier.doctor import fleet, host, state
from kvtier.doctor.disk import Bounds, disk_tier, measure
from kvtier.doctor.findings import Level
from kvtier.doctor.redis import redis_tier
from kvtier.live import state_folder
from kvtier.stats import Stats
from kvtier.tier_readings import LowerDetails, NamespaceReading, TierReading
from kvtier.tiers import compression
from support import MANIFEST, manifest
from tiers.redis_servers import needs_redis, redis_server

GIB = 1 << 30
SMALL = Bounds(seconds=0.2, size=16 << 20)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Load settings from text."""
    for name in list(os.environ):
        if name.upper().startswith("KVTIER"):
            monkeypatch.delenv(name)

    def load(text="", **overrides):
        file = tmp_path / "doctor.yaml"
        file.write_text(text)
        keys = {name.replace("__", "."): value for name, value in overrides.items()}
        return load_settings(file, {"socket": str(tmp_path / "run/k.sock"), **keys})

    return load


@pytest.fixture
def machine(tmp_path):
    """Make a /proc and control groups that say what they should."""

    def make(total=64 * GIB, available=32 * GIB, limit="max", huge=0):
        proc, groups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        groups.mkdir()
        (proc / "self/cgroup").write_text("0::/\n")
        (groups / "memory.max").write_text(f"{limit}\n")
        (proc / "meminfo").write_text(
            f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n"
            f"HugePages_Free: {huge}\nHugepagesize: 2048 kB\n"
        )
        return {"proc": proc, "cgroups": groups}

    return make


def levels(found):
    return [finding.level for finding in found]


def check_fix(finding, level, *parts):
    """A finding that is not well says what to do."""
    assert finding.level is level
    assert finding.fix.endswith(".")
    for part in parts:
        assert part in f"{finding.said} {finding.fix}"


# The host.


def test_a_capacity_that_fits_is_well(settings, machine):
    assert host.memory(settings(), running=False, **machine()).level is Level.OK


@pytest.mark.parametrize(
    ("given", "level", "part"),
    [
        ({"total": 2 * GIB}, Level.PROBLEM, "larger than the machine's memory"),
        ({"limit": 3 * GIB}, Level.PROBLEM, "the memory limit of this control group"),
        ({"limit": 4 * GIB + 5}, Level.WARNING, "leaves less than 1 GiB"),
        ({"available": GIB}, Level.PROBLEM, "available now"),
    ],
)
def test_a_capacity_that_does_not_fit_is_named_with_what_bounds_it(
    settings, machine, given, level, part
):
    check_fix(host.memory(settings(), running=False, **machine(**given)), level, part)


def test_memory_that_a_running_server_has_taken_is_not_missed(settings, machine):
    assert host.memory(settings(), running=True, **machine(available=GIB)).level is Level.OK


@pytest.mark.parametrize(
    ("wanted", "free", "level"),
    [
        ("auto", 0, Level.OK),
        ("never", 0, Level.OK),
        ("always", 31, Level.PROBLEM),
        ("always", 32, Level.OK),
    ],
)
def test_huge_pages_are_compared_with_what_is_asked_for(settings, machine, wanted, free, level):
    chosen = settings(f"host: {{huge_pages: {wanted}, capacity: 64MiB}}")
    found = host.huge_pages(chosen, running=False, proc=machine(huge=free)["proc"])
    assert found.level is level
    if level is Level.PROBLEM:
        check_fix(found, level, "vm.nr_hugepages=32", "31 of 32")


@pytest.mark.parametrize(
    ("limit", "gpu", "level"),
    [
        (64 << 10, True, Level.WARNING),
        (64 << 10, False, Level.OK),
        (4 * GIB, True, Level.OK),
        (host.resource.RLIM_INFINITY, True, Level.OK),
    ],
)
def test_a_memlock_limit_matters_where_there_is_a_gpu(
    settings, monkeypatch, tmp_path, limit, gpu, level
):
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (limit, limit))
    if gpu:
        (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    found = host.memlock(settings(), devices=tmp_path)
    assert found.level is level
    if level is Level.WARNING:
        check_fix(found, level, "64 KiB", "--ulimit memlock=-1")


def test_shared_memory_that_the_kernel_refuses_is_a_problem(monkeypatch):
    assert host.shared_memory().level is Level.OK

    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    check_fix(host.shared_memory(), Level.PROBLEM, "not permitted", "seccomp")


def test_a_socket_can_be_made_where_its_folder_can(settings, tmp_path):
    assert "will be made" in host.socket_folder(settings()).said
    (tmp_path / "run").mkdir(mode=0o700)
    assert "no server lives on it" in host.socket_folder(settings()).said
    assert list((tmp_path / "run").iterdir()) == []


def test_a_socket_that_cannot_be_is_named_with_the_fix(settings, tmp_path):
    long = settings(socket=str(tmp_path / ("s" * 108)))
    check_fix(host.socket_folder(long), Level.PROBLEM, "107")
    (tmp_path / "file").write_text("")
    taken = settings(socket=str(tmp_path / "file"))
    check_fix(host.socket_folder(taken), Level.PROBLEM, "not a socket")
    below = settings(socket=str(tmp_path / "file/k.sock"))
    check_fix(host.socket_folder(below), Level.PROBLEM, "file")


def test_a_folder_that_anyone_may_write_is_warned_of(settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    check_fix(host.socket_folder(settings()), Level.WARNING, "Anyone may write")


def test_a_folder_that_shuts_the_group_out_is_a_problem(settings, tmp_path):
    chosen = settings("allow_group: root")
    (tmp_path / "run").mkdir(mode=0o700)
    check_fix(host.socket_folder(chosen), Level.PROBLEM, "allow_group", "chgrp root")
    (tmp_path / "run").chmod(0o711)
    assert host.socket_folder(chosen).level is Level.OK


def test_the_state_that_a_server_keeps_is_well_where_it_can_be_written(settings, tmp_path):
    made = settings(state=str(tmp_path / "to be made"))
    (found,) = state.state(made)
    assert (found.level, "0 changed settings" in found.said) == (Level.OK, True)
    assert not (tmp_path / "to be made").exists()
    folder = state_folder(made)
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(
        '{"format": 1, "version": 3, "changes": {"host.policy": "lru"}}'
    )
    (found,) = state.state(made)
    assert (found.level, "1 changed settings" in found.said) == (Level.OK, True)


def test_kept_settings_that_stop_a_start_are_a_problem(settings, tmp_path):
    made = settings(state=str(tmp_path / "state"))
    folder = state_folder(made)
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text('{"format": 1, "version": 3, "changes": {"no": 1}}')
    (found,) = state.state(made)
    assert found.level is Level.PROBLEM
    assert "--reset-settings" in found.said


def test_a_state_that_cannot_be_kept_is_warned_of(settings, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in ("/proc/kvtier/state", str(tmp_path / "file")):
        _, *found = state.state(settings(state=path))
        assert [one.level for one in found] == [Level.WARNING]
        assert "would be forgotten at a restart" in found[0].said
    monkeypatch.setattr(state, "ROOM_BYTES", 1 << 62)
    _, found = state.state(settings(state=str(tmp_path)))
    assert (found.level, "of room" in found.said) == (Level.WARNING, True)


def test_a_state_that_others_may_change_is_warned_of(settings, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    made = settings(state=str(folder))
    folder.chmod(0o777)
    _, found = state.state(made)
    assert (found.level, "Anyone may write" in found.said) == (Level.WARNING, True)
    folder.chmod(0o700)
    assert len(state.state(made)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_state_that_is_somebody_elses_is_warned_of(settings, tmp_path):
    made = settings(state=str(tmp_path / "state"))
    folder = state_folder(made)
    folder.mkdir(parents=True)
    os.chown(folder, 4711, 4711)
    _, found = state.state(made)
    assert found.level is Level.WARNING
    assert f"{folder} belongs to user 4711" in found.said


def test_a_secret_that_anyone_may_read_is_warned_of(settings, tmp_path):
    file = tmp_path / "token"
    file.write_text("x" * 20)
    file.chmod(0o644)
    chosen = settings(f"http: {{token_file: {file}}}")
    (found,) = host.secret_files(chosen)
    check_fix(found, Level.WARNING, "http.token_file", f"chmod o-r {file}")
    file.chmod(0o640)
    assert host.secret_files(chosen) == []


def test_an_extra_that_is_missing_is_named_where_it_is_needed(settings, monkeypatch):
    def missing():
        raise compression.CodecMissing("zstandard is not installed (pip …)")

    monkeypatch.setattr(compression, "require", missing)
    assert levels(host.extras(settings())) == [Level.OK]
    found = host.extras(settings("disk: {codec: always}\nredis: {codec: auto}"))
    assert levels(found) == [Level.PROBLEM, Level.WARNING]
    check_fix(found[0], Level.PROBLEM, "disk.codec is always", "zstandard", "kvtier[compression]")


# The disk.


def disk(settings, path, **keys):
    given = {"disk__path": str(path), "disk__keep_free": "1MiB", "disk__capacity": "64MiB", **keys}
    return settings(**given).disk


def test_without_a_disk_tier_nothing_is_touched(settings):
    assert levels(disk_tier(settings().disk, None)) == [Level.OK]


@pytest.mark.parametrize("made", [True, False])
def test_a_directory_is_measured_and_left_as_it_was(settings, tmp_path, made):
    path = tmp_path / "blocks"
    if made:
        path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    found = disk_tier(disk(settings, path), None, SMALL)
    assert Level.PROBLEM not in levels(found)
    assert any("wrote" in finding.said and "/s" in finding.said for finding in found)
    after = sorted(tmp_path.rglob("*"))
    assert [each for each in after if each.name != "doctor.yaml"] == before


def test_the_test_of_speed_is_bounded_in_time_and_size(tmp_path):
    now = [0.0]

    def clock():
        now[0] += 0.3
        return now[0]

    speed = measure(tmp_path, False, Bounds(seconds=1.0, size=256 << 20), 1 << 40, clock)
    assert speed.written == pytest.approx((4 << 20) / 0.3)
    assert now[0] < 4, "a second each way, in steps of 0.3 s"
    speed = measure(tmp_path, False, Bounds(seconds=1e9, size=8 << 20), 1 << 40, clock)
    assert speed.read == pytest.approx((4 << 20) / 0.3)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_during_the_test_leaves_nothing_and_is_told(settings, tmp_path, monkeypatch):
    path = tmp_path / "blocks"
    path.mkdir()

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    (found,) = disk_tier(disk(settings, path), None, SMALL)
    check_fix(found, Level.PROBLEM, "Input/output error", "disk.path")
    assert list(path.iterdir()) == []


def test_a_directory_of_something_else_is_a_problem(settings, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/precious").write_text("data")
    (found,) = disk_tier(disk(settings, tmp_path / "theirs"), None, SMALL)
    check_fix(found, Level.PROBLEM, "precious", "empty directory")


def test_a_directory_that_cannot_be_written_is_a_problem(settings):
    (found,) = disk_tier(disk(settings, "/proc/kvtier-blocks"), None, SMALL)
    check_fix(found, Level.PROBLEM, "/proc", "disk.path")


def test_room_is_compared_with_the_settings(settings, tmp_path):
    much = disk(settings, tmp_path / "b", disk__capacity="900TiB")
    found = disk_tier(much, 0, SMALL)
    check_fix(found[1], Level.WARNING, "disk.capacity (900TiB)")
    none = disk(settings, tmp_path / "b", disk__keep_free="900TiB")
    found = disk_tier(none, 0, SMALL)
    assert len(found) == 2, "nothing is written where there is no room"
    check_fix(found[1], Level.PROBLEM, "disk.keep_free (900TiB)")


def test_a_file_system_without_direct_io_is_warned_of(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.files.probe", lambda folder: False)
    found = disk_tier(disk(settings, tmp_path / "b"), None, SMALL)
    check_fix(found[0], Level.WARNING, "O_DIRECT", "ext4")


# Redis.


def test_a_redis_that_does_not_answer_is_a_problem_without_its_password(settings, monkeypatch):
    monkeypatch.setenv("KVTIER_REDIS__PASSWORD", "hunter2")
    found = redis_tier(settings(redis__url="redis://127.0.0.1:1"))
    check_fix(found, Level.PROBLEM, "127.0.0.1:1", "docs/operations.md")
    assert "hunter2" not in f"{found}"
    assert redis_tier(settings()).level is Level.OK


@needs_redis
def test_redis_is_advised_as_the_tier_itself_advises(settings, tmp_path, capsys):
    with redis_server(tmp_path / "r", "--appendonly", "yes") as server:
        found = redis_tier(settings(redis__url=server.url))
        check_fix(found, Level.WARNING, "set maxmemory", "allkeys-lru", "saving off")
        server.ask("CONFIG", "SET", "maxmemory", "64mb")
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.ask("CONFIG", "SET", "appendonly", "no")
        assert redis_tier(settings(redis__url=server.url)).level is Level.OK
    assert capsys.readouterr().err == ""


# A server and its fleet.


def space(number, **fields):
    each = manifest(**fields)
    return NamespaceReading(f"{number:064x}", each, 1, 4096, 1, 1)


FIELDS = [field.name for field in dataclasses.fields(Manifest)]


def other(name):
    """Return another value than the usual one has."""
    value = getattr(MANIFEST, name)
    return value + 1 if isinstance(value, int) else f"{value}-other"


@given(st.sets(st.sampled_from(FIELDS), min_size=1, max_size=5))
def test_exactly_the_fields_that_keep_two_engines_from_sharing_are_named(fields):
    one, two = space(1), space(2, **{name: other(name) for name in fields})
    (found,) = fleet.sharing([one, two])
    if len(fields) > fleet.FIELDS_AT_MOST or {"model", "weights"} <= fields:
        assert found.level is Level.OK
        return
    check_fix(found, Level.WARNING)
    for name in FIELDS:
        assert (f"{name} ({getattr(MANIFEST, name)} and" in found.said) is (name in fields)


def test_the_nearest_pairs_come_first_and_are_bounded():
    spaces = [space(number, hash_seed=str(number)) for number in range(12)]
    spaces.append(space(99, hash_seed="9", dtype="float16", layout="x"))
    found = fleet.sharing(spaces)
    assert len(found) == fleet.PAIRS_AT_MOST
    assert all("hash_seed" in finding.said for finding in found)
    assert all("PYTHONHASHSEED" in finding.fix for finding in found)


def running(*, up=True, ready=True, version="0"):
    lower = LowerDetails(up, WriteMode.THROUGH, "open", True, 0, 0, None, None)
    tiers = [TierReading(Tier.DISK, "auto", 1, 7, 0, 0, lower=lower)]
    return fleet.Running(Stats(version, ready, 0, [], 0.0, {}), tiers, [])


def test_a_server_that_does_not_do_well_says_what_it_is():
    found = fleet.server(running(up=False, ready=False), "http://x")
    assert levels(found) == [Level.WARNING, Level.WARNING, Level.PROBLEM]
    check_fix(found[2], Level.PROBLEM, "disk tier is left alone", "log")
    assert running().used(Tier.DISK) == 7
    assert running().used(Tier.REDIS) is None


# The command.


def environment(server):
    return {"KVTIER_SOCKET": str(server.socket), "KVTIER_HOST__CAPACITY": "64MiB"}


def doctor(kvtier, server, *arguments, **more):
    done = kvtier(
        "doctor", "--json", "--url", server.url, *arguments, **environment(server), **more
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)["findings"]


@pytest.mark.slow
def test_a_host_with_a_good_server_has_no_problem(serve, kvtier, tmp_path):
    server = serve("--disk", tmp_path / "blocks").ready()
    code, found = doctor(kvtier, server, KVTIER_DISK__PATH=str(tmp_path / "blocks"))
    assert code == 0, found
    checks = [finding["check"] for finding in found]
    for check in ("settings", "memory", "memlock", "shared memory", "huge pages", "socket",
                  "state", "extras", "disk tier", "Redis tier", "server", "sharing"):  # fmt: skip
        assert check in checks
    assert any(finding["said"] == "The disk tier is up." for finding in found)
    assert [each for each in (tmp_path / "blocks").iterdir() if "doctor" in each.name] == []


@pytest.mark.slow
def test_a_person_reads_marks_sentences_and_fixes(serve, kvtier, tmp_path):
    server = serve().ready()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/precious").write_text("data")
    arguments = ["--url", server.url]
    more = {"KVTIER_DISK__PATH": str(tmp_path / "theirs"), "COLUMNS": "200"}
    done = kvtier("doctor", *arguments, **environment(server), **more)
    assert done.returncode == 1, done.stdout
    assert "✗" in done.stdout
    assert "→ Set disk.path to an empty directory." in done.stdout
    assert "1 problems" in done.stdout
    assert "\x1b[" not in done.stdout


@pytest.mark.slow
def test_without_a_server_the_host_is_checked_all_the_same(kvtier, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    more = {"KVTIER_HTTP__PORT": str(port), "KVTIER_SOCKET": str(tmp_path / "k"),
            "KVTIER_HOST__CAPACITY": "64MiB"}  # fmt: skip
    assert kvtier("doctor", **more).returncode == 0
    named = kvtier("doctor", "--url", f"http://127.0.0.1:{port}", **more)
    assert named.returncode == 1
    assert "No kvtier server answers" in named.stdout


def test_settings_that_stop_a_start_are_a_problem(kvtier, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text("host: {capcity: 1GiB}")
    done = kvtier("doctor", "--config", file, "--json")
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["findings"]
    assert "host.capacity" in found["said"]


@pytest.mark.slow
def test_the_token_of_the_settings_is_used(serve, kvtier):
    secret = {"KVTIER_HTTP__TOKEN": "change-token-0123456789"}
    server = serve(**secret).ready()
    assert doctor(kvtier, server, **secret)[0] == 0
    code, found = doctor(kvtier, server)
    assert code == 1
    assert any("KVTIER_TOKEN" in finding["said"] for finding in found)


def test_two_engines_that_cannot_share_are_told_why(serve, kvtier):
    server = serve().ready()
    clients = []
    for seed in ("0", "1"):
        hello = wire.Hello(
            wire.PROTOCOL_VERSION, Role.SCHEDULER, f"engine-{seed}", 0, manifest(hash_seed=seed)
        )
        options = ClientOptions(server.socket, deadline=5.0)
        clients.append(Client(options, hello, logging.getLogger("test")))
        clients[-1].start()
        assert clients[-1].meet() is not None
    code, found = doctor(kvtier, server)
    for client in clients:
        client.close()
    (apart,) = [finding for finding in found if finding["check"] == "sharing"]
    assert code == 0
    assert apart["level"] == "warning"
    assert "hash_seed (" in apart["said"]
    assert "PYTHONHASHSEED" in apart["fix"]
