"""Alert rules: each fires when it should and not before, and tells people what to do."""

import re
import shutil
import subprocess
from collections import Counter

import pytest
import yaml
from kvtier.config import load_settings

from deploy.generate.catalog import ROOT
from deploy.generate.dashboards import DASHBOARDS
from deploy.generate.files import read_catalog, rules

PROMETHEUS = ROOT / "deploy/prometheus"
TESTS = ("rules_test.yaml", "history_test.yaml")
ALERTS = [rule for rule in rules() if "alert" in rule]
NAMES = [rule["alert"] for rule in ALERTS]
SEVERITIES = {"critical", "warning", "info"}

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")


def promtool(*arguments, cwd=PROMETHEUS):
    done = subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sections(page):
    """Return the sections of a page by their anchor."""
    parts = re.split(r"^## (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    titles = (title.lower().replace(" ", "-") for title in parts[1::2])
    return dict(zip(titles, parts[2::2], strict=True))


@needs_promtool
def test_promtool_finds_rules_and_settings_sound():
    assert f"{len(rules())} rules found" in promtool("check", "rules", "rules.yaml")
    promtool("check", "config", "prometheus.yaml")


@needs_promtool
def test_every_alert_fires_when_it_should_and_not_before():
    promtool("test", "rules", *TESTS)


def test_every_alert_has_a_case_that_fires_and_one_that_nearly_does():
    fires, quiet = Counter(), Counter()
    for case in [case for name in TESTS for case in read(name)["tests"]]:
        name = case["name"].partition(" ")[0]
        instances = [
            re.search(r'instance="(\w+)"', each["series"])[1] for each in case["input_series"]
        ]
        expected = [each["exp_samples"] for each in case["promql_expr_test"]]
        for each in case["promql_expr_test"]:
            assert f'alertname="{name}", alertstate="firing"' in each["expr"]
        if any(expected):
            fires[name] += 1
            assert 'instance="good"' not in str(expected)
        if "good" in instances or not any(expected):
            quiet[name] += 1
    assert sorted(fires) == sorted(NAMES)
    assert sorted(quiet) == sorted(NAMES)


def read(name):
    return yaml.safe_load((PROMETHEUS / name).read_text("utf-8"))


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_every_alert_says_how_bad_it_is_what_it_means_and_what_to_do(alert):
    assert re.fullmatch(r"Kvtier[A-Za-z]+", alert["alert"])
    assert alert["labels"]["severity"] in SEVERITIES
    assert [*alert["annotations"]] == ["summary", "description", "runbook_url"]
    assert alert["annotations"]["description"].rstrip().endswith(".")
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    section = sections(ROOT / path)[anchor]
    assert anchor == alert["alert"].lower()
    for part in ("**Meaning.**", "**Users.**", "**Cause.**", "**Do.**"):
        assert part in section, part


def test_the_runbooks_have_no_section_of_an_alert_that_is_gone():
    page = sections(ROOT / "docs/runbooks.md")
    assert {anchor for anchor in page if anchor.startswith("kvtier")} == {
        name.lower() for name in NAMES
    }


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_every_alert_names_only_labels_that_it_has(alert):
    labels = read_catalog().labels_of(alert["expr"])
    for text in alert["annotations"].values():
        for label in re.findall(r"\$labels\.(\w+)", text):
            assert label in labels


@needs_promtool
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=[each.name for each in DASHBOARDS])
def test_promtool_can_read_every_query_of_the_dashboards(dashboard, tmp_path):
    queries = [query.expr for panel in dashboard.panels() for query in panel.queries]
    made = [
        {"record": f"q{at}", "expr": expr.replace("$__rate_interval", "1m")}
        for at, expr in enumerate(queries)
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", str(file))


def test_prometheus_asks_the_server_where_it_answers_unless_told_otherwise(monkeypatch):
    for name in ("KVTIER_HTTP__HOST", "KVTIER_HTTP__PORT"):
        monkeypatch.delenv(name, raising=False)
    http = load_settings().http
    jobs = {job["job_name"]: job for job in read("prometheus.yaml")["scrape_configs"]}
    assert set(jobs) == {"kvtier", "vllm"}
    assert jobs["kvtier"]["static_configs"] == [{"targets": [f"{http.host}:{http.port}"]}]
