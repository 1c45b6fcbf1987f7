"""The parts of the GPU check, on a fake card: what they print, and that they can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # for loadtest

from fake_gpu import FakeGpu, FakeModel

from loadtest import gpu_check, gpu_parts

pytestmark = pytest.mark.vllm
SMALL = gpu_parts.Sizes(bytes=2 << 20, slab=4 << 20, seeds=2, steps=20, blocks=12, slots=10)


class FakeCard:
    """A fake device for each paging."""

    where = "cpu"

    def __init__(self, deaf=frozenset()):
        self.deaf = deaf
        self.gpu = FakeGpu(0)
        self.seed = 0

    def device(self):
        self.seed += 1
        self.gpu = FakeGpu(self.seed, deaf=self.deaf)
        return self.gpu

    def pinned(self, size):
        return torch.zeros(size, dtype=torch.uint8)

    def model(self, caches):
        return FakeModel(self.gpu, caches)

    def settle(self):
        self.gpu.settle()


def test_bandwidth_is_told_beside_a_pinned_copy(capsys):
    report = gpu_parts.Report()
    gpu_parts.check_bandwidth(report, FakeCard(), SMALL)
    assert set(report.values) == {"pinned_bytes_per_second", "ratio"}
    assert len(report.values["ratio"]) == 2 * len(gpu_parts.SHAPES)
    assert all(ratio > 0 for ratio in report.values["ratio"].values())
    assert "of a pinned copy" in capsys.readouterr().out


def test_right_bytes_pass_and_a_stress_without_waits_shows_that_it_can_fail():
    report = gpu_parts.Report()
    gpu_parts.check_bytes(report, FakeCard(), SMALL)
    gpu_parts.check_unpinned(report, FakeCard(), SMALL)
    wrong = report.values["wrong"]
    assert report.ok
    assert wrong.pop("no waits at all") > 0
    assert set(wrong.values()) == {0}
    assert len(wrong) == 4


def test_wrong_bytes_fail_the_check(capsys):
    report = gpu_parts.Report()
    gpu_parts.check_bytes(report, FakeCard(deaf=frozenset({("stores", "compute")})), SMALL)
    assert not report.ok
    assert "should hold content" in capsys.readouterr().out


def test_a_part_that_raises_fails_the_check_and_the_next_runs(capsys):
    def broken(report):
        raise ValueError("no luck")

    report = gpu_parts.Report()
    gpu_check.attempt(report, broken)
    assert not report.ok
    assert "no luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "ok"),
    [
        ('print(\'{"ok": true, "host_seconds": 0.25}\')', True),
        ("print('{\"ok\": false}'); raise SystemExit(1)", False),
        ("print('no line')", False),
    ],
)
def test_the_engine_part_fails_with_its_process(monkeypatch, code, ok):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: object())
    report = gpu_parts.Report()
    gpu_check.check_engine(report, [sys.executable, "-c", code])
    assert report.ok is ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    command = [sys.executable, "-m", "loadtest.gpu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip() == f"gpu_check: {gpu_check.NO_GPU}"


def test_it_runs_from_a_checkout_without_kvtier_or_vllm_installed():
    """As on a GPU machine that has torch only."""
    code = (
        "import importlib.util as u, sys, json\n"
        "real = u.find_spec\n"
        "hide = lambda name, *rest: None if name in ('kvtier', 'vllm') else real(name, *rest)\n"
        "u.find_spec = hide\n"
        "from loadtest import gpu_check\n"
        "gpu_check._find_kvtier()\n"
        "from loadtest import gpu_bare, gpu_parts\n"
        "print(json.dumps([sys.modules['kvtier'].__spec__.origin, 'vllm' in sys.modules]))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(ROOT / "server" / "__init__.py"), False]
