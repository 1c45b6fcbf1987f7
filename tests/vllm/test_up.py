"""`kvtier up` with the real vLLM: two engines share one server, and each ends as it should."""

import os
import signal
from pathlib import Path

import pytest
from harness import BLOCK, prompt
from support import until


def descendants(pid):
    """Process ids of everything that `pid` started, and what that started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids):
    until(lambda: not any(map(runs, pids)), f"the end of {pids}")


@pytest.fixture
def socket(tmp_path):
    return tmp_path / "up.sock"


def test_a_second_engine_joins_shares_the_cache_and_leaves_the_server_to_the_first(lab, socket):
    first = lab.up(socket, "--port", "0", "--capacity", "64MiB")
    until(lambda: "OpenAI API" in first.part.log.read_text(), "the ready lines")
    assert first.part.url in first.part.log.read_text()
    asked = prompt(1, 10 * BLOCK + 1)
    cold = first.complete(asked)
    assert cold.cached == 0

    second = lab.up(socket)
    until(lambda: "this engine joins it" in second.part.log.read_text(), "the joining")
    warm = second.complete(asked)
    assert (warm.tokens, warm.cached) == (cold.tokens, 10 * BLOCK)
    assert second.cached_by_source()["host"] == 10 * BLOCK

    loaded = f"{10 * BLOCK // BLOCK}.0"
    assert any(
        line.startswith("kvtier_engine_loaded_blocks_total") and line.endswith(loaded)
        for line in second.part.get("/metrics").splitlines()
    )

    of_second = descendants(second.part.child.pid)
    assert second.stop() == 0
    gone(of_second)
    first.forget()
    assert first.complete(asked).cached == 10 * BLOCK

    of_first = descendants(first.part.child.pid)
    assert first.stop(signal.SIGINT) == 0
    gone(of_first)
    assert not socket.exists()


def test_the_death_of_vllm_ends_the_server_and_everything_else(lab, socket):
    engine = lab.up(socket, "--port", "0", "--capacity", "64MiB")
    pids = descendants(engine.part.child.pid)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    (server,) = [pid for pid in pids if b"kvtier\0" in commands[pid]]
    for pid in set(pids) - {server}:
        os.kill(pid, signal.SIGKILL)
    until(lambda: engine.part.child.exit_code() is not None, "the end of kvtier up")
    assert engine.part.child.exit_code() == 137
    assert "vLLM ended by itself (exit code 137)" in engine.part.log.read_text()
    gone(pids)
    assert not socket.exists()
