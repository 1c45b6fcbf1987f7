"""`python -m loadtest.traffic` against a server, by hand as a user would."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from kvtier.endpoints import free_port
from servers import clean_environment

from loadtest.traffic.__main__ import main
from loadtest.traffic.records import read_records

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--size", "requests=6", "--size", "prompt=20", "--size", "output=3")


async def command(*arguments):
    """Run the command; return its exit code, its stdout and its stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loadtest.traffic",
        *map(str, arguments),
        cwd=ROOT,
        env=clean_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
async def test_a_server_is_driven_and_all_files_are_written(server, tmp_path):
    pytest.importorskip("matplotlib")
    base = ("--url", server.url, "--model", "m", "--out", tmp_path, "--system", "test server")
    # Tokens of 0, because a prompt's first one tells the server to answer well.
    code, out, err = await command(*base, "--workload", "unique", *SMALL, "--tokens", 0, 1)
    assert (code, err) == (0, "")
    assert "| test server | 6 | 0 |" in out
    assert len(read_records(tmp_path / "raw.jsonl")) == 6
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["workload"]["parameters"] == {"requests": 6, "prompt": 20, "output": 3}
    assert told["sources"]["prompt"] == 120
    assert "test server" in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "hardware.json").read_text())["load_at_end"]


def test_a_server_that_is_not_there_is_one_sentence(tmp_path, capsys):
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    base = ["--url", url, "--model", "m", "--out", str(tmp_path)]
    assert main([*base, "--workload", "unique", *SMALL]) == 1
    err = capsys.readouterr().err
    assert err.startswith("traffic: No request was answered. The first one: No connection came")
    assert len(err.splitlines()) == 1
    assert len(read_records(tmp_path / "raw.jsonl")) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", "chat", "--size", "turn=3"), "no size turn"),
        (("--workload", "chat", "--size", "turns"), "turns is no size"),
        (("--workload", "chat", "--rate", "2"), "use --arrivals"),
        (("--workload", "chat", "--arrivals", "0"), "nothing arrives"),
        (("--workload", "replay"), "add --trace"),
        (("--workload", "replay", "--trace", "x", "--size", "n=1"), "no n like it"),
        (("--workload", "replay", "--trace", "/nowhere"), "does not exist"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_sentence(arguments, said, tmp_path, capsys):
    base = ["--url", "http://127.0.0.1:1", "--model", "m", "--out", str(tmp_path / "out")]
    assert main([*base, *arguments]) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
