"""The header of a record: what it says, and that nothing else passes for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.codec import (
    ELEMENT_BYTES,
    HEADER_BYTES,
    Codec,
    Header,
    RecordError,
    checksum,
    expect,
    pack,
    seal,
    unpack,
    verify,
)

DIGESTS = st.binary(min_size=32, max_size=32)
SIZES = st.integers(1, 2**64 - 1)
HEADERS = st.builds(
    Header,
    namespace=DIGESTS,
    key=DIGESTS,
    parent=st.just(b"") | DIGESTS.filter(any),
    codec=st.sampled_from(Codec),
    payload_bytes=SIZES,
    stored_bytes=SIZES,
    checksum=st.binary(min_size=16, max_size=16),
    element_bytes=st.integers(0, 255),
)
NAMESPACE, KEY = b"n" * 32, b"k" * 32
SEALED = pack(seal(NAMESPACE, KEY, b"p" * 32, memoryview(b"the payload")))


@given(HEADERS, st.binary(max_size=64))
def test_a_header_is_read_back_whatever_follows_it(header, more):
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    assert unpack(raw + more) == header
    assert unpack(memoryview(raw + more)) == header


def test_no_flipped_bit_goes_unnoticed():
    for bit in range(HEADER_BYTES * 8):
        raw = bytearray(SEALED)
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            unpack(bytes(raw))


@given(HEADERS, st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(header, at, value):
    raw = bytearray(pack(header))
    raw[at] = value
    try:
        assert unpack(bytes(raw)) == header
    except RecordError:
        assert raw != pack(header)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_bytes_that_are_no_header_are_refused(raw):
    with pytest.raises(RecordError):
        unpack(raw)


@given(HEADERS, st.integers(0, HEADER_BYTES - 1))
def test_a_header_that_is_cut_short_is_refused(header, size):
    with pytest.raises(RecordError, match="cut short"):
        unpack(pack(header)[:size])


def _expected(**fields):
    sealed = {"codec": Codec.RAW, "payload_bytes": 8, "stored_bytes": 8, "checksum": bytes(16)}
    return Header(**{"namespace": NAMESPACE, "key": KEY, "parent": b"", **sealed, **fields})


def test_what_was_asked_for_is_as_expected():
    expect(_expected(), NAMESPACE, KEY, 8)
    for size in ELEMENT_BYTES:
        small = {"codec": Codec.SHUFFLE_ZSTD, "element_bytes": size, "stored_bytes": 3}
        expect(_expected(**small), NAMESPACE, KEY, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"namespace": b"m" * 32}, "another block's"),
        ({"key": b"l" * 32}, "another block's"),
        ({"payload_bytes": 9}, "a payload of 9 bytes, expected 8"),
        ({"stored_bytes": 9}, "9 stored bytes"),
        ({"stored_bytes": 0}, "0 stored bytes"),
        ({"element_bytes": 2}, "RAW with elements of 2 bytes"),
        ({"codec": Codec.SHUFFLE_ZSTD}, "SHUFFLE_ZSTD with elements of 0 bytes"),
        ({"codec": Codec.SHUFFLE_ZSTD, "element_bytes": 3}, "elements of 3 bytes"),
    ],
)
def test_another_blocks_record_is_refused(fields, message):
    with pytest.raises(RecordError, match=message):
        expect(_expected(**fields), NAMESPACE, KEY, 8)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_only_the_bytes_that_were_sealed_are_verified(stored, data):
    header = seal(NAMESPACE, KEY, b"", memoryview(stored))
    verify(header, memoryview(stored))
    for other in (stored[:-1], stored + b"\0", bytes(len(stored) + 1)):
        with pytest.raises(RecordError):
            verify(header, memoryview(other))
    flipped = bytearray(stored)
    flipped[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        verify(header, memoryview(flipped))


def test_a_seal_says_what_it_seals():
    stored = memoryview(b"stored")
    header = seal(NAMESPACE, KEY, b"p" * 32, stored, Codec.SHUFFLE_ZSTD, 4096, 2)
    assert header == Header(
        NAMESPACE, KEY, b"p" * 32, Codec.SHUFFLE_ZSTD, 4096, 6, checksum(stored), 2
    )
    assert seal(NAMESPACE, KEY, b"", stored).payload_bytes == 6
