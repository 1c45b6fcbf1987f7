"""Every file that is made, with its text. Raises UnknownSeriesError before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from .catalog import ROOT, Catalog, UnknownSeriesError
from .dashboards import DASHBOARDS
from .panels import Dashboard, Query, to_json

RULES = ROOT / "deploy/prometheus/rules.yaml"
GRAFANA = ROOT / "deploy/grafana/dashboards"
KUBERNETES_RULES = ROOT / "deploy/k8s/monitoring/rules.yaml"
MADE = "# Made from deploy/prometheus/rules.yaml by python -m deploy.generate: change that one.\n"
HEAD = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvtier
spec:
"""

Rule = dict[str, str | dict[str, str]]


def made() -> dict[Path, str]:
    """Return every file that is made, with its text."""
    catalog = read_catalog()
    files = {}
    for dashboard in DASHBOARDS:
        check_dashboard(catalog, dashboard)
        text = json.dumps(to_json(dashboard), indent=2)
        files[GRAFANA / f"{dashboard.name}.json"] = text + "\n"
    return {**files, KUBERNETES_RULES: kubernetes_rules()}


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Return the files that are not there or say something else."""
    return [
        path
        for path, text in files.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]


def rules() -> list[Rule]:
    """Return all recording and alert rules, in their order."""
    written = yaml.safe_load(RULES.read_text("utf-8"))
    return [rule for group in written["groups"] for rule in group["rules"]]


def read_catalog() -> Catalog:
    """Return what exists, with the recording rules; all rules have been checked."""
    recorded = [(str(rule["record"]), str(rule["expr"])) for rule in rules() if "record" in rule]
    catalog = Catalog(recorded)
    for rule in rules():
        catalog.check(str(rule["expr"]))
    return catalog


def check_dashboard(catalog: Catalog, dashboard: Dashboard) -> None:
    """Raise UnknownSeriesError where a query, a legend or a choice names what does not exist."""
    for variable in dashboard.variables:
        catalog.check(f"{variable.series}{{{variable.label}=~'$'}}")
    names = [variable.name for variable in dashboard.variables]
    for panel in dashboard.panels():
        for query in panel.queries:
            check_query(catalog, query, names)


def check_query(catalog: Catalog, query: Query, variables: list[str]) -> None:
    """Raise UnknownSeriesError where a query errs; `variables` are those of its dashboard."""
    labels = catalog.labels_of(query.expr)
    for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
        if label not in labels:
            raise UnknownSeriesError(f"The result of {query.expr!r} has no label {label}.")
    for name in re.findall(r"\$(\w+)", query.expr):
        if name not in (*variables, "__rate_interval"):
            raise UnknownSeriesError(f"{query.expr!r} names ${name}, which is no choice there.")


def kubernetes_rules() -> str:
    """Return the rules as an object that Prometheus's operator takes."""
    text = RULES.read_text("utf-8")
    body = text[text.index("groups:\n") :]
    return (
        MADE
        + HEAD
        + "".join(f"  {line}" if line.strip() else line for line in body.splitlines(True))
    )
