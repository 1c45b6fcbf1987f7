"""The words of the cache as types: namespaces, block keys, slots, outcomes.

Standard library only, no I/O, no state. Everything here is immutable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

FORMAT_VERSION = 1
"""Version of how a block's bytes lie in a slot. It is part of every namespace."""

KEY_BYTES = 32
"""Bytes of a prefix hash: a whole sha256, never cut short."""

PAGE_BYTES = 4096
"""Slots and shards start at multiples of this, so that files can be read straight into them."""

SHARED_HASHES = ("sha256", "sha256_cbor")
"""Block hash algorithms of vLLM whose keys may be shared between processes."""

CHECKSUMS = {"none": 0, "xxh3_128": 16}
"""How a shard's bytes may be sealed, and the bytes that the seal takes right after them."""

SEED_BYTES = 8
"""Bytes of a block's key that its seal is bound to."""

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}

BlockKey: TypeAlias = bytes
"""vLLM's block hash (`KEY_BYTES` bytes): chained over parent, tokens, LoRA, images and salt."""


def align_up(size: int, step: int) -> int:
    """Return `size` rounded up to a multiple of `step`."""
    return -(-size // step) * step


def seal_seed(key: BlockKey) -> int:
    """Return what binds a checksum to a block key."""
    return int.from_bytes(key[:SEED_BYTES], "big")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that two engines must agree on before they may share blocks.

    The namespace digest is the sha256 of all fields, so one differing field means another
    namespace. Kept readable beside the digest, so that a person can be told which field differs.
    """

    model: str
    """Name or folder name of the model, for people; `weights` is what identifies it."""
    weights: str
    """Fingerprint of the weights and of the model's configuration as the engine runs it."""
    quantization: str
    dtype: str
    kv_dtype: str
    block_tokens: int
    layers: int
    layout: str
    """Order of the bytes inside a page: vLLM's layout name, page shape and strides."""
    shard_bytes: int
    """Bytes of one block on one rank, before alignment."""
    shards: int
    """Ranks that hold a part of each block."""
    hash_algorithm: str
    hash_seed: str
    format_version: int = FORMAT_VERSION
    checksum: str = "none"
    """One of `CHECKSUMS`: what each shard is sealed with."""

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in the KV cache; 1 where nobody can tell."""
        dtype = self.dtype if self.kv_dtype == "auto" else self.kv_dtype
        return _ELEMENT_BYTES.get(dtype.removeprefix("torch."), 1)

    @property
    def seal_bytes(self) -> int:
        """Bytes of the checksum right after a shard's bytes; 0 if there is none."""
        return CHECKSUMS[self.checksum]

    @property
    def shard_stride(self) -> int:
        """Bytes from one rank's shard, with its seal, to the next inside a slot."""
        return align_up(self.shard_bytes + self.seal_bytes, PAGE_BYTES)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: all shards, each page-aligned."""
        return self.shard_stride * self.shards

    def digest(self) -> str:
        """Return the namespace digest: 64 hex digits over every field."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(fields.encode()).hexdigest()

    def readable(self) -> str:
        """Return all fields as JSON for a person."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=2)


class Tier(StrEnum):
    """One storage medium. An upper tier is faster."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REDIS = "redis"


LOWER_TIERS = (Tier.DISK, Tier.REDIS)
"""L2, the faster first."""


class Role(StrEnum):
    """Which half of an engine a session belongs to."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class StoreOutcome(StrEnum):
    """What became of one block that an engine wanted to store."""

    COMMITTED = "committed"
    DUPLICATE = "duplicate"
    ABORTED = "aborted"
    NO_SLOT = "no_slot"
    """All slots were leased, reserved or not allocated yet; the engine may offer it again."""
    UNKNOWN_SLOT = "unknown_slot"
    QUOTA = "quota"
    """Its tenant is at a hard limit, and nothing of its own could go."""


class Fault(StrEnum):
    """Why a whole tier could not do what it was asked for."""

    FULL = "full"
    """No room: a full file system or quota, or Redis at its maxmemory. Reads may go on."""
    READ_ONLY = "read_only"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    """No connection, no such directory, or no access."""
    IO = "io"
    """Anything else that the medium said."""


class ReadOutcome(StrEnum):
    """What became of reading one block."""

    READ = "read"
    MISSING = "missing"
    CORRUPT = "corrupt"
    """Torn, altered, another block's or of an unknown version. The record has been dropped."""


class WriteMode(StrEnum):
    """When a lower tier gets its copy of a block."""

    THROUGH = "through"
    """When it is committed."""
    ON_REUSE = "on_reuse"
    """When it is used again."""
    ON_EVICT = "on_evict"
    """When it leaves the host tier for room."""


class WriteOutcome(StrEnum):
    """What became of one block that was to be written to a lower tier."""

    WRITTEN = "written"
    QUEUE_FULL = "queue_full"
    """The medium is slower than what comes: back-pressure."""
    DOWN = "down"
    """The tier is left alone after failures."""
    FULL = "full"
    FAILED = "failed"
    QUOTA = "quota"
    """Its tenant is at a hard limit, and nothing of its own could go."""


class AdmissionMode(StrEnum):
    """Which of the blocks that are offered to a lower tier it takes."""

    ALWAYS = "always"
    SECOND_HIT = "second_hit"
    """Those that two requests used."""
    LEARNED = "learned"
    """Those of classes that come to be wanted again after they left the host tier."""
    COST = "cost"
    """Those that are expected to save more time than writing them takes."""


class AdmitOutcome(StrEnum):
    """Whether a lower tier takes a block that is offered to it, or why not."""

    ADMITTED = "admitted"
    USED_ONCE = "used_once"
    UNLIKELY = "unlikely"
    """Such blocks are hardly ever wanted again."""
    TOO_DEAR = "too_dear"
    """It would save less time than writing it takes."""
    THROTTLED = "throttled"
    """The tier was to take no more bytes a second."""


class PromoteOutcome(StrEnum):
    """What became of copying one block from a lower tier to the host tier."""

    PROMOTED = "promoted"
    DUPLICATE = "duplicate"
    """An engine committed the block meanwhile."""
    LOST = "lost"
    """The tier could not give it after all."""
    NO_SLOT = "no_slot"
    DISCARDED = "discarded"
    """The namespace was reset meanwhile."""
    QUOTA = "quota"
    """Its tenant is at a hard limit, and nothing of its own could go."""


class WaitOutcome(StrEnum):
    """How a lookup ended that waited for lower tiers."""

    COMPLETE = "complete"
    SHORTER = "shorter"
    """Some blocks did not come after all."""
    OVERDUE = "overdue"
    """The time for waiting was over first."""
    ABANDONED = "abandoned"
    """The engine did not want it any more."""


class EvictReason(StrEnum):
    """Why a committed block left a tier."""

    CAPACITY = "capacity"
    SLAB_MOVE = "slab_move"
    RESET = "reset"
    UNREADABLE = "unreadable"
    """An engine found other bytes in its slot than were stored there."""
    OPERATOR = "operator"
    """An operator dropped it."""
    ENGINE = "engine"
    """An engine did not want it any more."""
    QUOTA = "quota"
    """Its tenant was above a limit of its quota."""

    @property
    def for_room(self) -> bool:
        """Whether it went for room, and may be wanted again."""
        return self in {EvictReason.CAPACITY, EvictReason.SLAB_MOVE, EvictReason.QUOTA}


class SlotState(StrEnum):
    """What a slot of the host tier is doing. Every slot is in exactly one state."""

    FREE = "free"
    COMMITTED = "committed"
    RESERVED = "reserved"
    PROMOTING = "promoting"
    """A lower tier's block is being read into it."""
    LIMBO = "limbo"
    """Promised to, or leased by, a session that was lost while its engine may still copy."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place of one block: `index`-th slot of slab `slab`. `packed` is what the wire carries."""

    slab: int
    index: int

    @property
    def packed(self) -> int:
        """Return slab and index in one integer."""
        return self.slab << SLOT_INDEX_BITS | self.index


SLOT_INDEX_BITS = 24
SLOT_INDEX_MASK = (1 << SLOT_INDEX_BITS) - 1


def unpack_slot(packed: int) -> SlotRef:
    """Return the slot that `SlotRef.packed` describes."""
    return SlotRef(packed >> SLOT_INDEX_BITS, packed & SLOT_INDEX_MASK)
