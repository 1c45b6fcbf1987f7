"""The generator: what is committed is what it makes, and it takes nothing that does not exist."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys

import pytest
import yaml
from kvtier.metrics import Metrics
from prometheus_client import Counter

from deploy.generate.catalog import (
    ROOT,
    Catalog,
    UnknownSeriesError,
    engine_series,
    server_series,
    vllm_series,
)
from deploy.generate.dashboards import DASHBOARDS, OVERVIEW
from deploy.generate.files import (
    KUBERNETES_RULES,
    RULES,
    check_dashboard,
    made,
    read_catalog,
    rules,
)
from deploy.generate.panels import COLUMNS, Query, to_json
from deploy.generate.promql import usage

NAMES = [dashboard.name for dashboard in DASHBOARDS]


@pytest.fixture(scope="module")
def catalog():
    return read_catalog()


def test_the_committed_files_are_what_the_generator_makes():
    command = [sys.executable, "-m", "deploy.generate", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_there_are_no_other_dashboards_than_those_that_are_made():
    written = {path for path in made() if path.suffix == ".json"}
    assert written == {*(ROOT / "deploy/grafana/dashboards").iterdir()}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("kvtier_lookup_total", "no series kvtier_lookup_total"),
        ("rate(kvtier_lookups[5m])", "no series kvtier_lookups"),
        ("kvtier_engine_loaded_blocks", "no series kvtier_engine_loaded_blocks"),
        ("vllm:num_requests_swapped", "no series vllm:num_requests_swapped"),
        ("kvtier:hit_ratio:rate5m", "no series kvtier:hit_ratio:rate5m"),
        ('kvtier_tier_up{level="disk"}', "no label level"),
        ('kvtier_tier_up{tier="host"}', "never 'host'"),
        ('kvtier_waits_total{outcome=~"late|complete"}', "never 'late'"),
        ('kvtier_engine_misses_total{reason="late"}', "never 'late'"),
        ('kvtier_engine_bypassed_requests_total{reason="late"}', "never 'late'"),
        ('vllm:prompt_tokens_by_source_total{source="kvtier"}', "never 'kvtier'"),
        ("sum by (tenant) (kvtier_blocks)", "has the label tenant"),
        ("sum without (op) (kvtier_blocks)", "has the label op"),
        ("rate(kvtier_blocks[5m])", "kvtier_blocks is no counter"),
        ("increase(kvtier:token_hit_ratio:rate5m[5m])", "is no counter"),
        ("vector(1)", "names no series"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(catalog, wrong, said):
    with pytest.raises(UnknownSeriesError, match=re.escape(said)):
        catalog.check(wrong)


@pytest.mark.parametrize(
    "query",
    [
        Query("kvtier_lookup_total"),
        Query("sum by (tier) (kvtier_blocks)", "{{instance}}"),
        Query("sum(kvtier_blocks)", "{{tier}}"),
        Query("sum without (tier) (kvtier_blocks)", "{{tier}}"),
        Query("histogram_quantile(0.5, rate(kvtier_wait_seconds_bucket[5m]))", "{{le}}"),
        Query('kvtier_blocks{instance=~"$engine"}'),
    ],
)
def test_a_dashboard_with_a_query_that_errs_is_not_made(catalog, query):
    panel = dataclasses.replace(OVERVIEW.rows[0].panels[0], queries=[query])
    row = dataclasses.replace(OVERVIEW.rows[0], panels=[panel])
    with pytest.raises(UnknownSeriesError):
        check_dashboard(catalog, dataclasses.replace(OVERVIEW, rows=[row]))


def test_the_series_and_labels_of_an_expression_are_found():
    used = usage(
        "sum by (tier) (rate(a_total{x=\"1,}\", y=~'b|c'}[5m] offset 1h)) / on (tier) "
        "group_left () (b:c:d > 0) and absent(up) or histogram_quantile(0.9, e_bucket)"
    )
    assert [str(each) for each in used.selectors] == [
        'a_total{x="1,}", y=~"b|c"}',
        "b:c:d{}",
        "up{}",
        "e_bucket{}",
    ]
    assert [each.rated for each in used.selectors] == [True, False, False, False]
    assert used.grouping == {"tier"}
    assert used.dropped == {"le"}


def test_a_recording_rule_has_the_labels_of_what_it_reads():
    rule = ("kvtier:x:rate5m", 'sum without (tier) (rate(kvtier_reads_total{tier="disk"}[5m]))')
    catalog = Catalog([rule])
    assert set(catalog.series["kvtier:x:rate5m"].labels) == {"job", "instance", "outcome"}
    catalog.check('kvtier:x:rate5m{outcome="corrupt"}')
    with pytest.raises(UnknownSeriesError):
        catalog.check('kvtier:x:rate5m{tier="disk"}')


def test_a_label_without_values_yet_may_have_any(monkeypatch):
    class Grown(Metrics):
        def __init__(self):
            super().__init__()
            self.by_tenant = Counter("kvtier_grown", "x", ["tenant"], registry=self.registry)

    monkeypatch.setattr("deploy.generate.catalog.Metrics", Grown)
    catalog = Catalog()
    catalog.check('sum by (tenant) (rate(kvtier_grown_total{tenant="acme"}[5m]))')
    with pytest.raises(UnknownSeriesError):
        catalog.check('kvtier_grown_total{team="acme"}')


def test_recording_rules_are_named_by_level_metric_and_operations():
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    assert len(recorded) == len({*recorded})
    for name in recorded:
        assert re.fullmatch(r"kvtier:[a-z_]+:(p\d\d_)?rate\d+[mh]", name), name


def test_every_recording_rule_is_used(catalog):
    used = set()
    expressions = [str(rule["expr"]) for rule in rules()]
    for dashboard in DASHBOARDS:
        expressions += [each.expr for panel in dashboard.panels() for each in panel.queries]
    for expression in expressions:
        used |= {selector.name for selector in catalog.check(expression).selectors}
    assert {rule["record"] for rule in rules() if "record" in rule} <= used


NOT_SHOWN: dict[str, str] = {}
"""Metrics that no dashboard and no rule has, and why."""


def metrics(series):
    """Return the metrics that series belong to."""
    return {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in series}


def test_every_metric_is_on_a_dashboard_or_in_a_rule(catalog):
    expressions = [str(rule["expr"]) for rule in rules()]
    names = set()
    for dashboard in DASHBOARDS:
        names |= {variable.series for variable in dashboard.variables}
        expressions += [each.expr for panel in dashboard.panels() for each in panel.queries]
    for expression in expressions:
        names |= {selector.name for selector in catalog.check(expression).selectors}
    known = metrics(server_series()) | metrics(engine_series()) | metrics(vllm_series())
    assert known - metrics(names) - {*NOT_SHOWN} == set(), (
        "show it in deploy/generate/dashboards, or say why not in NOT_SHOWN"
    )


def test_the_rules_for_kubernetes_are_those_of_prometheus():
    made_of = yaml.safe_load(KUBERNETES_RULES.read_text("utf-8"))
    assert made_of["spec"] == yaml.safe_load(RULES.read_text("utf-8"))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=NAMES)
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard):
    panels = to_json(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        assert 0 <= x <= x + width <= COLUMNS
        cells = {*itertools.product(range(x, x + width), range(y, y + height))}
        assert not cells & places, panel["title"]
        places |= cells


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=NAMES)
def test_every_panel_says_what_it_shows_and_takes_the_chosen_data(dashboard):
    text = (ROOT / f"deploy/grafana/dashboards/{dashboard.name}.json").read_text("utf-8")
    written = json.loads(text)
    assert written["uid"] == f"kvtier-{dashboard.name}"
    for panel in written["panels"]:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert [each["refId"] for each in panel["targets"]] == [*"ABCDEFG"][
                : len(panel["targets"])
            ]
