"""Sizes as people write them, and the memory that this machine has.

Standard library only.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

UNITS = {
    "TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10,
    "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3,
}  # fmt: skip
SIZE = re.compile(rf"(\d+(?:\.\d{{1,3}})?) ?({'|'.join(UNITS)})")


def parse_size(value: object) -> int:
    """Return the bytes of a size such as "20GiB" or "1.5TB" (at most three decimals).

    Raises ValueError for anything else, with an example near to what was written.
    """
    match = SIZE.fullmatch(str(value)) if isinstance(value, str) else None
    if match is None:
        number = re.match(r"\d+", str(value))
        example = f"{number[0]}GiB" if number and int(number[0]) else "4GiB"
        raise ValueError(
            f"{shown(value)} is not a size: write a number and one of the units "
            f'{", ".join(UNITS)}, for example "{example}"'
        )
    size = round(Decimal(match[1]) * UNITS[match[2]])
    if size == 0:
        raise ValueError(f'{shown(value)} is no size to work with: write for example "4GiB"')
    return size


def format_size(size: int) -> str:
    """Return the shortest text that `parse_size` reads as `size` again; bytes if there is none."""
    exact = []
    for unit, factor in UNITS.items():
        text = f"{size / factor:.3f}".rstrip("0").rstrip(".")
        if size >= factor and round(Decimal(text) * factor) == size:
            exact.append(f"{text}{unit}")
    return min(exact, key=len, default=f"{size} bytes")


def rough_size(size: float) -> str:
    """Return bytes for a person: three digits and a unit."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def machine_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Return the bytes of memory that this process may use at most, and what sets that bound.

    The bound is the machine's memory or the lowest limit (cgroup v2) of the process's groups.
    """
    total = re.search(r"^MemTotal:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    assert total is not None, "Linux always tells MemTotal"
    bounds = [(int(total[1]) * 1024, "the machine's memory")]
    group = re.search(r"^0::/(.*)$", (proc / "self/cgroup").read_text(), re.MULTILINE)
    own = cgroups / group[1] if group else cgroups
    for folder in (own, *own.parents):
        limit = folder / "memory.max"
        if folder.is_relative_to(cgroups) and limit.exists():
            text = limit.read_text().strip()
            if text != "max":
                bounds.append((int(text), "the memory limit of this control group"))
    return min(bounds)


def shown(value: object) -> str:
    """Return `value` as an error message shows it: text in quotes."""
    return f'"{value}"' if isinstance(value, str) else str(value)
