"""Quotas over HTTP and the command line, on a real server that an engine uses."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys

import httpx
import pytest
from kvtier import protocol as wire
from kvtier.client import Client, ClientOptions
from kvtier.core import Role
from servers import START_SECONDS, clean_environment, run_kvtier
from support import MANIFEST, chain, until

pytestmark = pytest.mark.slow

SLOT = 4096
KEPT = {"acme": {"soft": "24KiB", "hard": "32KiB"}}


@pytest.fixture
def start(serve, tmp_path):
    """Start a server; the next one has its state."""

    def begin(**environment):
        state = {"KVTIER_STATE": str(tmp_path / "state")}
        return serve("--capacity", "4MiB", **state, **environment).ready()

    return begin


def put(served, quotas, version="*", **query):
    headers = {} if version is None else {"If-Match": version}
    body = {"quotas": quotas}
    url = served.url + "/v1/quotas"
    return httpx.put(url, json=body, headers=headers, params=query, timeout=10)


def store(served, tenant, blocks, salt=None):
    """Store blocks as an engine does, for a tenant or for who has a salt."""
    hello = wire.Hello(wire.PROTOCOL_VERSION, Role.SCHEDULER, "e", 0, MANIFEST)
    client = Client(ClientOptions(served.socket), hello, logging.getLogger("test"))
    client.start()
    who = wire.salted(client.meet().salt_key, salt) if salt else tenant
    step = wire.Step(0, need=blocks, tenants=[(who, blocks)])
    slots = client.step(step).slots
    keys = b"".join(chain(f"{tenant} {salt}", blocks))
    client.send_step(wire.Step(0, commits=[wire.Chain(b"", keys, slots, who)]))
    client.lookup(keys, 0, who)
    client.close()


def test_quotas_are_put_and_read_with_what_they_do(start):
    served = start()
    store(served, "acme", 12)
    assert put(served, KEPT, None).status_code == 428
    assert put(served, KEPT, '"9"').status_code == 412
    tried = put(served, KEPT, None, dry_run="true").json()
    assert (tried["dry_run"], tried["evict_bytes"]["host"]) == (True, 4 * SLOT)
    done = put(served, KEPT, '"1"')
    assert (done.status_code, done.headers["ETag"]) == (200, '"2"')
    until(lambda: served.json("/v1/quotas")["tenants"][0]["evicted_blocks"] == 4, "the evictions")
    found = served.json("/v1/quotas")
    assert (found["version"], found["quotas"]) == (2, KEPT)
    (acme,) = found["tenants"]
    assert acme["tenant"] == "acme"
    assert acme["quota"] == {"soft": 24 << 10, "hard": 32 << 10}
    assert (acme["used_bytes"]["host"], acme["fullness"]) == (8 * SLOT, 1.0)
    assert served.json("/v1/settings")["changed"] == {"quotas.tenants": KEPT}
    assert served.json("/v1/config")["quotas"]["tenants"] == KEPT
    (entry,) = served.json("/v1/audit")["entries"]
    assert entry["changes"] == {"quotas.tenants": [{}, KEPT]}
    text = served.get("/metrics")[1]
    assert 'kvtier_tenant_bytes{tenant="acme",tier="host"} 32768.0' in text
    assert 'kvtier_tenant_quota_bytes{limit="hard",tenant="acme",tier="all"} 32768.0' in text
    assert 'kvtier_tenant_quota_used_ratio{tenant="acme"} 1.0' in text
    assert 'kvtier_tenant_quota_evicted_blocks_total{tenant="acme"} 4.0' in text
    assert 'kvtier_tenant_quota_refused_blocks_total{tenant="acme"} 0.0' in text


WRONG = [
    ({"acme": {"soft": "9GiB", "hard": "8GiB"}}, "soft (9GiB) is above hard (8GiB)"),
    ({"acme": {"disk_soft": "9GiB", "disk_hard": "8GiB"}}, "above disk_hard"),
    ({"acme": {"hardd": "8GiB"}}, "nearest is hard"),
    ({"acme": {"hard": "8"}}, "is not a size"),
    ({"acme": {}}, "needs limits"),
    ({"a" * 129: {"hard": "8GiB"}}, "is not a tenant"),
    ({"a\nb": {"hard": "8GiB"}}, "is not a tenant"),
    ({f"t{n}": {"hard": "8GiB"} for n in range(1001)}, "more than the 1000"),
    ({"acme": {"hard": 8}}, "quotas.acme.hard"),
    (["acme"], "quotas"),
]


def test_quotas_that_do_not_fit_change_nothing(start):
    served = start()
    for quotas, said in WRONG:
        refused = put(served, quotas)
        assert (refused.status_code, said in refused.json()["detail"]) == (422, True), refused.text
    assert served.json("/v1/quotas") == {"version": 1, "quotas": {}, "tenants": []}


def test_quotas_outlive_a_restart(start):
    first = start()
    put(first, KEPT)
    assert first.end()[0] == 0
    again = start()
    assert again.json("/v1/quotas")["quotas"] == KEPT
    store(again, "acme", 12)
    assert again.json("/v1/quotas")["tenants"][0]["used_bytes"]["host"] == 8 * SLOT
    assert again.json("/v1/stats")["stores"]["quota"] == 4


def test_the_command_sets_shows_and_removes(start):
    served = start()
    url = ("--url", served.url)
    done = run_kvtier("quotas", "set", "acme", "soft=24KiB", "hard=32KiB", *url)
    assert "quotas.tenants" in done.stdout, done.stderr
    run_kvtier("quotas", "set", "*", "host_hard=1MiB", *url)
    store(served, "acme", 4)
    shown = run_kvtier("quotas", *url, COLUMNS="160")
    assert "soft 24KiB, hard 32KiB" in shown.stdout, shown.stderr
    assert "50.0%" in shown.stdout
    assert "host_hard 1MiB" in shown.stdout
    answer = json.loads(run_kvtier("quotas", "--json", *url).stdout)
    assert answer["quotas"] == KEPT | {"*": {"host_hard": "1MiB"}}
    tried = run_kvtier("quotas", "set", "acme", "hard=8KiB", "--dry-run", *url)
    assert "Nothing was changed" in tried.stdout, tried.stderr
    run_kvtier("quotas", "remove", "*", *url)
    assert served.json("/v1/quotas")["quotas"] == KEPT
    for arguments, said in [
        (("set", "acme", "hard"), "write soft=6GiB"),
        (("set", "acme", "hard=8"), "is not a size"),
        (("set", "acme", "soft=8GiB", "hard=1GiB"), "is above hard"),
        (("remove", "globex"), "has no quota of its own"),
    ]:
        wrong = run_kvtier("quotas", *arguments, *url)
        assert (wrong.returncode, said in wrong.stderr) == (1, True), wrong.stderr


def salt(file, text, tenant):
    """Run the command that reads a salt."""
    command = [sys.executable, "-m", "kvtier", "quotas", "salt", str(file), tenant]
    environment, limit = clean_environment(), START_SECONDS
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env=environment,
        timeout=limit,
    )  # fmt: skip


def test_a_salts_tenant_is_known_and_neither_salt_nor_digest_is_shown(start, tmp_path):
    file = tmp_path / "salts.json"
    made = salt(file, "pepper\n", "acme")
    digest = made.stdout.strip()
    assert len(digest) == 32, made.stderr
    served = start(KVTIER_QUOTAS__SALTS_FILE=str(file), KVTIER_QUOTAS__TENANTS=json.dumps(KEPT))
    store(served, "", 12, salt="pepper")
    store(served, "", 3, salt="paprika")
    assert served.json("/v1/quotas")["tenants"][0]["used_bytes"]["host"] == 8 * SLOT
    assert {one["tenant"] for one in served.json("/v1/tenants")} == {"", "acme"}
    assert salt(file, "paprika", "globex").returncode == 0
    served.process.send_signal(signal.SIGHUP)

    def known():
        store(served, "", 2, salt="paprika")
        return "globex" in {one["tenant"] for one in served.json("/v1/tenants")}

    until(known, "the new salt")
    paths = ("/v1/quotas", "/v1/tenants", "/v1/settings", "/v1/config", "/v1/audit", "/metrics")
    key = json.loads(file.read_text())["key"]
    for text in (*[served.get(path)[1] for path in paths], served.log):
        assert not any(secret in text for secret in ("pepper", "paprika", digest, key))


def test_a_salts_file_that_does_not_fit_stops_the_start(tmp_path):
    file = tmp_path / "salts.json"
    file.write_text("pepper: acme")
    refused = run_kvtier(
        "serve", "--socket", tmp_path / "s", "--port", "0", KVTIER_QUOTAS__SALTS_FILE=str(file)
    )
    assert refused.returncode == 1
    assert "is not a file of salts" in refused.stderr
    assert "pepper" not in refused.stderr
