"""Frames out of a byte stream, and keys out of a frame."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given
from kvtier import protocol as wire
from kvtier.core import KEY_BYTES
from kvtier.errors import ProtocolError
from support import chain

BODIES = st.lists(st.binary(max_size=40), max_size=8)


@given(bodies=BODIES, cuts=st.lists(st.integers(0, 200)), rest=st.binary(max_size=3))
def test_frames_are_the_same_however_the_stream_is_cut(bodies, cuts, rest):
    """The buffer that the bytes came in is used again at once, as server and client do."""
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies) + rest
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, buffer, found = wire.FrameReader(), bytearray(len(stream) + 1), []
    for start, end in itertools.pairwise(edges):
        buffer[: end - start] = stream[start:end]
        found += [bytes(body) for body in reader.feed(memoryview(buffer)[: end - start])]
        buffer[:] = bytes(len(buffer))
    assert found == bodies


@pytest.mark.parametrize("blocks", [0, 1, 63, 64, 65, 640])
def test_keys_are_cut_where_they_begin(blocks):
    keys = chain("any", blocks)
    assert wire.split_keys(b"".join(keys)) == keys


@pytest.mark.parametrize("size", [1, KEY_BYTES - 1, 64 * KEY_BYTES + 1])
def test_a_key_cut_short_is_refused(size):
    with pytest.raises(ProtocolError, match=f"{size} bytes"):
        wire.split_keys(bytes(size))


def test_a_chain_that_is_too_long_is_refused():
    with pytest.raises(ProtocolError, match="not a chain"):
        wire.split_keys(bytes((wire.MAX_CHAIN_BLOCKS + 1) * KEY_BYTES))
