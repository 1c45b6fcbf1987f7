"""Settings that change over HTTP and the command line, on a real server that engines use."""

from __future__ import annotations

import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from kvtier.live import LIVE
from kvtier.policies import POLICIES
from servers import START_SECONDS, Served, clean_environment, run_kvtier
from support import MANIFEST, chain, until

pytestmark = pytest.mark.slow

SLOTS = 512
CAPACITY = f"{SLOTS * 4}KiB"


@contextmanager
def serving(folder, text="", *arguments):
    """Run a server over a settings file in `folder`."""
    file = folder / "kvtier.yaml"
    file.write_text(
        text or f"host: {{capacity: {CAPACITY}}}\ndisk: {{path: {folder / 'blocks'}}}\n"
    )
    stderr = folder / "server.log"
    command = [sys.executable, "-m", "kvtier", "serve", "--config", str(file), "--port", "0"]
    command += ["--socket", str(folder / "kvtier.sock"), *arguments]
    with stderr.open("a") as log:
        begin = log.tell()
        environment = clean_environment(KVTIER_STATE=str(folder / "state"))
        process = subprocess.Popen(command, stderr=log, env=environment)
    served = Fresh(process, folder / "kvtier.sock", stderr)
    served.begin = begin
    try:
        yield served.ready()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, served.log


class Fresh(Served):
    """A server whose log began somewhere in a file."""

    begin = 0

    @property
    def log(self):
        return self.stderr.read_bytes()[self.begin :].decode()


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path) as one:
        yield one


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A server whose settings stay as they are."""
    with serving(tmp_path_factory.mktemp("untouched")) as one:
        yield one
        assert get(one, "/v1/settings").json()["version"] == 1


def patch(served, path, body, version="*", **query):
    headers = {} if version is None else {"If-Match": version}
    return httpx.patch(served.url + path, json=body, headers=headers, params=query, timeout=10)


def get(served, path):
    return httpx.get(served.url + path, timeout=10)


def test_a_change_is_read_back_everywhere_and_has_a_version(served):
    before = get(served, "/v1/settings")
    assert before.headers["ETag"] == '"1"'
    body = {"settings": {"policy": "mq", "capacity": "1MiB"}}
    done = patch(served, "/v1/tiers/host", body, '"1"')
    assert (done.status_code, done.headers["ETag"]) == (200, '"2"')
    assert done.json()["changes"] == {
        "host.capacity": [CAPACITY.replace("2048KiB", "2MiB"), "1MiB"],
        "host.policy": ["auto", "mq"],
    }
    assert get(served, "/v1/config").json()["host"]["policy"] == "mq"
    assert get(served, "/v1/settings").json()["changed"] == {
        "host.capacity": "1MiB",
        "host.policy": "mq",
    }
    tier = get(served, "/v1/tiers/host").json()
    assert (tier["policy"], tier["capacity_bytes"]) == ("mq", 1 << 20)
    (entry,) = get(served, "/v1/audit").json()["entries"]
    assert (entry["what"], entry["who"], entry["version"]) == ("change", "127.0.0.1", 2)


@pytest.mark.parametrize(
    ("path", "body", "version", "status", "said"),
    [
        ("/v1/settings", {"changes": {"host.policy": "lru"}}, None, 428, 'If-Match: "1"'),
        ("/v1/settings", {"changes": {"host.policy": "lru"}}, '"7"', 412, "have version 1"),
        ("/v1/settings", {"changes": {"host.policy": "lru"}}, "soon", 400, "If-Match is a version"),
        ("/v1/settings", {"changes": {"host.polizy": "lru"}}, "*", 422, "nearest is host.policy"),
        ("/v1/settings", {"changes": {"host.policy": "best"}}, "*", 422, "host.policy"),
        ("/v1/settings", {"changes": {"http.port": 1}}, "*", 422, "need a restart"),
        ("/v1/settings", {"changes": {}}, "*", 422, "changes"),
        ("/v1/settings", {"changes": {"host.policy": ["lru"]}}, "*", 422, "host.policy"),
        ("/v1/settings", {"change": {}}, "*", 422, "change"),
        ("/v1/settings", [1], "*", 422, "body"),
        ("/v1/tiers/disk", {"settings": {"capacity": "1GB", "x": 1}}, "*", 422, "disk.x"),
        ("/v1/tiers/device", {"settings": {"capacity": "1GB"}}, "*", 422, "device.capacity"),
        ("/v1/tiers/moon", {"settings": {"capacity": "1GB"}}, "*", 422, "tier"),
        (
            "/v1/settings",
            {"changes": {"host.policy": "lru"}, "guard": {"max_drop": 2}},
            "*",
            422,
            "max_drop",
        ),
    ],
)
def test_what_does_not_fit_is_a_problem_and_changes_nothing(
    untouched, path, body, version, status, said
):
    before = get(untouched, "/v1/settings").json()
    answer = patch(untouched, path, body, version)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in answer.json()["detail"]
    assert get(untouched, "/v1/settings").json() == before


def test_a_dry_run_needs_no_version_and_changes_nothing(served):
    body = {"settings": {"capacity": "64KiB"}}
    answer = patch(served, "/v1/tiers/host", body, None, dry_run=True)
    assert (answer.status_code, answer.json()["dry_run"], answer.json()["version"]) == (
        200,
        True,
        1,
    )
    assert get(served, "/v1/settings").json()["version"] == 1


def test_changes_outlive_a_restart_and_are_forgotten_on_demand(tmp_path):
    with serving(tmp_path) as one:
        patch(one, "/v1/settings", {"changes": {"disk.write_mode": "on_evict"}})
    with serving(tmp_path) as one:
        assert get(one, "/v1/settings").json()["changed"] == {"disk.write_mode": "on_evict"}
        assert get(one, "/v1/tiers/disk").json()["lower"]["write_mode"] == "on_evict"
        assert get(one, "/v1/audit").json()["entries"][0]["what"] == "change"
    with serving(tmp_path, "", "--reset-settings") as one:
        assert get(one, "/v1/settings").json()["changed"] == {}
        assert get(one, "/v1/tiers/disk").json()["lower"]["write_mode"] == "through"


def test_sighup_reads_the_file_again_and_a_wrong_file_changes_nothing(served, tmp_path):
    file = tmp_path / "kvtier.yaml"
    good = file.read_text()
    file.write_text(good + "loads: {wait_seconds: 7}\nshutdown_seconds: 9\n")
    served.process.send_signal(signal.SIGHUP)
    until(lambda: get(served, "/v1/config").json()["loads"]["wait_seconds"] == 7, "the new file")
    assert "other values of shutdown_seconds need a restart" in served.log
    file.write_text("loads: {wait_seconds: soon}\n")
    served.process.send_signal(signal.SIGHUP)
    until(lambda: "the settings stay as they are" in served.log, "the refusal")
    assert get(served, "/v1/config").json()["loads"]["wait_seconds"] == 7


def test_the_command_line_shows_changes_and_tells(served):
    url = ("--url", served.url)
    shown = run_kvtier("tiers", *url)
    assert all(key in shown.stdout for key in LIVE), shown.stderr
    tried = run_kvtier("tiers", "set", "host.capacity=64KiB", "--dry-run", *url)
    assert "Nothing was changed" in tried.stdout
    done = run_kvtier(
        "tiers", "set", "disk.write_rate=1MiB", "host.policy=lru", "--guard",
        "drop=0.05,within=10m", *url,
    )  # fmt: skip
    assert "host.policy: auto to lru" in done.stdout, done.stderr
    audit = run_kvtier("audit", *url, COLUMNS="160")
    assert "disk.write_rate: none to 1MiB" in audit.stdout
    wrong = run_kvtier("tiers", "set", "host.policy=lruu", *url)
    assert (wrong.returncode, "nearest is lru" in wrong.stderr) == (1, True)
    stale = run_kvtier("tiers", "set", "host.policy=mq", "--if-version", "1", *url)
    assert (stale.returncode, "have version 2" in stale.stderr) == (1, True)
    answer = json.loads(run_kvtier("tiers", "--json", *url).stdout)
    assert answer["changed"]["disk.write_rate"] == "1MiB"
    none = run_kvtier("tiers", "set", "disk.write_rate=", *url)
    assert "disk.write_rate: 1MiB to none" in none.stdout, none.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("host.policy",), ("=lru",), ("host.policy=lru", "--guard", "within=10m"),
        ("host.policy=lru", "--guard", "drop=much"), ("host.policy=lru", "--guard", "fall=1"),
    ],
)  # fmt: skip
def test_a_command_that_says_nothing_sensible_is_refused_with_an_example(untouched, arguments):
    done = run_kvtier("tiers", "set", *arguments, "--url", untouched.url)
    assert done.returncode == 1
    assert "write" in done.stderr


# Under load.


class Load(threading.Thread):
    """An engine that asks and stores all the time, and counts what went wrong."""

    def __init__(self, path, number):
        super().__init__(daemon=True)
        hello = wire.Hello(wire.PROTOCOL_VERSION, Role.SCHEDULER, f"load-{number}", 0, MANIFEST)
        options = ClientOptions(Path(path), deadline=5.0)
        self.client = Client(options, hello, logging.getLogger("test.load"))
        self.random = random.Random(number)
        self.requests = 0
        self.failures = []
        self.hit = self.asked = 0
        self.stopped = threading.Event()

    def run(self):
        self.client.start()
        until(lambda: self.client.meet() is not None, "a session", START_SECONDS)
        while not self.stopped.wait(0.005):
            name = f"chat {self.random.randint(0, 30)}"
            self.request(chain(name, self.random.randint(2, 12)))
        self.client.close()

    def request(self, keys):
        found = self.client.lookup(b"".join(keys), 0)
        if found is not None and found.within:
            end = time.monotonic() + found.within + 1.0
            seq, found = found.seq, None
            while found is None and time.monotonic() < end:
                found = self.client.answer(seq, 0.05)
        if found is None:
            self.failures.append(f"lookup: {dict(self.client.failures)}")
            return
        hits = len(found.slots)
        self.asked, self.hit = self.asked + len(keys), self.hit + hits
        new = keys[hits:]
        above = [b"".join(keys[:hits])] if hits else []
        granted = self.client.step(wire.Step(0, need=len(new), above=above))
        if granted is None:
            self.failures.append(f"step: {dict(self.client.failures)}")
            return
        new = new[: len(granted.slots)]
        stored = wire.Chain(keys[hits - 1] if hits else b"", b"".join(new), granted.slots)
        self.client.send_step(wire.Step(0, commits=[stored], releases=[found.seq]))
        self.requests += 1


@contextmanager
def load(served, engines=3):
    threads = [Load(served.socket, number) for number in range(engines)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.stopped.set()
        for thread in threads:
            thread.join(20)


def drawn(made):
    """Return a random change of up to three settings."""
    choices = {
        "host.policy": lambda: made.choice(list(POLICIES)),
        "disk.policy": lambda: made.choice(list(POLICIES)),
        "host.capacity": lambda: f"{made.choice([256, 512, 1024, 2048, 4096])}KiB",
        "disk.capacity": lambda: f"{made.choice([1, 2, 8])}MiB",
        "disk.write_mode": lambda: made.choice(["through", "on_reuse", "on_evict"]),
        "disk.admission": lambda: made.choice(["always", "second_hit", "learned", "cost"]),
        "disk.write_rate": lambda: made.choice([None, "1MiB", "100MiB"]),
        "disk.codec": lambda: made.choice(["none", "always", "auto"]),
        "disk.failures": lambda: made.randint(1, 9),
        "disk.keep_free": lambda: made.choice(["1MiB", "2GiB"]),
        "host.low_watermark": lambda: made.choice([0.3, 0.6, 0.9]),
        "loads.mode": lambda: made.choice(["auto", "always", "never"]),
        "loads.wait_seconds": lambda: made.choice([0.5, 5.0]),
        "log.level": lambda: made.choice(["info", "warning"]),
    }
    keys = made.sample(list(choices), made.randint(1, 3))
    return {key: choices[key]() for key in keys}


def test_a_hundred_changes_in_a_row_disturb_no_request(tmp_path):
    made = random.Random(5)
    with serving(tmp_path) as served, load(served) as engines:
        until(lambda: sum(one.requests for one in engines) > 200, "traffic", 30)
        began, before = time.monotonic(), sum(one.requests for one in engines)
        for _ in range(100):
            changes = drawn(made)
            answer = patch(served, "/v1/settings", {"changes": changes})
            assert answer.status_code == 200, answer.text
            effective = get(served, "/v1/config").json()
            for key, value in changes.items():
                section, _, name = key.partition(".")
                shown = str(effective[section][name]).replace("KiB", "").replace("MiB", "")
                if key not in {"host.capacity", "disk.capacity"}:
                    assert shown == str(value).replace("KiB", "").replace("MiB", ""), key
        seconds = time.monotonic() - began
        rate = (sum(one.requests for one in engines) - before) / seconds
        assert [one.failures for one in engines] == [[], [], []]
        assert rate >= 50, f"{rate:.0f} requests a second are no load"
        last = get(served, "/v1/settings").json()
        until(lambda: not_under_way(served, last), "the capacity", 30)
    with serving(tmp_path) as again:
        assert get(again, "/v1/config").json() == last["settings"]


def not_under_way(served, last):
    tier = get(served, "/v1/tiers/host").json()
    return tier["policy"] == last["settings"]["host"]["policy"] and (
        tier["used_bytes"] <= tier["capacity_bytes"]
    )


def test_a_policy_there_and_back_keeps_the_hit_ratio(tmp_path):
    text = f"host: {{capacity: {SLOTS // 4 * 4}KiB}}\n"
    with serving(tmp_path, text) as served, load(served, 1) as (engine,):
        until(lambda: engine.requests > 1000, "warmth", 60)
        before = ratio_over(engine, 1000)
        for name in ("arc", "auto"):
            assert (
                patch(served, "/v1/tiers/host", {"settings": {"policy": name}}).status_code == 200
            )
        after = ratio_over(engine, 1000)
        assert engine.failures == []
    assert after >= 0.95 * before


def ratio_over(engine, requests):
    asked, hit, end = engine.asked, engine.hit, engine.requests + requests
    until(lambda: engine.requests >= end or engine.failures, "requests", 60)
    return (engine.hit - hit) / (engine.asked - asked)
