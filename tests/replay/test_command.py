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
        assert cell["written_bytes"] is None


def test_sizes_in_bytes_are_cut_into_blocks(capsys, trace):
    options = ReplayOptions([trace], ["lru"], ["16MiB"], block_bytes="1MiB")
    (report,) = reports(capsys, options)
    lru = report["cells"][0]
    assert lru["capacity_blocks"] == 16
    assert lru["written_bytes"] == lru["written_blocks"] << 20


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


def test_the_plot_is_an_svg_with_a_line_for_each_policy(trace, tmp_path):
    plot = tmp_path / "plot.svg"
    run_replay(ReplayOptions([trace], ["lru", "mq"], plot=plot), as_json=True)
    root = ET.parse(plot).getroot()
    lines = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 3
    assert {"lru", "mq", "MIN"} <= {each.text for each in root.iter()}


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
        ({"plot": "plot.png"}, "plot.png is no name for a plot: kvtier writes SVG"),
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
