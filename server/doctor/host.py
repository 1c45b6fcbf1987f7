"""What the machine gives a server: memory, shared memory, huge pages, the socket, files, extras."""

from __future__ import annotations

import os
import re
import resource
import stat
from pathlib import Path

from ..config import Settings
from ..endpoints import listens
from ..listening import SOCKET_PATH_BYTES
from ..sizes import format_size, machine_memory, rough_size
from ..tiers import compression
from ..tiers.slab import HUGE_PAGE_BYTES
from .findings import Finding, problem, warning, well

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
BESIDE_BYTES = 1 << 30
"""What a control group should allow beyond the capacity."""
ELSEWHERE = "Set socket to a path in a folder that only its owner may write."
EXTRA_FIX = f"Run {compression.EXTRA}, or set the codec to none."


def memory(
    settings: Settings, *, running: bool, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Finding:
    """Whether the capacity is there; a running server has taken its own already."""
    capacity = settings.host.capacity
    shown = f"host.capacity ({format_size(capacity)})"
    bound, bounded_by = machine_memory(proc, cgroups)
    available = _meminfo(proc)["MemAvailable"]
    limit = f"{bounded_by} ({rough_size(bound)})"
    lower = "Lower host.capacity, or raise the limit to it and 1 GiB more."
    if capacity > bound:
        return problem("memory", f"{shown} is larger than {limit}.", lower)
    if "control group" in bounded_by and capacity + BESIDE_BYTES > bound:
        return warning("memory", f"{shown} leaves less than 1 GiB of {limit}.", lower)
    if not running and capacity > available:
        return problem(
            "memory",
            f"{shown} is more than the {rough_size(available)} that are available now.",
            "Lower host.capacity, or end what has the memory.",
        )
    return well("memory", f"{shown} fits into {limit}.")


def memlock(settings: Settings, devices: Path = Path("/dev")) -> Finding:
    """Whether engines on CUDA devices may pin the slabs."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    enough = limit == resource.RLIM_INFINITY or limit >= settings.host.capacity
    shown = "unlimited" if limit == resource.RLIM_INFINITY else rough_size(limit)
    if enough or not any(devices.glob("nvidia[0-9]*")):
        return well("memlock", f"The limit is {shown}; only engines on CUDA devices need it.")
    return warning(
        "memlock",
        f"The limit is {shown}, less than host.capacity: engines on CUDA devices may be refused to "
        f"pin it, and copy more slowly then.",
        "Raise it for engines: LimitMEMLOCK=infinity, or --ulimit memlock=-1 for a container.",
    )


def shared_memory() -> Finding:
    """Whether slabs can be made at all."""
    try:
        descriptor = os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, HUGE_PAGE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return problem(
            "shared memory",
            f"The kernel gives no shared memory without a name (memfd): {error.strerror}.",
            "Allow memfd_create where a seccomp profile forbids it, and free memory.",
        )
    return well("shared memory", "The kernel gives shared memory without a name (memfd).")


def huge_pages(settings: Settings, *, running: bool, proc: Path = PROC) -> Finding:
    """Whether there are the huge pages that the settings ask for."""
    wanted = settings.host.huge_pages
    needed = -(-settings.host.capacity // HUGE_PAGE_BYTES)
    free = _meminfo(proc).get("HugePages_Free", 0)
    if wanted == "never" or free >= needed or running:
        return well("huge pages", f"host.huge_pages is {wanted}, and {free:,} are free.")
    fix = f"Run sysctl vm.nr_hugepages={needed} before the server starts."
    if wanted == "always":
        said = f"host.huge_pages is always, and {free:,} of {needed:,} are free."
        return problem("huge pages", said, f"{fix[:-1]}, or set host.huge_pages to auto.")
    said = f"host.huge_pages is auto, and {free:,} of {needed:,} are free: slabs lie in normal ones"
    return well("huge pages", f"{said}.")


def socket_folder(settings: Settings) -> Finding:
    """Whether the socket can be made where the settings say, and whom its folder lets in."""
    path, folder = settings.socket, settings.socket.parent
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        return problem("socket", f"{path} has more than {SOCKET_PATH_BYTES} bytes.", ELSEWHERE)
    try:
        if path.exists() and not path.is_socket():
            return problem("socket", f"{path} is there and is not a socket.", ELSEWHERE)
        return _made(folder) if not folder.exists() else _lets_in(settings, path, folder)
    except OSError as error:
        return problem("socket", f"{path} can't be looked at: {error.strerror}.", ELSEWHERE)


def _made(folder: Path) -> Finding:
    above = existing(folder)
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return well("socket", f"{folder} will be made for the socket.")
    return problem("socket", f"{folder} can't be made in {above}.", ELSEWHERE)


def _lets_in(settings: Settings, path: Path, folder: Path) -> Finding:
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return problem("socket", f"This user can't write to {folder}.", ELSEWHERE)
    if (mode := folder.stat().st_mode) & stat.S_IWOTH:
        said = f"Anyone may write to {folder}, and so could put a server of theirs there."
        return warning("socket", said, ELSEWHERE)
    group = settings.group_id()
    if group is not None and not _open_to(folder, mode, group):
        said = f"{folder} does not let the group {settings.allow_group} (allow_group) in."
        return problem("socket", said, f"Run chgrp {settings.allow_group} and chmod g+x on it.")
    lives = "a server lives on it" if listens(path) else "no server lives on it"
    return well("socket", f"{path} can be used, and {lives}.")


def secret_files(settings: Settings) -> list[Finding]:
    """Whether only those may read secrets who need to."""
    http, found = settings.http, []
    for key, file in (
        ("redis.password_file", settings.redis.password_file),
        ("http.token_file", http.token_file),
        ("http.read_token_file", http.read_token_file),
    ):
        if file is not None and file.exists() and file.stat().st_mode & stat.S_IROTH:
            said = f"Anyone on this machine may read {key} ({file})."
            found.append(warning("secrets", said, f"Run chmod o-r {file}."))
    return found


def extras(settings: Settings) -> list[Finding]:
    """Whether what the settings ask for is installed."""
    codecs = {"disk.codec": settings.disk.codec, "redis.codec": settings.redis.codec}
    wanted = {key: mode for key, mode in codecs.items() if mode != "none"}
    if not wanted:
        return [well("extras", "The settings need none.")]
    try:
        compression.require()
    except compression.CodecMissing as missing:
        return [
            (problem if mode == "always" else warning)(
                "extras", f"{key} is {mode}, and {str(missing).partition(' (')[0]}.", EXTRA_FIX
            )
            for key, mode in wanted.items()
        ]
    return [well("extras", f"What {', '.join(wanted)} needs is installed.")]


def existing(path: Path) -> Path:
    """Return the nearest folder at or above `path` that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _open_to(folder: Path, mode: int, group: int) -> bool:
    in_group = folder.stat().st_gid == group and bool(mode & stat.S_IXGRP)
    return in_group or bool(mode & stat.S_IXOTH)


def _meminfo(proc: Path) -> dict[str, int]:
    """Return what /proc/meminfo says, in bytes; pages as they are counted."""
    rows = re.findall(r"^(\w+):\s+(\d+)( kB)?$", (proc / "meminfo").read_text(), re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in rows}
