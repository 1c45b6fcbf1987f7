"""Figures of runs against values computed by hand, and what is written of them."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
import runs

from loadtest.traffic.compare import Spread, over_runs, ratios
from loadtest.traffic.hardware import ended, hardware
from loadtest.traffic.page import page, write_page
from loadtest.traffic.plots import write_plots
from loadtest.traffic.requests import TrafficError
from loadtest.traffic.sources import read_series, sources_since
from loadtest.traffic.summary import Percentiles, Rates, load, percentiles, save, summarise


def near(*values):
    return Percentiles(*(pytest.approx(value) for value in values))


def test_a_summary_holds_what_was_computed_by_hand():
    told = summarise(runs.labelled())
    assert told.ttft == near(2.5, 3.7, 3.85, 3.97, 4)
    assert told.itl == near(0.2, 0.3, 0.3, 0.3, 8)
    assert told.e2e.p50 == pytest.approx(2.9)
    assert told.rates == Rates(0.4, 40.0, 1.2)
    assert (told.answered, told.failures, told.late) == (4, {"status": 1}, 1)
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (400, 160, 12)
    assert told.cached_share == 0.4
    assert told.workload.reusable_share == 0.64


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([5.0], (5.0, 5.0, 5.0, 5.0)),
        ([3.0, 1.0], (2.0, 2.8, 2.9, 2.98)),
        (range(101), (50.0, 90.0, 95.0, 99.0)),
    ],
)
def test_percentiles_lie_between_samples(samples, expected):
    found = percentiles(list(samples))
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx(expected)
    assert found.samples == len(samples)


def test_a_run_without_an_answer_has_no_percentiles():
    empty = runs.labelled()
    run = msgspec.structs.replace(empty.run, records=[runs.FAILED], sources=None)
    told = summarise(msgspec.structs.replace(empty, run=run))
    assert (told.ttft, told.itl, told.e2e, told.cached_share) == (None, None, None, None)
    assert told.rates == Rates(0.0, 0.0, 0.0)


def test_cached_tokens_that_one_answer_does_not_tell_come_from_the_engine():
    silent = [*runs.labelled().run.records, runs.record(9, 1.0, cached_tokens=None)]
    labelled = runs.labelled()
    run = msgspec.structs.replace(labelled.run, records=silent)
    told = summarise(msgspec.structs.replace(labelled, run=run))
    assert told.cached_tokens is None
    assert told.cached_share == (64 + 96) / 400


def test_a_saved_run_is_the_same_when_it_is_loaded(tmp_path):
    labelled = runs.labelled()
    save(labelled, tmp_path / "run")
    assert load(tmp_path / "run") == labelled
    said = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (said["workload"]["seed"], said["workload"]["parameters"]) == (7, {"turns": 3})
    assert said["loop"] == {"type": "closed", "users": 2}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(TrafficError, match="holds no run"):
        load(tmp_path)


def test_ratios_are_of_the_same_requests_and_of_the_same_repetitions():
    other = [runs.labelled("kvtier", scale=0.5), runs.labelled("kvtier", scale=0.25)]
    base = [runs.labelled("alone"), runs.labelled("alone")]
    (found,) = ratios([*base, *other], "alone")
    assert (found.scenario, found.system) == ("warm", "kvtier")
    assert found.ttft == Spread(0.25, 0.375, 0.5, 8)
    assert found.throughput == Spread(2.0, 3.0, 4.0, 2)
    assert (found.same_outputs, found.compared_outputs) == (8, 8)


def test_an_answer_that_differs_is_counted():
    other = runs.labelled("kvtier")
    other.run.records[1] = runs.record(1, 2.0, digest="another")
    (found,) = ratios([runs.labelled("alone"), other], "alone")
    assert (found.same_outputs, found.compared_outputs) == (3, 4)


def test_there_is_no_ratio_where_the_base_did_not_run():
    cold, warm = runs.labelled("kvtier", "cold"), runs.labelled("alone", "warm")
    assert ratios([cold, warm], "alone") == []


def test_a_figure_of_repetitions_has_its_spread():
    repeated = [runs.labelled(scale=scale) for scale in (1.0, 2.0, 4.0)]
    found = over_runs(repeated, lambda summary: summary.rates.prompt_tokens)
    assert found == Spread(10.0, 20.0, 40.0, 3)


EXPOSITION = """# HELP x y
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_total{engine="1"} 10.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0"} 32.0
vllm:external_prefix_cache_hits_total{engine="0"} 0.0
"""


def test_counters_are_added_up_over_engines_and_since_before():
    before = dict(read_series(EXPOSITION))
    after = dict(read_series(EXPOSITION.replace(" 100.0", " 400.0").replace(" 32.0", " 96.0")))
    found = sources_since(before, after)
    assert (found.prompt, found.device, found.connector) == (300, 64, 0)
    assert found.tiers == {"device": 64}
    assert sources_since({}, before).prompt == 110


SERVED = """kvtier_tokens_hit_total{tier="device"} 32.0
kvtier_tokens_hit_total{tier="host"} 64.0
kvtier_tokens_hit_total{tier="disk"} 32.0
kvtier_tokens_hit_total{tier="redis"} 0.0
"""


@pytest.mark.parametrize(
    ("through", "tiers"),
    [
        (96, {"device": 32, "host": 64, "disk": 32}),
        (95, {"device": 32, "connector": 95}),
    ],
)
def test_a_kvtier_server_tells_its_tiers_apart_where_it_counts_what_the_engine_counts(
    through, tiers
):
    engine = EXPOSITION.replace(
        'external_prefix_cache_hits_total{engine="0"} 0.0',
        f"external_prefix_cache_hits_total {through}",
    )
    found = sources_since({}, dict(read_series(engine + SERVED)))
    assert found.tiers == tiers


def test_a_counter_of_an_engine_that_started_anew_counts_from_nothing():
    before = dict(read_series(EXPOSITION))
    after = dict(read_series(EXPOSITION.replace(" 100.0", " 7.0")))
    assert sources_since(before, after).prompt == 7


def test_another_server_than_vllm_tells_no_sources():
    assert sources_since({}, dict(read_series("requests_total 3.0"))) is None
    assert sources_since(None, {}) is None


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return ended(hardware(tmp_path_factory.mktemp("disk")))


def test_the_hardware_is_named_with_versions_commit_and_command(measured):
    assert measured.memory_bytes > 1 << 28
    assert {"python", "kvtier"} <= measured.versions.keys()
    assert len(measured.commit.rstrip("+")) == 40
    assert measured.command[1:] == sys.orig_argv[1:]
    assert len(measured.load_at_end) == 3
    assert measured.disk


def test_a_peer_in_an_environment_of_its_own_is_named_with_its_version(tmp_path):
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (packages / "lmcache-0.0.7.dist-info").mkdir(parents=True)
    about = "Metadata-Version: 2.1\nName: lmcache\nVersion: 0.0.7\n"
    (packages / "lmcache-0.0.7.dist-info" / "METADATA").write_text(about)
    versions = hardware(tmp_path, tmp_path / "venv").versions
    assert (versions["lmcache"], "kvtier" in versions) == ("0.0.7", True)


def several():
    """Return runs of two systems in two scenarios, one of them repeated."""
    return [
        runs.labelled("alone", "warm", sources=None),
        runs.labelled("kvtier", "warm", scale=0.5),
        runs.labelled("kvtier", "warm", scale=0.4),
        runs.labelled("kvtier", "churn"),
    ]


@pytest.mark.parametrize(
    "said",
    [
        "## warm",
        "## churn",
        "Workload `chat`, seed 7: 5 requests, 500 prompt tokens",
        "64.0% of the prompt tokens",
        "Sizes: turns 3.",
        "| kvtier | 1.25 s | 1.85 s |",
        "| kvtier | 4 | 1 status | 1 | 5.0 | 0.80 | 80 | 2.4 | 40.0% |",
        "| kvtier | 0.45 (0.4 to 0.5) | 2.25 (2 to 2.5) | 8 of 8 |",
        "- The server answered 500: &lt;b>a\\|b&lt;/b>",
        "| kvtier | 400 | 64 | 64 | 32 | 240 |",
        "![ttft](ttft.svg)",
    ],
)
def test_a_page_says_what_was_computed_of_every_system(measured, said):
    assert said in page(several(), "alone", [Path("x/ttft.svg")], measured)


@pytest.mark.slow
def test_pictures_show_every_system_and_scenario(measured, tmp_path):
    pytest.importorskip("matplotlib")
    text = write_page(several(), "alone", tmp_path, measured).read_text()
    for name in ("ttft", "cached", "throughput"):
        drawn = "".join(ET.parse(tmp_path / f"{name}.svg").getroot().itertext())
        assert all(each in drawn for each in ("warm", "churn", "kvtier", "alone"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.svg)" in text
    assert "host memory (L1)" in "".join(ET.parse(tmp_path / "cached.svg").getroot().itertext())
    assert json.loads((tmp_path / "hardware.json").read_text())["commit"] == measured.commit


@pytest.mark.slow
def test_equal_runs_give_equal_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        files = write_plots([runs.labelled()], tmp_path / name)
        pictures.append([file.read_bytes() for file in files])
    assert pictures[0] == pictures[1]


def test_no_run_is_no_picture(tmp_path):
    with pytest.raises(TrafficError, match="no run"):
        write_plots([], tmp_path)
