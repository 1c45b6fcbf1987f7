"""`kvtier replay` as a whole: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from kvtier.errors import SettingsError
from kvtier.policies import POLICIES
from kvtier.replay.command import ReplayOptions, run_replay
from kvtier.replay.trace import TraceError


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": turn,
            "input_length": 3 * 512,
            "output_length": 1,
            "hash_ids": [0, 1 + turn % 3, 100 + turn % 40],
        }
        for turn in range(200)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def reports(capsys, options):
    run_replay(options, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_json_has_a_cell_for_each_policy_and_size(capsys, trace):
    (report,) = reports(capsys, ReplayOptions([trace], sizes=["10%", "50%"]))
    assert report["requests"] == 200
    assert report["distinct_blocks"] == 4 + 40
    cells = [(cell["policy"], cell["size"]) for cell in report["cells"]]
    assert cells == [(name, size) for name in [*POLICIES, "MIN"] for size in ("10%", "50%")]
    for cell in report["cells"]:
        assert 0 < cell["token_hit_ratio"] <= report["unlimited_hit_ratio"]
        assert cell["token_hit_ratio"] == round(cell["hit_tokens"] / report["tokens"], 6)
        (host,) = cell["tiers"]
        assert host["written_bytes"] is None
        assert host["hit_tokens"] == cell["hit_tokens"]


def test_sizes_in_bytes_are_cut_into_blocks(capsys, trace):
    options = ReplayOptions([trace], ["lru"], ["16MiB"], block_bytes="1MiB")
    (report,) = reports(capsys, options)
    (host,) = report["cells"][0]["tiers"]
    assert host["capacity_blocks"] == 16
    assert host["written_bytes"] == host["written_blocks"] << 20


def test_the_same_trace_gives_the_same_report_again(capsys, trace):
    first = reports(capsys, ReplayOptions([trace]))
    assert reports(capsys, ReplayOptions([trace])) == first


def test_the_table_names_policies_sizes_and_what_was_replayed(capsys, trace):
    run_replay(ReplayOptions([trace, trace], ["lru", "auto"], ["5%"]), as_json=False)
    printed = capsys.readouterr()
    assert printed.out.count("trace.jsonl: token hit ratio") == 2
    for word in ("lru", "auto", "MIN", "5%", "200 requests (mooncake)"):
        assert word in printed.out
    assert "fifo" not in printed.out


TIERS = {
    "policies": ["lru"],
    "sizes": ["10%", "20%"],
    "disks": ["40%"],
    "redises": ["100%"],
    "write_modes": ["through", "on_evict"],
    "admissions": ["always", "second_hit"],
}


def test_tiers_write_modes_and_admissions_are_tried_with_each_other(capsys, trace):
    (report,) = reports(capsys, ReplayOptions([trace], **TIERS))
    *cells, _, _ = report["cells"]
    ways = [(cell["size"], cell["write_mode"], cell["admission"]) for cell in cells]
    assert ways == [
        (size, mode, admission)
        for mode in TIERS["write_modes"]
        for admission in TIERS["admissions"]
        for size in ("10% + 40% + 100%", "20% + 40% + 100%")
    ]
    for cell in cells:
        assert [tier["tier"] for tier in cell["tiers"]] == ["host", "disk", "redis"]
        assert sum(tier["hit_tokens"] for tier in cell["tiers"]) == cell["hit_tokens"]
        refused = [tier["refused_blocks"] for tier in cell["tiers"][1:]]
        assert all(refused) == any(refused) == (cell["admission"] == "second_hit")


def test_the_bound_has_the_capacity_of_all_tiers(capsys, trace):
    (report,) = reports(capsys, ReplayOptions([trace], **TIERS))
    *_, bound, _ = report["cells"]
    assert (bound["policy"], bound["size"]) == ("MIN", "10% + 40% + 100%")
    assert bound["tiers"][0]["capacity_blocks"] == 4 + 17 + 44
    assert bound["token_hit_ratio"] == report["unlimited_hit_ratio"]


def test_the_table_shows_what_was_written_to_each_tier(capsys, trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    run_replay(ReplayOptions([trace], block_bytes="1MiB", **TIERS), as_json=False)
    printed = capsys.readouterr().out
    for words in (
        "lru / mq through second_hit",
        "disk: written",
        "redis: evicted at 100%",
        "MiB",
    ):
        assert words in printed


def test_cost_goes_by_what_things_cost(capsys, trace):
    options = {**TIERS, "admissions": ["cost"], "block_bytes": "1MiB"}
    with pytest.raises(SettingsError, match="--prefill-rate 8000, --bandwidth 1GiB"):
        run_replay(ReplayOptions([trace], **options), as_json=True)
    dear = ReplayOptions([trace], prefill_rate=1e9, bandwidth="1GiB", **options)
    cheap = ReplayOptions([trace], prefill_rate=100.0, bandwidth="1GiB", **options)
    for found, written in ((dear, False), (cheap, True)):
        (report,) = reports(capsys, found)
        assert bool(report["cells"][0]["tiers"][1]["written_blocks"]) == written


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_a_picture_of_its_kind(trace, tmp_path, suffix):
    plot = tmp_path / f"plot.{suffix}"
    run_replay(ReplayOptions([trace], ["lru", "mq"], plot=plot), as_json=True)
    if suffix == "png":
        assert plot.read_bytes().startswith(b"\x89PNG\r\n")
        assert plot.stat().st_size > 10_000
    else:
        text = plot.read_text()
        assert ET.fromstring(text).tag.endswith("svg")
        assert all(f"<!-- {name} -->" in text for name in ("lru", "mq", "MIN"))


def test_each_trace_has_a_plot_of_its_own(trace, tmp_path):
    run_replay(ReplayOptions([trace, trace], ["lru"], plot=tmp_path / "p.svg"), as_json=True)
    assert {file.name for file in tmp_path.glob("*.svg")} == {"p-1-trace.svg", "p-2-trace.svg"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": ["lur"]}, '"lur" is not one of the policies .* the nearest is lru'),
        ({"sizes": ["ten"]}, "The size: .* is not a size"),
        ({"sizes": ["1GiB"]}, "The size 1GiB needs the bytes of one block"),
        ({"block_bytes": "2"}, "The block bytes: .* is not a size"),
        ({"plot": "plot.pdf"}, "plot.pdf is no name for a plot: kvtier writes PNG and SVG"),
        ({"disks": ["1%"], "write_modes": ["thru"]}, '"thru" is not one of the write modes'),
        ({"disks": ["1%"], "admissions": ["lerned"]}, "the nearest is learned"),
        ({"disks": ["x"]}, "The size: .* is not a size"),
        ({"admissions": ["learned"]}, "Admission is about lower tiers, and there is none"),
        ({"bandwidth": "fast"}, "The bandwidth: .* is not a size"),
        ({"prefill_rate": 0.0}, "A prefill rate of 0 tokens a second"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_a_sentence(trace, tmp_path, options, said):
    if "plot" in options:
        options = {"plot": tmp_path / options["plot"]}
    with pytest.raises(SettingsError, match=said):
        run_replay(ReplayOptions([trace], **options), as_json=False)


def test_a_plot_that_cannot_be_written_is_refused(trace, tmp_path):
    plot = tmp_path / "missing" / "plot.svg"
    with pytest.raises(SettingsError, match="can't be written"):
        run_replay(ReplayOptions([trace], ["lru"], ["5%"], plot=plot), as_json=True)


def test_a_damaged_trace_is_refused_with_its_line(trace):
    with trace.open("a") as file:
        file.write('{"timestamp": 1')
    with pytest.raises(TraceError, match="line 201: not a request of the mooncake format"):
        run_replay(ReplayOptions([trace]), as_json=False)
