"""The record: one block as a lower tier keeps it, describing and proving itself.

A header says what the payload is and what its checksum must be; the header has a checksum of its
own. `docs/formats.md` has it byte by byte. A record that does not match is never used: it is
corrupt, or of a version that this build does not read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import xxhash

from .core import KEY_BYTES, PAGE_BYTES, BlockKey
from .errors import KVTierError

MAGIC = b"kvtier\r\n"
"""Does not survive a copy that changes line ends."""
RECORD_VERSION = 1
HEADER_BYTES = 152
"""Bytes of a header that mean something."""
HEADER_PAGE_BYTES = PAGE_BYTES
"""Bytes of a header in a file: the payload after it starts at a multiple of a page."""
ELEMENT_BYTES = (1, 2, 4)
"""Sizes of elements that a payload may be shuffled by."""

_FIELDS = struct.Struct("<8sHBBIQQ32s32s32s16s")
_OWN_BYTES = 8
"""Of the header's own checksum, behind the fields."""
assert _FIELDS.size + _OWN_BYTES == HEADER_BYTES, "the layout that the formats page has"
_NO_KEY = bytes(KEY_BYTES)


class RecordError(KVTierError):
    """A record is corrupt, another block's, or of a version that this build does not read."""


class Codec(IntEnum):
    """How a payload is stored. The number stands in the header."""

    RAW = 0
    SHUFFLE_ZSTD = 1


_CODECS = {int(each): each for each in Codec}


class Header(NamedTuple):
    """What a record says of itself. `namespace` is the digest's 32 bytes."""

    namespace: bytes
    key: BlockKey
    parent: BlockKey
    """Empty at the head of a chain."""
    codec: Codec
    payload_bytes: int
    """Bytes of the block: those of a slot."""
    stored_bytes: int
    """Bytes of the payload as it is stored, without padding."""
    checksum: bytes
    """xxh3-128 of the stored bytes."""
    element_bytes: int = 0
    """What a payload was shuffled by; 0 if it is stored raw."""


def checksum(stored: memoryview) -> bytes:
    """Return the 16 bytes that a header holds for a stored payload."""
    return xxhash.xxh3_128_digest(stored)


def seal(
    namespace: bytes,
    key: BlockKey,
    parent: BlockKey,
    stored: memoryview,
    codec: Codec = Codec.RAW,
    payload_bytes: int | None = None,
    element_bytes: int = 0,
) -> Header:
    """Return the header of a payload as it is stored."""
    size = len(stored) if payload_bytes is None else payload_bytes
    own = checksum(stored)
    return Header(namespace, key, parent, codec, size, len(stored), own, element_bytes)


def pack(header: Header) -> bytes:
    """Return the `HEADER_BYTES` of a header."""
    body = _FIELDS.pack(
        MAGIC,
        RECORD_VERSION,
        header.codec,
        header.element_bytes,
        HEADER_BYTES,
        header.payload_bytes,
        header.stored_bytes,
        header.namespace,
        header.key,
        header.parent or _NO_KEY,
        header.checksum,
    )
    return body + xxhash.xxh3_64_digest(body)


def unpack(page: bytes | memoryview) -> Header:
    """Return the header at the beginning of `page`. Raises RecordError."""
    raw = bytes(page[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        raise RecordError(f"a header of {len(raw)} bytes is cut short")
    magic, version, codec, element_bytes, size, payload_bytes, stored_bytes, *rest = (
        _FIELDS.unpack_from(raw)
    )
    namespace, key, parent, payload_checksum = rest
    if magic != MAGIC:
        raise RecordError("this is no record of kvtier")
    if version != RECORD_VERSION:
        raise RecordError(
            f"the record has version {version}, and this build reads {RECORD_VERSION}"
        )
    if size != HEADER_BYTES or raw[_FIELDS.size :] != xxhash.xxh3_64_digest(raw[: _FIELDS.size]):
        raise RecordError("the header's own checksum does not match")
    if codec not in _CODECS:
        raise RecordError(f"this build knows no codec {codec}")
    above = b"" if parent == _NO_KEY else parent
    return Header(
        namespace,
        key,
        above,
        _CODECS[codec],
        payload_bytes,
        stored_bytes,
        payload_checksum,
        element_bytes,
    )


def expect(header: Header, namespace: bytes, key: BlockKey, payload_bytes: int) -> None:
    """Raise RecordError unless the header is this block's, of this size."""
    if header.namespace != namespace or header.key != key:
        raise RecordError("the record is another block's")
    if header.payload_bytes != payload_bytes:
        raise RecordError(f"a payload of {header.payload_bytes} bytes, expected {payload_bytes}")
    raw = header.codec is Codec.RAW
    if header.element_bytes not in ((0,) if raw else ELEMENT_BYTES):
        raise RecordError(f"{header.codec.name} with elements of {header.element_bytes} bytes")
    least = payload_bytes if raw else 1
    if not least <= header.stored_bytes <= payload_bytes:
        raise RecordError(f"{header.stored_bytes} stored bytes for a payload of {payload_bytes}")


def verify(header: Header, stored: memoryview) -> None:
    """Raise RecordError unless these are the bytes that the header was made for."""
    if len(stored) != header.stored_bytes or checksum(stored) != header.checksum:
        raise RecordError("the payload's checksum does not match")
