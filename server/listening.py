"""The data plane's socket: which server has it, and who may connect to it.

One server at a time holds a socket path, by a lock on a file beside it. A process may connect if
it is of the server's user or of the group that the settings name.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from .errors import StartError

SOCKET_PATH_BYTES = 107
"""What Linux allows in a unix socket's address."""
BACKLOG = 128
SO_PEERGROUPS = 59
"""Linux's number for the socket option, which Python has no name for."""
GROUPS_AT_MOST = 256


class Caller(NamedTuple):
    """The process at the other end of a connection, as the kernel names it."""

    pid: int
    user: int
    group: int


def caller(sock: socket.socket) -> Caller:
    """Return who is connected."""
    size = struct.calcsize("3i")
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return Caller(*struct.unpack("3i", found))


def may_connect(sock: socket.socket, who: Caller, group: int | None) -> bool:
    """Return whether `who`, at the other end of `sock`, is our user, root or in `group`."""
    if who.user in (os.geteuid(), 0):
        return True
    return group is not None and group in (who.group, *_more_groups(sock))


def claim(path: Path, group: int | None) -> int:
    """Return a lock that one server at a time can hold on a socket path. Raises StartError."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise StartError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, and Linux allows "
            f"{SOCKET_PATH_BYTES}: set socket to a shorter path"
        )
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True)
            if group is not None:
                os.chown(path.parent, -1, group)
                path.parent.chmod(0o750)
        lock = _locked(_lock_path(path))
    except BlockingIOError as error:
        raise StartError(
            f"another kvtier server serves socket {path}: stop it, or set socket to another path"
        ) from error
    except OSError as error:
        raise StartError(
            f"cannot make socket {path}: {error.strerror}: set socket to a path in a directory "
            f"that this user may write"
        ) from error
    if path.exists() and not path.is_socket():
        os.close(lock)
        _lock_path(path).unlink(missing_ok=True)
        raise StartError(f"{path} is there and is not a socket: set socket to another path")
    path.unlink(missing_ok=True)
    return lock


def listen(path: Path, group: int | None) -> socket.socket:
    """Return a listening socket at a claimed path, for `group` too if it is given.

    Raises StartError if the path is not writable.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setblocking(False)
    before = os.umask(0o177 if group is None else 0o117)
    try:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
        if group is not None:
            os.chown(path, -1, group)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on socket {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return listener


def unclaim(path: Path, lock: int) -> None:
    """Let other servers claim the path."""
    _lock_path(path).unlink(missing_ok=True)
    os.close(lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _locked(path: Path) -> int:
    """Return a locked descriptor of the file at `path`. Raises BlockingIOError if it is taken."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A server that just ended may have removed the file that we opened.
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _more_groups(sock: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups that the peer had when it connected."""
    found = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_AT_MOST * 4)
    return struct.unpack(f"{len(found) // 4}i", found)
