"""Every series that a dashboard or a rule may name, with its labels and their values.

The server's come from its registry, the connector's from the sources of `server/engine`, because
that module needs vLLM, and vLLM's own from `vllm_metrics.yaml`, which a test holds against a
running vLLM. Recording rules come from the rules file, and have the labels of what they read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml
from kvtier.accounts import QUOTA_KEYS, Accounts
from kvtier.client import FAILURES
from kvtier.core import Tier
from kvtier.metrics import Metrics
from kvtier.quotas import quota_reading
from kvtier.tenants import Tally
from prometheus_client import Counter, Gauge, Histogram

from .promql import Usage, usage

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "server/engine"
VLLM_METRICS = Path(__file__).with_name("vllm_metrics.yaml")

Values = frozenset[str] | None
"""The values that a label may have; None where they are not a closed set."""

TARGET_LABELS: Mapping[str, Values] = {"job": frozenset({"kvtier", "vllm"}), "instance": None}
"""What Prometheus adds when it scrapes."""
ENGINE_LABELS: Mapping[str, Values] = {"model_name": None, "engine": None}
"""What vLLM adds to its own series and to the connector's."""
OPEN_LABELS = frozenset({"le", "tenant", "version"})
"""Labels of the server whose values are not known before they come."""
FROM_PROMETHEUS: Mapping[str, Mapping[str, Values]] = {
    "up": {},
    "ALERTS": {"alertname": None, "alertstate": frozenset({"firing", "pending"}), "severity": None},
}


class UnknownSeriesError(Exception):
    """An expression names what does not exist. The message is a sentence."""


class Kind(StrEnum):
    """What may be done with a series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class Series:
    """One series name."""

    kind: Kind
    labels: Mapping[str, Values]


class Catalog:
    """All series by name. `check` raises UnknownSeriesError for an expression that errs."""

    def __init__(self, rules: Iterable[tuple[str, str]] = ()) -> None:
        """Read what exists; `rules` are names and expressions of recording rules, in order."""
        self.series: dict[str, Series] = {
            **server_series(),
            **engine_series(),
            **vllm_series(),
            **{name: Series(Kind.GAUGE, labels) for name, labels in FROM_PROMETHEUS.items()},
        }
        for name, expression in rules:
            self.series[name] = Series(Kind.GAUGE, self._result_labels(self.check(expression)))

    def check(self, expression: str) -> Usage:
        """Return what an expression uses, all of which exists."""
        used = usage(expression)
        if not used.selectors:
            raise UnknownSeriesError(f"{expression!r} names no series.")
        for selector in used.selectors:
            series = self._named(selector.name, expression)
            counted = series.kind is not Kind.GAUGE
            if selector.rated and not counted:
                raise UnknownSeriesError(f"{selector.name} is no counter: no rate of it is meant.")
            for label, operator, value in selector.matchers:
                self._check_matcher(selector.name, series, label, operator, value)
        known = self._all_labels(used)
        for label in used.grouping:
            if label not in known:
                raise UnknownSeriesError(f"No series of {expression!r} has the label {label}.")
        return used

    def labels_of(self, expression: str) -> frozenset[str]:
        """Return the labels that the result of an expression may have."""
        return frozenset(self._result_labels(self.check(expression)))

    def _named(self, name: str, expression: str) -> Series:
        if name not in self.series:
            raise UnknownSeriesError(f"There is no series {name}, which {expression!r} names.")
        return self.series[name]

    def _check_matcher(
        self, name: str, series: Series, label: str, operator: str, value: str
    ) -> None:
        labels = {**TARGET_LABELS, **series.labels}
        if label not in labels:
            raise UnknownSeriesError(f"{name} has no label {label}.")
        allowed = labels[label]
        if allowed is None or "$" in value:
            return
        for each in value.split("|") if operator in ("=~", "!~") else [value]:
            if each not in allowed:
                raise UnknownSeriesError(f"The label {label} of {name} is never {each!r}.")

    def _all_labels(self, used: Usage) -> dict[str, Values]:
        found: dict[str, Values] = dict(TARGET_LABELS)
        for selector in used.selectors:
            found |= self.series[selector.name].labels
        return found

    def _result_labels(self, used: Usage) -> dict[str, Values]:
        labels = self._all_labels(used)
        if used.kept is not None:
            return {label: labels[label] for label in used.kept}
        return {label: labels[label] for label in labels if label not in used.dropped}


def server_series() -> dict[str, Series]:
    """Return what a server with all tiers exports."""
    metrics = Metrics()
    for gauge in (metrics.capacity_bytes, metrics.used_bytes, metrics.blocks):
        gauge.labels(Tier.HOST)  # Which begin with the first reading, not with the registry.
    account = Accounts().of("acme")
    account.quota = dict.fromkeys(QUOTA_KEYS, 1)
    metrics.add_tenants(lambda: [Tally(account).reading()])
    metrics.add_quotas(lambda: [quota_reading(account)])
    named = {
        family.name: metric._labelnames  # noqa: SLF001  # told nowhere else
        for metric in vars(metrics).values()
        if isinstance(metric, Counter | Gauge | Histogram)
        for family in metric.describe()
    }
    found: dict[str, Series] = {}
    for family in metrics.registry.collect():
        labels: dict[str, set[str]] = {label: set() for label in named.get(family.name, ())}
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        closed: dict[str, Values] = {
            label: None if label in OPEN_LABELS or not values else frozenset(values)
            for label, values in labels.items()
        }
        found |= _family(family.name, family.type, closed)
    return found


def engine_series() -> dict[str, Series]:
    """Return what the connector adds to vLLM's metrics."""
    stats = _constants(ENGINE / "stats.py")
    reasons = {
        stats["MISSES"]: FAILURES,
        stats["BYPASSED"]: _enum_values(ENGINE / "requests.py", "Bypass"),
        stats["NOT_NUMBERS"]: ("value",),
    }
    found: dict[str, Series] = {}
    copies = stats["COPIES"]
    assert isinstance(copies, dict)
    for name in copies:
        found |= _family(f"kvtier_engine_{name}", "counter", ENGINE_LABELS)
    for counted, values in reasons.items():
        labels = {**ENGINE_LABELS, "reason": frozenset(values)}
        found |= _family(f"kvtier_engine_{counted}", "counter", labels)
    return found


def vllm_series() -> dict[str, Series]:
    """Return what of vLLM's own metrics is used here."""
    found: dict[str, Series] = {}
    for name, entry in vllm_metrics().items():
        labels: dict[str, Values] = dict(ENGINE_LABELS)
        for label, values in entry.get("labels", {}).items():
            labels[label] = frozenset(values)
        found |= _family(name, str(entry["type"]), labels)
    return found


def vllm_metrics() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the list of vLLM's metrics as it is written: by name, `type` and `labels`."""
    written: dict[str, dict[str, dict[str, list[str]]]] = yaml.safe_load(
        VLLM_METRICS.read_text("utf-8")
    )
    return written


def _family(name: str, kind: str, labels: Mapping[str, Values]) -> dict[str, Series]:
    """Return the series of one metric, as Prometheus's text format names them."""
    plain = {label: values for label, values in labels.items() if label != "le"}
    match kind:
        case "counter":
            total = name.removesuffix("_total") + "_total"
            created = name.removesuffix("_total") + "_created"
            return {total: Series(Kind.COUNTER, plain), created: Series(Kind.GAUGE, plain)}
        case "gauge":
            return {name: Series(Kind.GAUGE, plain)}
        case "histogram":
            return {
                f"{name}_bucket": Series(Kind.BUCKET, {**plain, "le": None}),
                f"{name}_sum": Series(Kind.COUNTER, plain),
                f"{name}_count": Series(Kind.COUNTER, plain),
            }
        case _:
            raise UnknownSeriesError(f"{name} is a {kind}, which nothing here knows how to show.")


def _constants(file: Path) -> dict[object, object]:
    """Return the constants at the top of a source file that are plain values."""
    found: dict[object, object] = {}
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def _enum_values(file: Path, name: str) -> tuple[str, ...]:
    """Return the values of an enum of texts in a source file."""
    [enum] = [
        node
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return tuple(
        str(ast.literal_eval(node.value)) for node in enum.body if isinstance(node, ast.Assign)
    )
