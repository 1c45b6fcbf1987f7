"""The measured figures, by name: each runs its benchmark and prints one JSON line last.

python -m loadtest.figures          lists them
python -m loadtest.figures NAME     measures one
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .stack import start_server

RUNS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured, the bounds that its value must keep, and how to get one value a run."""

    about: str
    low: float | None
    high: float | None
    measure: Callable[[], Sequence[float]]

    def bound(self) -> str:
        """Return the bounds as text."""
        parts = [f">= {self.low:g}" if self.low is not None else ""]
        parts.append(f"<= {self.high:g}" if self.high is not None else "")
        return " and ".join(filter(None, parts))

    def keeps(self, value: float) -> bool:
        """Return whether a value is inside the bounds."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def demo_l1_gain() -> list[float]:
    """Run the demo, and return cold TTFT ÷ TTFT for each step that is served from L1."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "demo.json"
        _python("-m", "loadtest.demo", "--json", str(file))
        steps = json.loads(file.read_text())["steps"]
    return [steps[0]["ttft"] / step["ttft"] for step in steps if step["source"] == "host"]


def host_budget_ratio() -> list[float]:
    """Start servers, and return what the kernel has given to their slabs ÷ the setting."""
    return [_slab_bytes(f"{mib}MiB") / (mib << 20) for mib in (100, 1000, 4000)]


def directory_bytes_per_block() -> list[float]:
    """Fill directories of a million blocks, and return the private memory of one entry."""
    command = ("-m", "loadtest.directory_memory", "--blocks", "1000000")
    return [float(_python(*command, capture=True)) for _ in range(RUNS)]


FIGURES = {
    "demo_l1_gain": Figure("cold TTFT ÷ L1 TTFT in the demo", 5.0, None, demo_l1_gain),
    "host_budget_ratio": Figure(
        "host memory as the kernel counts it ÷ host.capacity", 0.98, 1.02, host_budget_ratio
    ),
    "directory_bytes_per_block": Figure(
        "private memory of one directory entry among a million, in bytes",
        None,
        600.0,
        directory_bytes_per_block,
    ),
}


def main(arguments: Sequence[str]) -> int:
    """List the figures, or measure one. Returns 1 if it breaks its bound, 2 for a wrong name."""
    if not arguments:
        for name, figure in FIGURES.items():
            print(f"{name:28} {figure.bound():18} {figure.about}")
        return 0
    if (figure := FIGURES.get(arguments[0])) is None:
        print(f"no figure {arguments[0]}: they are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    values = figure.measure()
    value = statistics.median(values)
    ok = all(map(figure.keeps, values))
    line = {
        "figure": arguments[0],
        "value": round(value, 4),
        "bound": figure.bound(),
        "ok": ok,
        "spread": [round(min(values), 4), round(max(values), 4)],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_cpu()}",
    }
    print(json.dumps(line, ensure_ascii=False))
    return 0 if ok else 1


def _slab_bytes(capacity: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder), "--capacity", capacity)
        try:
            server.wait()
            descriptors = Path(f"/proc/{server.child.pid}/fd")
            slabs = [
                each for each in descriptors.iterdir() if "memfd:kvtier" in str(each.readlink())
            ]
            return sum(each.stat().st_blocks * 512 for each in slabs)
        finally:
            server.stop()


def _python(*arguments: str, capture: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else sys.stderr,
    )
    return done.stdout if capture else ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
