"""The connector's numbers in vLLM's metrics: sums add up, and a bad one never stops serving."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed")

from kvtier.client import FAILURES
from kvtier.engine.stats import COPIES, MISSES, ConnectorMetrics, ConnectorStats
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

pytestmark = pytest.mark.vllm


@pytest.fixture
def observed():
    """Counters as vLLM would register them, in a registry of this test."""
    registry = CollectorRegistry()

    def counter(**options):
        return Counter(**options, registry=registry)

    metrics = ConnectorMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: Gauge, Counter: counter, Histogram: Histogram},
        ["engine"],
        {0: ["0"]},
    )

    def read(name, **labels):
        return registry.get_sample_value(f"kvtier_engine_{name}_total", {"engine": "0"} | labels)

    return metrics, read


def test_every_counter_starts_at_zero(observed):
    _, read = observed
    assert all(read(name) == 0 for name in COPIES)
    assert all(read(MISSES, reason=reason) == 0 for reason in FAILURES)


def test_ranks_and_misses_add_up(observed):
    metrics, read = observed
    ranks = [ConnectorStats({"loaded_blocks": 3, "load_seconds": 0.5}) for _ in range(2)]
    misses = ConnectorStats({f"{MISSES}:deadline": 4})
    total = ranks[0].aggregate(ranks[1]).aggregate(misses)
    metrics.observe(total.to_dict())
    metrics.observe(total.to_dict())
    assert read("loaded_blocks") == 12
    assert read("load_seconds") == 2.0
    assert read(MISSES, reason="deadline") == 8


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), None, "3"])
def test_what_is_no_count_is_left_out_and_counted(observed, bad):
    metrics, read = observed
    metrics.observe({"loaded_blocks": bad, "stored_blocks": 2, "unheard_of": 1})
    assert read("loaded_blocks") == 0
    assert read("stored_blocks") == 2
    assert read("bad_deltas", reason="value") == 2


def test_an_interval_without_copies_is_empty():
    stats = ConnectorStats()
    assert stats.is_empty()
    stats.add("loaded_blocks", 1)
    assert not stats.is_empty()
    assert stats.reduce() == {"loaded_blocks": 1}
    stats.reset()
    assert stats.is_empty()
