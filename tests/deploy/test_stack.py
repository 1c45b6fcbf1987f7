"""The real stack: a server, Redis and Prometheus, and in a second part vLLM.

Every query of every dashboard has data in a real Prometheus, and every rule reads series that are
there. What names vLLM's series or the connector's is asked for in the part with vLLM.
"""

import json
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import traffic
from prometheus import running
from prometheus_client.parser import text_string_to_metric_families
from redis_servers import redis_server
from support import until

from deploy.generate.catalog import ENGINE_LABELS, vllm_metrics
from deploy.generate.dashboards import DASHBOARDS
from deploy.generate.files import read_catalog, rules
from loadtest.stack import start_server

needs_servers = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("redis-server")),
    reason="needs prometheus and redis-server",
)

DATA_SECONDS = 60.0
WITHOUT_DATA = {
    'ALERTS{alertname=~"Kvtier.*", alertstate="firing"}': "nothing is wrong here",
}
"""Queries that need have no data, and why."""
SETTINGS = {
    "disk": {"codec": "always", "admission": "always"},
    "loads": {"mode": "always"},
    "quotas": {"tenants": {traffic.LIMITED: {"hard": traffic.QUOTA}}},
}
"""So that writes, compression, promotion and quotas have something to tell on any machine."""


def of_engines(expression):
    """Whether an expression reads what only vLLM exports."""
    names = [each.name for each in read_catalog().check(expression).selectors]
    return any(name.startswith(("vllm:", "kvtier_engine_")) for name in names)


def filled(expression):
    """Return a query with everything chosen, as Grafana sends it."""
    for name in ("server", "engine", "model"):
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", "30s")


def queries(*, engines):
    """Return all queries of all dashboards that have to have data."""
    found = {
        query.expr: f"{dashboard.name}: {panel.title}"
        for dashboard in DASHBOARDS
        for panel in dashboard.panels()
        for query in panel.queries
        if query.expr not in WITHOUT_DATA and of_engines(query.expr) is engines
    }
    recorded = [str(rule["record"]) for rule in rules() if "record" in rule]
    return found | ({} if engines else dict.fromkeys(recorded, "a recording rule"))


def demand_data(prometheus, wanted, go_on):
    """Fail unless each query has data soon; `go_on` makes traffic meanwhile."""
    missing = dict(wanted)
    end = time.monotonic() + DATA_SECONDS
    while missing:
        assert time.monotonic() < end, missing
        go_on()
        missing = {
            expression: what
            for expression, what in missing.items()
            if not prometheus.values(filled(expression))
        }


def demand_sound_alerts(prometheus, *, engines):
    """Fail unless Prometheus could judge each alert, nothing fires, and what it reads is there."""
    judged = {rule["name"]: rule for rule in prometheus.rules()}
    for rule in [rule for rule in rules() if "alert" in rule]:
        assert judged[rule["alert"]]["health"] == "ok", judged[rule["alert"]]
        firing = [each for each in judged[rule["alert"]]["alerts"] if each["state"] == "firing"]
        assert not firing
        if of_engines(rule["expr"]) is engines:
            for selector in read_catalog().check(rule["expr"]).selectors:
                assert prometheus.has(str(selector)), f"{rule['alert']}: {selector}"


def address(url):
    return url.removeprefix("http://")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A server with all tiers, its Redis, its Prometheus, and an engine's traffic."""
    folder = tmp_path_factory.mktemp("stack")
    settings = folder / "kvtier.yaml"
    settings.write_text(json.dumps(SETTINGS))
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder / "redis"))
        options = ["--config", str(settings), "--capacity", traffic.CAPACITY]
        options += ["--disk", str(folder / "blocks"), "--redis", redis.url]
        server = start_server(folder, *options)
        stack.callback(server.stop)
        server.wait()
        prometheus = stack.enter_context(running(folder, {"kvtier": address(server.url)}))
        engine = stack.enter_context(traffic.connected(server.socket))
        yield server, redis, prometheus, engine


@needs_servers
@pytest.mark.slow
def test_every_query_and_rule_of_a_server_has_data(site):
    """Case B43."""
    _, _, prometheus, engine = site
    demand_data(prometheus, queries(engines=False), engine.go_on)
    demand_sound_alerts(prometheus, engines=False)


@needs_servers
@pytest.mark.slow
def test_the_hit_ratio_on_the_dashboard_is_what_the_engine_saw(site):
    _, _, prometheus, engine = site
    for _ in range(2 * traffic.AGE):
        engine.go_on()

    def agrees():
        [(_, ratio)] = prometheus.values("kvtier:token_hit_ratio:rate5m") or [({}, -1.0)]
        return ratio == pytest.approx(engine.hit / engine.asked, abs=0.02)

    until(agrees, "the same ratio", DATA_SECONDS)


@needs_servers
@pytest.mark.slow
def test_a_redis_that_freezes_becomes_an_alert_of_its_tier(site):
    _, redis, prometheus, engine = site

    def of_redis():
        alerts = prometheus.alert("KvtierTierDown")
        return [each for each in alerts if each["labels"]["tier"] == "redis"]

    with redis.frozen():

        def told():
            engine.go_on()
            return of_redis()

        until(told, "the alert", DATA_SECONDS)
        [alert] = of_redis()
    assert alert["state"] == "pending", "for two minutes first"
    assert "The redis tier of" in alert["annotations"]["summary"]
    until(lambda: not of_redis(), "the end of the alert", DATA_SECONDS)


@needs_servers
@pytest.mark.slow
def test_a_server_that_is_killed_becomes_an_alert(tmp_path):
    server = start_server(tmp_path, "--capacity", traffic.CAPACITY)
    try:
        server.wait()
        with running(tmp_path, {"kvtier": address(server.url)}) as prometheus:
            assert not prometheus.alert("KvtierServerDown")
            server.stop(signal.SIGKILL)
            until(lambda: prometheus.alert("KvtierServerDown"), "the alert", DATA_SECONDS)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def vllm_site(tmp_path_factory):
    """A server, a vLLM with the tiny model, and the Prometheus of both."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "vllm")]
    import harness

    folder = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        lab = stack.enter_context(harness.lab(folder, harness.make_tiny_model()))
        server = lab.server()
        engine = lab.engine(server.socket)
        targets = {"kvtier": address(server.url), "vllm": address(engine.part.url)}
        prometheus = stack.enter_context(running(folder, targets))

        def go_on():
            engine.forget()
            for seed in (1, time.monotonic_ns()):  # One that the server has, and a new one.
                engine.complete(harness.prompt(seed, 4 * harness.BLOCK), 4)

        yield prometheus, engine, go_on


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus")
@pytest.mark.vllm
def test_every_query_and_rule_of_engines_has_data(vllm_site):
    prometheus, _, go_on = vllm_site
    demand_data(prometheus, queries(engines=True), go_on)
    demand_sound_alerts(prometheus, engines=True)


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus")
@pytest.mark.vllm
def test_the_pinned_metrics_of_vllm_are_those_of_a_running_one(vllm_site):
    _, engine, go_on = vllm_site
    go_on()
    families = text_string_to_metric_families(engine.part.get("/metrics"))
    running_ones = {family.name: family for family in families}
    for name, pinned in vllm_metrics().items():
        family = running_ones[name]
        assert family.type == pinned["type"], name
        labels = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        labels.pop("le", None)
        assert set(labels) == {*ENGINE_LABELS, *pinned.get("labels", {})}, name
        for label, values in pinned.get("labels", {}).items():
            assert labels[label] == {*values}, name
