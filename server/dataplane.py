"""The data plane: the unix-socket server that engines talk to.

One event loop serves all sessions. A session's frames are handled in the order they come; what it
sends wrong closes that session, with a counted reason, and disturbs no other. Sockets are handled
raw, because a slab's descriptor travels beside its frame (SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from . import protocol as wire
from .core import KEY_BYTES, SHARED_HASHES
from .errors import HelloRefused, ProtocolError, StartError
from .hierarchy import Hierarchy
from .metrics import Metrics
from .sessions import Session

log = logging.getLogger("kvtier.dataplane")

READ_BYTES = 1 << 18
UNSENT_BYTES_AT_MOST = 32 << 20
"""A session that reads its replies more slowly than this allows is closed."""
SOCKET_PATH_BYTES = 107
"""What Linux allows in a unix socket's address."""
BACKLOG = 128
SO_PEERGROUPS = 59
"""Linux's number for the socket option, which Python has no name for."""
GROUPS_AT_MOST = 256


@dataclass(frozen=True, slots=True)
class DataPlaneOptions:
    """Where engines connect, and who may. `allow_group` is a group id beside the same user."""

    socket: Path
    allow_group: int | None = None
    max_sessions: int = 256


class DataPlane:
    """Accepts engines and hands their frames to the hierarchy."""

    def __init__(self, hierarchy: Hierarchy, metrics: Metrics, options: DataPlaneOptions) -> None:
        self.hierarchy = hierarchy
        self.metrics = metrics
        self.options = options
        self.server_id = uuid.uuid4().hex
        self.open: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._lock: int | None = None

    async def start(self) -> None:
        """Listen. Raises StartError if the path is too long, taken or not writable."""
        path = self.options.socket
        self._lock = _claim(path, self.options.allow_group)
        try:
            self._listener = _listen(path, shared=self.options.allow_group is not None)
            if self.options.allow_group is not None:
                os.chown(path, -1, self.options.allow_group)
        except OSError as error:
            self._unclaim()
            raise StartError(f"cannot listen on socket {path}: {error.strerror}") from error
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def stop(self) -> None:
        """Close all sessions and leave no file behind."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.options.socket.unlink(missing_ok=True)
        for connection in list(self.open):
            connection.close("shutdown")
        self._unclaim()

    def _unclaim(self) -> None:
        if self._lock is not None:
            _lock_path(self.options.socket).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _accept(self) -> None:
        assert self._listener is not None, "the reader is removed with the listener"
        try:
            sock, _ = self._listener.accept()
        except OSError:  # The engine has gone again, or descriptors are short: it will retry.
            return
        sock.setblocking(False)
        pid, uid, gid = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        allowed = self.options.allow_group
        same_group = allowed is not None and allowed in (gid, *_more_groups(sock))
        if uid not in (os.geteuid(), 0) and not same_group:
            log.warning("refused process %d of user %d: not this server's user", pid, uid)
            self.metrics.session_closes.labels("peer").inc()
            sock.close()
        elif len(self.open) >= self.options.max_sessions:
            log.warning("refused process %d: %d sessions are open", pid, len(self.open))
            self.metrics.session_closes.labels("refused").inc()
            sock.close()
        else:
            self.open.add(_Connection(self, sock, pid))


class _Connection:
    """One engine's socket: frames in, frames and descriptors out."""

    def __init__(self, plane: DataPlane, sock: socket.socket, pid: int) -> None:
        self._plane = plane
        self._sock = sock
        self._pid = pid
        self._loop = asyncio.get_running_loop()
        self._reader = wire.FrameReader()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._session: Session | None = None
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def close(self, reason: str) -> None:
        """End the connection and its session; `reason` is counted."""
        if self._closed:
            return
        self._closed = True
        self._plane.open.discard(self)
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._plane.metrics.session_closes.labels(reason).inc()
        if self._session is not None:
            self._plane.hierarchy.close_session(self._session)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close("disconnect")
            return
        try:
            for body in self._reader.feed(data):
                self._handle(wire.decode_request(body))
                if self._closed:
                    return
        except ProtocolError as error:
            level = logging.DEBUG if self._session is None else logging.WARNING
            log.log(level, "closed process %d's session: %s", self._pid, error)
            self.close(error.reason)
        except HelloRefused as refusal:
            log.warning("refused process %d: %s", self._pid, refusal)
            self._send(wire.Refused(refusal.field, str(refusal)))
            self.close("refused")
        except Exception:
            log.exception("process %d's frame failed", self._pid)
            self.close("error")

    def _handle(self, frame: wire.Request) -> None:
        began = time.perf_counter()
        if self._session is None:
            if not isinstance(frame, wire.Hello):
                raise ProtocolError("unexpected", "the first frame is not a hello")
            op = "hello"
            self._session = self._greet(frame)
        else:
            op = self._serve(self._session, frame)
        self._plane.metrics.frame_seconds.labels(op).observe(time.perf_counter() - began)

    def _greet(self, hello: wire.Hello) -> Session:
        _check(hello)
        hierarchy = self._plane.hierarchy
        session = hierarchy.open_session(
            hello.role, hello.engine, hello.rank, self._pid, hello.manifest
        )
        self._send(
            wire.Welcome(
                session=session.number,
                server=self._plane.server_id,
                released=session.engine.released,
                slabs=list(session.space.pool.slabs),
                slot_bytes=session.space.pool.slot_bytes,
            )
        )
        return session

    def _serve(self, session: Session, frame: wire.Request) -> str:
        match frame:
            case wire.Step():
                self._step(session, frame)
                return "step"
            case wire.Lookup():
                self._lookup(session, frame)
                return "lookup"
            case wire.MapSlab():
                self._map(frame)
                return "map"
            case wire.Reset():
                count = self._plane.hierarchy.reset(session.space)
                self._send(wire.Done(frame.seq, count))
                return "reset"
            case wire.Bye():
                self.close("bye")
                return "bye"
            case wire.Hello():
                raise ProtocolError("unexpected", "a second hello")

    def _lookup(self, session: Session, frame: wire.Lookup) -> None:
        keys = wire.split_keys(frame.keys)
        if not 0 <= frame.start <= len(keys):
            raise ProtocolError("malformed", f"a lookup from {frame.start} of {len(keys)} blocks")
        slots, absent = self._plane.hierarchy.lookup(session, frame.request, keys, frame.start)
        self._send(wire.Found(frame.seq, slots, absent))

    def _step(self, session: Session, frame: wire.Step) -> None:
        hierarchy = self._plane.hierarchy
        for chain in frame.commits:
            keys = wire.split_keys(chain.keys)
            if len(keys) != len(chain.slots) or len(chain.parent) not in (0, KEY_BYTES):
                raise ProtocolError("malformed", f"{len(keys)} blocks, {len(chain.slots)} slots")
            hierarchy.commit(session, chain.parent, keys, chain.slots)
        hierarchy.abort(session, frame.aborts)
        for request in frame.releases:
            hierarchy.release(session, request)
        for touched in frame.touches:
            hierarchy.touch(session, wire.split_keys(touched))
        if min(frame.asked, frame.device, frame.host, frame.need, frame.stock) < 0:
            raise ProtocolError("malformed", "a negative count")
        if frame.asked:
            hierarchy.count(session, frame.asked, frame.device, frame.host)
        if frame.settled:
            hierarchy.settle(session)
        if frame.seq:
            slots = hierarchy.reserve(session, frame.need, frame.stock)
            self._send(wire.Granted(frame.seq, slots))

    def _map(self, frame: wire.MapSlab) -> None:
        slab = self._plane.hierarchy.host.slab(frame.slab)
        if slab is None:
            self._send(wire.Mapped(frame.seq, frame.slab, 0))
        else:
            self._send(wire.Mapped(frame.seq, frame.slab, slab.size), descriptor=slab.fd)

    def _send(self, frame: wire.Frame, descriptor: int | None = None) -> None:
        self._unsent.append((memoryview(wire.encode(frame)), descriptor))
        if len(self._unsent) == 1:
            self._flush()
        if sum(len(data) for data, _ in self._unsent) > UNSENT_BYTES_AT_MOST:
            self.close("slow_reader")

    def _flush(self) -> None:
        while self._unsent:
            data, descriptor = self._unsent[0]
            rights = [] if descriptor is None else [_rights(descriptor)]
            try:
                sent = self._sock.sendmsg([data], rights)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                self.close("disconnect")
                return
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], None)
        self._loop.remove_writer(self._sock.fileno())


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))


def _check(hello: wire.Hello) -> None:
    manifest = hello.manifest
    if hello.version != wire.PROTOCOL_VERSION:
        raise HelloRefused(
            "version",
            f"the engine speaks protocol {hello.version}, this server {wire.PROTOCOL_VERSION}: "
            f"install the same kvtier on both sides",
        )
    if manifest.hash_algorithm not in SHARED_HASHES:
        raise HelloRefused(
            "hash_algorithm",
            f"block hashes of {manifest.hash_algorithm!r} can be made to collide, so that one "
            f"user would get another's blocks: start vLLM with --prefix-caching-hash-algo "
            f"{SHARED_HASHES[-1]}",
        )
    if not (0 < manifest.shard_bytes <= 1 << 40 and 0 < manifest.shards <= 4096):
        raise HelloRefused("shard_bytes", "the size of a block is not in a sensible range")
    if not 0 <= hello.rank < manifest.shards or manifest.block_tokens <= 0:
        raise HelloRefused("rank", f"rank {hello.rank} of {manifest.shards} shards")


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _more_groups(sock: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups that the peer had when it connected."""
    found = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_AT_MOST * 4)
    return struct.unpack(f"{len(found) // 4}i", found)


def _claim(path: Path, group: int | None) -> int:
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


def _listen(path: Path, *, shared: bool) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setblocking(False)
    before = os.umask(0o117 if shared else 0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
