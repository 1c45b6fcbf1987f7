"""What went wrong in the field with others' caches, tried on a real server, case by case."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from control.sites import Site, keys_of, tokens
from prometheus_client.parser import text_string_to_metric_families
from support import until
from tiers.redis_servers import needs_redis, redis_server

pytestmark = pytest.mark.slow

SECRET = "hunter2-hunter2-hunter2"
SALTS = ("salt-of-tenant-a-4711", "salt-of-tenant-b-4712")


def scrape(served):
    """Return the value of each series, which stands there once."""
    found = {}
    for family in text_string_to_metric_families(served.get("/metrics")[1]):
        for sample in family.samples:
            series = (sample.name, frozenset(sample.labels.items()))
            assert series not in found, f"{series} stands there twice"
            found[series] = sample.value
    return found


def test_a_series_stands_there_once_and_none_comes_back_from_a_former_run(serve, tmp_path):
    """Case B42: one process, so no files of others; what a killed run counted is gone."""
    environment = {"KVTIER_STATE": str(tmp_path / "state")}
    options = ("--capacity", "1MiB", "--disk", tmp_path / "blocks")
    site = Site(serve(*options, **environment))
    site.store(keys_of(tokens(1, 8)))
    until(lambda: site.blocks() == 8, "the blocks")

    def names(served):
        return {series for series in scrape(served) if not series[0].startswith("kvtier_tenant")}

    expected = names(site.served)
    assert all(names(site.served) == expected for _ in range(20))
    blocks = ("kvtier_blocks", frozenset({("tier", "host")}))
    assert scrape(site.served)[blocks] == 8
    site.client.close()
    site.served.end(signal.SIGKILL)
    again = serve(*options, **environment).ready()
    fresh = scrape(again)
    assert names(again) == expected
    counted = {
        name: value
        for (name, labels), value in fresh.items()
        if name.startswith(("kvtier_blocks", "kvtier_sessions", "kvtier_stores_total"))
        and ("tier", "disk") not in labels
    }
    assert set(counted.values()) == {0.0}


def test_a_change_is_read_back_by_everybody_and_after_a_restart(serve, tmp_path):
    """Case B45: policy, a capacity below what is used, and a value that is none."""
    environment = {"KVTIER_STATE": str(tmp_path / "state")}
    site = Site(serve("--capacity", "1MiB", **environment))
    prompt = tokens(1, 200)
    site.store(keys_of(prompt))
    until(lambda: site.blocks() == 200, "the blocks")
    site.good("PATCH", "/v1/tiers/host", {"settings": {"policy": "lru"}})
    assert site.lookup(prompt)["matched_blocks"] == 200, "a policy takes over what is there"
    site.good("PATCH", "/v1/tiers/host", {"settings": {"capacity": "512KiB"}})
    until(lambda: site.served.json("/v1/tiers/host")["used_bytes"] <= 512 << 10, "the shrinking")
    assert site.lookup(prompt)["matched_blocks"] == site.blocks() > 100, "heads stay"
    status, said = site.call("PATCH", "/v1/tiers/host", {"settings": {"policy": "best"}})
    assert (status, "host.policy" in said["detail"]) == (422, True)
    expected = {"host.capacity": "512KiB", "host.policy": "lru"}

    def in_force(served):
        tier, settings = served.json("/v1/tiers/host"), served.json("/v1/settings")
        assert settings["changed"] == expected
        return tier["policy"], tier["capacity_bytes"], settings["settings"]["host"]["policy"]

    assert {in_force(site.served) for _ in range(20)} == {("lru", 512 << 10, "lru")}
    site.client.close()
    site.served.end()
    again = serve("--capacity", "1MiB", **environment).ready()
    assert {in_force(again) for _ in range(20)} == {("lru", 512 << 10, "lru")}


@needs_redis
def test_a_salt_parts_tenants_in_every_tier_and_is_shown_nowhere(serve, tmp_path):
    """Case B53: what one salt stored, no other one finds, in no tier."""
    prompt, mine, others = tokens(1, 4), SALTS[0], (SALTS[1], None)
    with redis_server(tmp_path / "redis") as redis:
        served = serve(
            "--capacity", "1MiB", "--disk", tmp_path / "blocks", "--redis", redis.url,
            KVTIER_DISK__ADMISSION="always", KVTIER_LOG__LEVEL="debug",
            KVTIER_STATE=str(tmp_path / "state"),
        )  # fmt: skip
        site = Site(served)
        site.store(keys_of(prompt, salt=mine))

        def held(salt):
            more = {} if salt is None else {"salt": salt}
            return {one["tier"]: one["blocks"] for one in site.lookup(prompt, **more)["tiers"]}

        until(lambda: held(mine) == {"host": 4, "disk": 4, "redis": 4}, "blocks in every tier")
        for other in others:
            assert held(other) == {"host": 0, "disk": 0, "redis": 0}
        body = {"tokens": prompt, "salt": mine, "tier": "host"}
        site.good("POST", "/v1/blocks/drop", body | {"tokens": prompt[:16]})
        assert [site.find(keys_of(prompt, salt=other)) for other in others] == [0, 0]
        assert site.find(keys_of(prompt, salt=mine)) == 4
        paths = ("/metrics", "/v1/settings", "/v1/audit", "/v1/stats", "/v1/tenants",
                 "/v1/namespaces", "/v1/sessions", "/v1/prefixes")  # fmt: skip
        shown = {path: served.get(path)[1] for path in paths}
        shown["log"] = served.log
        shown["keys"] = str(redis.ask("KEYS", "*"))
        files = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
        shown["names"] = str(files)
        shown["files"] = "".join(path.read_bytes().decode("latin-1") for path in files)
        for source, text in shown.items():
            assert mine not in text, source
        site.client.close()


def titles(served):
    process = Path(f"/proc/{served.process.pid}")
    return "".join((process / name).read_text() for name in ("cmdline", "comm", "status"))


@needs_redis
def test_the_password_of_redis_is_shown_nowhere(serve, kvtier, tmp_path):
    """Case B56: a good start, a lost connection, a refused change, and a start that fails."""
    with redis_server(tmp_path / "redis") as redis:
        redis.ask("ACL", "SETUSER", "teller", "reset", "on", f">{SECRET}", "+@all", "~*")
        environment = {
            "KVTIER_REDIS__URL": redis.url,
            "KVTIER_REDIS__USERNAME": "teller",
            "KVTIER_REDIS__PASSWORD": SECRET,
            "KVTIER_LOG__LEVEL": "debug",
            "KVTIER_STATE": str(tmp_path / "state"),
        }
        site = Site(serve("--capacity", "1MiB", **environment))
        served = site.served
        up = lambda: served.json("/v1/tiers/redis")["lower"]["up"]  # noqa: E731
        until(up, "Redis")
        wrong = httpx.patch(
            f"{served.url}/v1/tiers/redis",
            json={"settings": {"policy": "best"}},
            headers={"If-Match": "*"},
            timeout=10,
        )
        assert wrong.status_code == 422
        redis.ask("CLIENT", "KILL", "TYPE", "normal")
        redis.ask("ACL", "DELUSER", "teller")
        until(lambda: site.lookup(tokens(1, 2)) and not up(), "the tier to be left alone", 60)
        site.client.close()
        shown = {path: served.get(path)[1] for path in ("/metrics", "/v1/settings", "/v1/config",
                 "/v1/tiers", "/v1/audit", "/openapi.json", "/v1/none")}  # fmt: skip
        shown |= {"wrong": wrong.text, "log": served.log, "titles": titles(served)}
    failed = kvtier("serve", "--socket", tmp_path / "s", "--capacity", "many", **environment)
    assert failed.returncode == 1
    shown["failed"] = failed.stdout + failed.stderr
    bad = environment | {"KVTIER_REDIS__URL": f"redis://teller:{SECRET}@127.0.0.1/many"}
    failed = kvtier("serve", "--socket", tmp_path / "s", **bad)
    assert failed.returncode == 1, failed.stderr
    shown["bad URL"] = failed.stdout + failed.stderr
    for source, text in shown.items():
        assert SECRET not in text, source
    assert '"password":"' in shown["/v1/config"].replace(" ", "")
