"""The directory of what is changed at run time: whether it is there, writable, large and safe."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from ..config import Settings
from ..errors import SettingsError
from ..live import load_kept, state_folder
from ..sizes import rough_size
from .findings import Finding, problem, warning, well
from .host import existing

CHECK = "state"
ROOM_BYTES = 16 << 20
"""What the kept settings and the audit take at most, and some more."""
FORGOTTEN = "changes at run time would be forgotten at a restart, and so would the audit"
ELSEWHERE = "Let this user write there, or set state to another directory."


def state(settings: Settings) -> list[Finding]:
    """Return how the directory does, and whether what it keeps can be used. Blocks."""
    try:
        return [_kept(settings), *_folder(settings)]
    except OSError as error:
        said = f"{settings.state} can't be looked at ({error.strerror}): {FORGOTTEN}."
        return [warning(CHECK, said, ELSEWHERE)]


def _kept(settings: Settings) -> Finding:
    try:
        _, kept = load_kept(settings)
    except SettingsError as error:
        return problem(CHECK, str(error), "Until then the server does not start.")
    count = len(kept.changes)
    return well(CHECK, f"{state_folder(settings)} keeps {count:,} changed settings.")


def _folder(settings: Settings) -> list[Finding]:
    """Return what is not well with the directory itself."""
    found = []
    for folder in dict.fromkeys((existing(state_folder(settings)), existing(settings.state))):
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            found.append(
                warning(CHECK, f"This user can't write to {folder}: {FORGOTTEN}.", ELSEWHERE)
            )
        elif folder.is_relative_to(settings.state):
            found += _owner(folder)
    free = shutil.disk_usage(existing(settings.state)).free
    if free < ROOM_BYTES:
        said = f"{settings.state} has {rough_size(free)} of room: {FORGOTTEN}."
        found.append(warning(CHECK, said, "Make room there, or set state to another directory."))
    return found


def _owner(folder: Path) -> list[Finding]:
    """Whoever may write there decides what settings the next start has."""
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH:
        said = f"Anyone may write to {folder}, and so could change this server's settings."
        return [warning(CHECK, said, f"Run chmod o-w {folder}.")]
    if status.st_uid not in (os.geteuid(), 0):
        said = f"{folder} belongs to user {status.st_uid}, who could change this server's settings."
        return [warning(CHECK, said, f"Run chown {os.geteuid()} {folder}, or set state.")]
    return []
