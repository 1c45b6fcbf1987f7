"""Data-plane frames: what scheduler side, worker side and server say to each other.

A frame is a 4-byte big-endian length and a msgpack array that starts with the operation's name.
Prefix hashes travel as one byte string (`KEY_BYTES` each, a chain's head first), so that a frame of
640 keys is decoded as quickly as one of 6. Slots travel packed (`core.SlotRef.packed`).

A reply carries the `seq` of its request, and replies come in the order of the requests; a step with
`seq` 0 wants none. What a lookup leases is the lease with the number `seq` of that lookup: an
engine may ask twice for one request, and end the first lease while it still uses the second.
Bytes of blocks never travel here: `Mapped` comes with a file descriptor (SCM_RIGHTS) of the slab
that holds them.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Final, TypeAlias

import msgspec

from .core import KEY_BYTES, BlockKey, Manifest, Role, Tier
from .errors import ProtocolError

PROTOCOL_VERSION: Final = 4
HEADER_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 16 << 20
"""Enough for a lookup of half a million blocks; more is refused before it is read."""
MAX_CHAIN_BLOCKS: Final = 400_000
MAX_DROP_BLOCKS: Final = 1024
"""One drop holds the loop for as many blocks."""
MAX_TENANT_CHARACTERS: Final = 128

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Tenant: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARACTERS)]
"""Who a request belongs to; empty if it names nobody. With `SALT_MARK` in front, which no name can
have, it is the digest of the request's salt: see `salted`."""
SALT_MARK: Final = "\x1f"
SALT_DIGEST_BYTES: Final = 16
SALTS_REMEMBERED: Final = 1024


class Frame(msgspec.Struct, array_like=True, tag_field="op", forbid_unknown_fields=True):
    """Base of all frames."""


# From engines.


class Hello(Frame, tag="hello"):
    """First frame of a session: who speaks, and what must agree before blocks are shared."""

    version: int
    role: Role
    engine: str
    """Same text in all sessions of one engine."""
    rank: int
    manifest: Manifest
    events: bool = False
    """Tell the session of every block that comes or goes in its namespace, with `Changed`."""


class Lookup(Frame, tag="lookup"):
    """Ask for the longest prefix from block `start` on, and lease what is ready.

    `keys` is the whole chain from the first block: the blocks before `start` are in the engine's
    device memory already, and are touched. `seq` is the number of the lease.
    """

    seq: int
    keys: bytes
    start: Count
    tenant: Tenant = ""
    use: bool = True
    """False for what is only fetched: another lookup was its use, and is counted."""


class Chain(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks of one request that lie in slots now. `parent` is empty at the head."""

    parent: bytes
    keys: bytes
    slots: list[int]
    tenant: Tenant = ""


class Asked(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Blocks that a tenant's prompts could have reused; so many of them came from each tier."""

    tenant: Tenant
    asked: Count
    device: Count
    host: Count
    disk: Count = 0
    redis: Count = 0


class Step(Frame, tag="step"):
    """What one engine step has to say; sent only if there is something."""

    seq: int
    commits: list[Chain] = []
    aborts: list[int] = []
    """Slots whose copy failed or never took place."""
    releases: list[int] = []
    """Numbers of leases that end."""
    touches: list[bytes] = []
    """Chains that were used without a lookup, because the device held all of them."""
    need: Count = 0
    """Slots wanted now, by eviction if there is no other way."""
    above: list[bytes] = []
    """Chains, from their heads, that what is wanted continues: they do not go to make room."""
    stock: Count = 0
    """Slots that the session would like to hold in all, as far as they are free."""
    tenants: list[tuple[Tenant, Count]] = []
    """Of `need`, so many are for blocks of these."""
    asked: list[Asked] = []
    """What prompts could have reused in this step, and what was there, by tenant."""
    unreadable: list[int] = []
    """Slots leased by this session whose bytes are not those that were stored: drop their blocks.

    They are dropped before anything else in the step is done."""
    settled: bool = False
    """No worker copies on behalf of an earlier session of this engine any more."""
    prefill_tokens: Count = 0
    """Prompt tokens that were computed in steps of which the next field is the time."""
    prefill_seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class MapSlab(Frame, tag="map"):
    """Ask for the memory of a slab."""

    seq: int
    slab: int


class Reset(Frame, tag="reset"):
    """Drop every block of the session's namespace."""

    seq: int


class Drop(Frame, tag="drop"):
    """Drop these blocks of the session's namespace from all tiers; at most `MAX_DROP_BLOCKS`."""

    seq: int
    keys: bytes


class Sizes(Frame, tag="sizes"):
    """Ask for the namespaces that differ from the session's own in `shard_bytes` alone."""

    seq: int


class Bye(Frame, tag="bye"):
    """The session ends on purpose."""


# From the server.


class Welcome(Frame, tag="welcome"):
    """The hello is accepted."""

    session: int
    """Rises with every session of one server."""
    server: str
    """Differs after each server start."""
    released: int
    """Sessions of this engine up to this number have lost their slots: never copy for them."""
    slabs: list[int]
    """Slabs that hold blocks of the namespace now."""
    slot_bytes: int
    salt_key: bytes = b""
    """With which salts travel; empty where the server knows none."""


class Refused(Frame, tag="refused"):
    """The request cannot be met; the session ends. `field` names what does not fit."""

    field: str
    message: str


class Found(Frame, tag="found"):
    """Answer to a lookup: leased slots of the blocks from `start` on.

    The lease has the number `seq`; there is none when `slots` is empty. When lower tiers have more,
    the first answer has no slots and says within how many seconds a second one comes.
    """

    seq: int
    slots: list[int]
    absent: list[int] = []
    """Positions before `start` that the host tier does not hold: worth storing again."""
    within: float = 0.0
    disk: int = 0
    """Blocks of these that came from the disk tier for this lookup."""
    redis: int = 0


class Granted(Frame, tag="granted"):
    """Answer to a step with a `seq`: slots that are the session's until committed or aborted."""

    seq: int
    slots: list[int]


class Mapped(Frame, tag="mapped"):
    """Answer to a map: `slab_bytes` is 0, and no descriptor comes, when there is no such slab."""

    seq: int
    slab: int
    slab_bytes: int


class Done(Frame, tag="done"):
    """Answer to a reset or a drop: so many blocks left the host tier."""

    seq: int
    count: int


class Known(Frame, tag="known"):
    """Answer to `sizes`: the `shard_bytes` of each, the session's own among them."""

    seq: int
    shard_bytes: list[int]


class Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks that became visible. `parent` is empty at the head of a chain."""

    parent: bytes
    keys: bytes


class Changed(Frame, tag="changed"):
    """Blocks of the namespace that came and went; nobody asks for it, so that `seq` is 0.

    What `removed` lists went first, and then came what `stored` lists. A block that the session
    knows already may be stored again.
    """

    seq: int = 0
    tier: Tier = Tier.HOST
    whole: bool = False
    """Forget what you knew of this tier: the first frame of a snapshot, whose rest follows."""
    stored: list[Stored] = []
    removed: bytes = b""


Request = Hello | Lookup | Step | MapSlab | Reset | Drop | Sizes | Bye
Reply = Welcome | Refused | Found | Granted | Mapped | Done | Known | Changed

_KEY_ROWS = struct.Struct(f"{KEY_BYTES}s" * 64)
"""Cuts 64 keys at once, several times as fast as slices do."""

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(frame: Frame) -> bytes:
    """Return the frame with its length in front. Raises ProtocolError if it is too large."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError("oversized", f"a frame of {len(body)} bytes is over the limit")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def decode_request(body: bytes | memoryview) -> Request:
    """Return what an engine said. Raises ProtocolError if it is no known frame."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"not a frame: {error}") from error


def decode_reply(body: bytes | memoryview) -> Reply:
    """Return what the server said. Raises ProtocolError if it is no known frame."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"not a frame: {error}") from error


@lru_cache(SALTS_REMEMBERED)
def salted(key: bytes, salt: str) -> str:
    """Return how a salt travels: as a digest that says nothing without the server's key."""
    digest = hashlib.blake2b(salt.encode(), key=key, digest_size=SALT_DIGEST_BYTES)
    return SALT_MARK + digest.hexdigest()


def split_keys(chain: bytes) -> list[BlockKey]:
    """Return the prefix hashes in `chain`. Raises ProtocolError if one is cut short."""
    if len(chain) % KEY_BYTES or len(chain) > MAX_CHAIN_BLOCKS * KEY_BYTES:
        raise ProtocolError(
            "malformed", f"{len(chain)} bytes are not a chain of {KEY_BYTES}-byte prefix hashes"
        )
    whole = len(chain) - len(chain) % _KEY_ROWS.size
    keys = list(itertools.chain.from_iterable(_KEY_ROWS.iter_unpack(memoryview(chain)[:whole])))
    keys += (chain[at : at + KEY_BYTES] for at in range(whole, len(chain), KEY_BYTES))
    return keys


class FrameReader:
    """Cuts a byte stream into frame bodies. Holds at most one frame and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = 0
        """Bytes in the buffer that make reading on worthwhile: a header, or a whole frame."""

    def feed(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """Yield the bodies that `data` completes. Raises ProtocolError for an oversized one.

        A body may be a view of `data`: use it before what holds `data` is used again.
        """
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        view = memoryview(data)
        while len(view) >= HEADER_BYTES:
            size = int.from_bytes(view[:HEADER_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError("oversized", f"a frame of {size} bytes is over the limit")
            self._wanted = HEADER_BYTES + size
            if len(view) < self._wanted:
                break
            yield view[HEADER_BYTES : self._wanted]
            view = view[self._wanted :]
        else:
            self._wanted = HEADER_BYTES
        self._buffer += view
