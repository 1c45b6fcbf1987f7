"""Checks of the CUDA paging on a real device: bandwidth, right bytes under load, vLLM end to end.

    python -m loadtest.gpu_check

Prints a table and one JSON line last. Exits 0 if all bytes and tokens are right, 1 if not, and 2,
with one sentence, where there is no GPU. It runs from a checkout with torch alone; where vLLM is
not installed, the driver's own calls stand for vLLM's, and the end-to-end part is left out. Takes
about three minutes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from kvtier.engine.cuda import Device

    from .gpu_parts import Report

NO_GPU = "no CUDA device is visible here: run this where nvidia-smi shows a GPU and torch sees it"
ROOT = Path(__file__).resolve().parents[1]
ENGINE_SECONDS = 240.0
"""Longest run of the end-to-end part."""


def main() -> int:
    """Run all checks."""
    if not _sees_gpu():
        print(f"gpu_check: {NO_GPU}", file=sys.stderr)
        return 2
    _find_kvtier()
    import torch

    from . import gpu_parts

    name = torch.cuda.get_device_name(0)
    device, how = _device(torch.device("cuda", 0))
    report = gpu_parts.Report()
    report.add("device", "", f"{name}, {how}")
    card = gpu_parts.CudaCard(device, "cuda")
    command = [sys.executable, "-m", "loadtest.gpu_engine"]
    with torch.cuda.stream(torch.cuda.Stream()):
        for part in (gpu_parts.check_bandwidth, gpu_parts.check_bytes):
            attempt(report, part, card, gpu_parts.Sizes())
        attempt(report, check_engine, command)
        # Last, because a driver that takes this for an error may refuse all that follows.
        attempt(report, gpu_parts.check_unpinned, card, gpu_parts.Sizes())
    line = {"check": "gpu", "ok": report.ok, "device": name, "how": how, **report.values}
    print(json.dumps(line))
    return 0 if report.ok else 1


def attempt(report: Report, part: Callable[..., None], *arguments: object) -> None:
    """Run a part. One that raises fails the check, and the others run all the same."""
    try:
        part(report, *arguments)
    except Exception:  # noqa: BLE001 (what failed is printed, and the next part may work)
        report.ok = False
        report.add(part.__name__, "failed")
        traceback.print_exc()


def check_engine(report: Report, command: list[str]) -> None:
    """Run vLLM with the connector, in a process of its own, and take over what it found."""
    report.values["engine"] = None
    if importlib.util.find_spec("vllm") is None:
        report.add("vLLM end to end", "not run", "vLLM is not installed here")
        return
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        report.add("vLLM end to end", "not ended", f"in {ENGINE_SECONDS:.0f} s")
        report.ok = False
        return
    found = _last_json(done.stdout)
    report.ok = report.ok and done.returncode == 0 and found is not None
    if found is None:
        report.add("vLLM end to end", "failed", f"exit code {done.returncode}")
        print(done.stderr[-4000:], file=sys.stderr)
        return
    report.values["engine"] = found
    for name, value in found.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        report.add(f"vLLM, {name.replace('_', ' ')}", shown)


def _last_json(text: str) -> dict[str, Any] | None:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def _device(device: torch.device) -> tuple[Device, str]:
    if importlib.util.find_spec("vllm") is not None:
        from kvtier.engine.cuda_device import TorchDevice

        return TorchDevice(device), "copies by vLLM"
    from .gpu_bare import BareDevice

    bare = BareDevice(device)
    return bare, "copies by the driver, " + ("in batches" if bare.batched else "one by one")


def _sees_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _find_kvtier() -> None:
    """Make the checkout's package importable where it is not installed."""
    if importlib.util.find_spec("kvtier") is not None:
        return
    folder = ROOT / "server"
    spec = importlib.util.spec_from_file_location(
        "kvtier", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["kvtier"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["kvtier"])


if __name__ == "__main__":
    sys.exit(main())
