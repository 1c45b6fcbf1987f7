"""The data plane: the unix-socket server that engines talk to.

One event loop serves all sessions. A session's frames are handled in the order they come; what it
sends wrong closes that session, with a counted reason, and disturbs no other. Sockets are handled
raw, because a slab's descriptor travels beside its frame (SCM_RIGHTS).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import protocol as wire
from .changes import News, Teller, Watcher
from .core import CHECKSUMS, KEY_BYTES, SHARED_HASHES, Tier
from .errors import HelloRefused, ProtocolError
from .hierarchy import Hierarchy
from .listening import caller, claim, listen, may_connect, unclaim
from .metrics import OPERATIONS, Metrics
from .salts import Salts
from .sessions import Session
from .waiting import Answer

log = logging.getLogger("kvtier.dataplane")

READ_BYTES = 1 << 18
UNSENT_BYTES_AT_MOST = 32 << 20
"""A session that reads its replies more slowly than this allows is closed."""
RANK_AT_MOST = 65_535


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
        self.salts = Salts()
        """Whose requests have which salt."""
        self.open: set[_Connection] = set()
        self.teller = Teller(lambda turn: asyncio.get_running_loop().call_soon(turn))
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        """What the session whose turn it is has read."""
        self.held = metrics.loop_hold_seconds.labels("frame")
        self.frame_seconds = {op: metrics.frame_seconds.labels(op) for op in OPERATIONS}
        self._listener: socket.socket | None = None
        self._lock: int | None = None

    async def start(self) -> None:
        """Listen. Raises StartError if the path is too long, taken or not writable."""
        path, group = self.options.socket, self.options.allow_group
        self._lock = claim(path, group)
        try:
            self._listener = listen(path, group)
        except BaseException:
            self._unclaim()
            raise
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
            unclaim(self.options.socket, self._lock)
            self._lock = None

    def _accept(self) -> None:
        assert self._listener is not None, "the reader is removed with the listener"
        try:
            sock, _ = self._listener.accept()
        except OSError:  # The engine has gone again, or descriptors are short: it will retry.
            return
        sock.setblocking(False)
        who = caller(sock)
        if not may_connect(sock, who, self.options.allow_group):
            log.warning("refused process %d of user %d: not this server's user", who.pid, who.user)
            self.metrics.session_closes.labels("peer").inc()
            sock.close()
        elif len(self.open) >= self.options.max_sessions:
            log.warning("refused process %d: %d sessions are open", who.pid, len(self.open))
            self.metrics.session_closes.labels("refused").inc()
            sock.close()
        else:
            self.open.add(_Connection(self, sock, who.pid))


class _Connection:
    """One engine's socket: frames in, frames and descriptors out."""

    def __init__(self, plane: DataPlane, sock: socket.socket, pid: int) -> None:
        self._plane = plane
        self._sock = sock
        self._pid = pid
        self._loop = asyncio.get_running_loop()
        self._reader = wire.FrameReader()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._blocked = False
        """The kernel takes no more bytes for now, and calls `_flush` when it does."""
        self._session: Session | None = None
        self._watcher: Watcher | None = None
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
        if self._watcher is not None:
            self._plane.teller.leave(self._watcher)
        if self._session is not None:
            self._plane.hierarchy.close_session(self._session)

    @property
    def behind(self) -> bool:
        """Whether the engine has not read yet what it was sent."""
        return bool(self._unsent)

    def tell(self, news: News) -> None:
        """Send what changed among the blocks of the session's namespace."""
        stored = [wire.Stored(run[0], b"".join(run[1:])) for run in news.stored]
        removed = b"".join(news.removed)
        self._send(wire.Changed(0, Tier.HOST, news.whole, stored, removed))

    def _readable(self) -> None:
        buffer = self._plane.read_buffer
        try:
            size = self._sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if not size:
            self.close("disconnect")
            return
        try:
            for body in self._reader.feed(buffer[:size]):
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
        began, held = time.perf_counter(), time.thread_time()
        if self._session is None:
            if not isinstance(frame, wire.Hello):
                raise ProtocolError("unexpected", "the first frame is not a hello")
            op = "hello"
            self._greet(frame)
        else:
            op = self._serve(self._session, frame)
        self._plane.held.observe(time.thread_time() - held)
        self._plane.frame_seconds[op].observe(time.perf_counter() - began)

    def _greet(self, hello: wire.Hello) -> None:
        _check(hello)
        # Known before the reply is sent, so that it ends if the engine has gone already.
        self._session = session = self._plane.hierarchy.open_session(
            hello.role, hello.engine, hello.rank, self._pid, hello.manifest
        )
        self._send(
            wire.Welcome(
                session=session.number,
                server=self._plane.server_id,
                released=session.engine.released,
                slabs=list(session.space.pool.slabs),
                slot_bytes=session.space.pool.slot_bytes,
                salt_key=self._plane.salts.key,
            )
        )
        if hello.events and not self._closed:
            self._watcher = self._plane.teller.watch(session.space.changes, self)

    def _serve(self, session: Session, frame: wire.Request) -> str:
        """Do what a frame asks for. Returns the name of its operation."""
        hierarchy = self._plane.hierarchy
        match frame:
            case wire.Step():
                self._step(session, frame)
            case wire.Lookup():
                self._lookup(session, frame)
            case wire.MapSlab():
                self._map(frame)
            case wire.Reset():
                self._send(wire.Done(frame.seq, hierarchy.reset(session.space)))
            case wire.Drop():
                self._drop(session, frame)
            case wire.Sizes():
                sizes = hierarchy.directory.sizes(session.space.manifest)
                self._send(wire.Known(frame.seq, sizes))
            case wire.Bye():
                self.close("bye")
            case wire.Hello():
                raise ProtocolError("unexpected", "a second hello")
        return str(frame.__struct_config__.tag)

    def _lookup(self, session: Session, frame: wire.Lookup) -> None:
        keys = wire.split_keys(frame.keys)
        if frame.start > len(keys):
            raise ProtocolError("malformed", f"a lookup from {frame.start} of {len(keys)} blocks")
        hierarchy = self._plane.hierarchy
        if hierarchy.leased(session, frame.seq):
            raise ProtocolError("malformed", f"lease {frame.seq} has not ended yet")
        done = partial(self._found, frame.seq)
        tenant = self._plane.salts.tenant(frame.tenant)
        ready = hierarchy.lookup(session, frame.seq, keys, frame.start, tenant, done)
        self._send(wire.Found(frame.seq, ready.slots, ready.absent, ready.within))
        if frame.use:
            hierarchy.record_use()
        else:
            hierarchy.forget_use()

    def _drop(self, session: Session, frame: wire.Drop) -> None:
        keys = wire.split_keys(frame.keys)
        if len(keys) > wire.MAX_DROP_BLOCKS:
            raise ProtocolError("malformed", f"a drop of {len(keys)} blocks at once")
        count = self._plane.hierarchy.drop(session, keys)
        self._send(wire.Done(frame.seq, count))

    def _found(self, lease: int, answer: Answer) -> None:
        """Tell the engine what became of a lookup that waited."""
        slots, disk, redis = answer
        self._send(wire.Found(lease, slots, disk=disk, redis=redis))

    def _step(self, session: Session, frame: wire.Step) -> None:
        hierarchy = self._plane.hierarchy
        # First of all: the engine computes such a block again, and may commit it in this step.
        hierarchy.unreadable(session, frame.unreadable)
        for chain in frame.commits:
            keys = wire.split_keys(chain.keys)
            if len(keys) != len(chain.slots) or len(chain.parent) not in (0, KEY_BYTES):
                raise ProtocolError("malformed", f"{len(keys)} blocks, {len(chain.slots)} slots")
            tenant = self._plane.salts.tenant(chain.tenant)
            hierarchy.commit(session, chain.parent, keys, chain.slots, tenant)
        hierarchy.abort(session, frame.aborts)
        for lease in frame.releases:
            hierarchy.release(session, lease)
        for touched in frame.touches:
            hierarchy.touch(session, wire.split_keys(touched))
        for asked in frame.asked:
            asked.tenant = self._plane.salts.tenant(asked.tenant)
            hierarchy.count(session, asked)
        if frame.prefill_tokens:
            hierarchy.computed(session, frame.prefill_tokens, frame.prefill_seconds)
        if frame.settled:
            hierarchy.settle(session)
        if frame.seq:
            above = [wire.split_keys(chain) for chain in frame.above]
            tenants = Counter[str]()
            for tenant, blocks in frame.tenants:
                tenants[self._plane.salts.tenant(tenant)] += blocks
            slots = hierarchy.reserve(session, frame.need, frame.stock, above, tenants)
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
                if not self._blocked:
                    self._blocked = True
                    self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                self.close("disconnect")
                return
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], None)
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._sock.fileno())
            if self._watcher is not None:
                self._plane.teller.resume(self._watcher)


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
    if manifest.block_tokens <= 0:
        raise HelloRefused("block_tokens", f"a block of {manifest.block_tokens} tokens")
    if manifest.checksum not in CHECKSUMS:
        raise HelloRefused(
            "checksum",
            f"this server knows no checksum {manifest.checksum!r}, only {', '.join(CHECKSUMS)}: "
            f"install the same kvtier on both sides",
        )
    # Several ranks hold one shard where a model has fewer KV heads than ranks.
    if not 0 <= hello.rank <= RANK_AT_MOST:
        raise HelloRefused("rank", f"rank {hello.rank} is not in 0 to {RANK_AT_MOST}")
