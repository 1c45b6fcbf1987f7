"""Payloads that are shuffled and compressed come back exactly, and nothing else passes for them."""

from __future__ import annotations

import random
import struct
import sys

import pytest
import zstandard
from contract import KEY, PARENT, memory, read, space_of, stored, whole
from disks import store_at
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.codec import ELEMENT_BYTES, Codec, RecordError, expect, pack, seal, unpack
from kvtier.config import load_settings
from kvtier.core import PAGE_BYTES, Manifest, ReadOutcome
from kvtier.errors import SettingsError
from kvtier.lowers import lower_tiers
from kvtier.metrics import Metrics
from kvtier.tiers.base import Space
from kvtier.tiers.compression import LEAST_SAVED, CodecMissing, Coded, Coder
from kvtier.tiers.shuffle_zstd import PLANE_BYTES
from support import manifest

DIGEST = "5a" * 32
CODER = Coder()


def floats(size: int, seed: int, element_bytes: int) -> bytes:
    """Return normally distributed numbers as bfloat16 (2) or float32 (4), or their upper bytes."""
    rng = random.Random(seed)
    count = min(size // element_bytes, 1 << 14)
    upper = slice(4 - element_bytes, 4)
    some = b"".join(struct.pack("<f", rng.gauss(0, 1))[upper] for _ in range(count))
    return (some * (size // len(some) + 1))[:size]


def content_of(kind: str, size: int, seed: int, element_bytes: int) -> bytes:
    if kind == "noise":
        return random.Random(seed).randbytes(size)
    return bytes(size) if kind == "zeros" else floats(size, seed, element_bytes)


def encoded(content: bytes, element_bytes: int):
    """Return what is stored of a content, whose slot is only read."""
    space = Space(DIGEST, len(content), "{}", element_bytes)
    slot = memory(len(content))
    slot[:] = content
    return CODER.encode(space, KEY, PARENT, slot.toreadonly(), Codec.SHUFFLE_ZSTD)


def restored(header, stored: bytes):
    """Return what a slot holds after `stored` was read to its beginning, and what was reported."""
    slot, heard = memory(header.payload_bytes), []
    slot[:] = b"\xee" * len(slot)
    slot[: len(stored)] = stored
    assert CODER.restore(header, slot, heard.append) is ReadOutcome.READ
    return bytes(slot), heard


SIZES = st.integers(1, 12) | st.sampled_from(
    [pages + more for pages in (32, 64, 128, 256) for more in (-1, 0, 1)]
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["noise", "zeros", "floats"]),
    SIZES,
    st.integers(0, 2**32),
    st.sampled_from(ELEMENT_BYTES),
)
def test_every_payload_comes_back_as_it_was(kind, pages, seed, element_bytes):
    content = content_of(kind, pages * PAGE_BYTES, seed, element_bytes)
    stored = encoded(content, element_bytes)
    header = unpack(pack(stored.header))
    expect(header, bytes.fromhex(DIGEST), KEY, len(content))
    assert header.stored_bytes == len(stored.payload)
    if kind == "noise":
        assert header.codec is Codec.RAW
    back, heard = restored(header, bytes(stored.payload))
    assert back == content
    assert len(heard) == (header.codec is not Codec.RAW)
    assert stored.coded[:2] == (len(content), len(stored.payload))


@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
def test_what_is_stored_is_as_the_formats_page_has_it(element_bytes):
    content = floats(element_bytes * (2 * PLANE_BYTES + PAGE_BYTES), 7, element_bytes)
    stored = encoded(content, element_bytes)
    assert stored.header.element_bytes == element_bytes
    piece = element_bytes * 131_072
    shuffled = b"".join(
        content[start : start + piece][byte::element_bytes]
        for start in range(0, len(content), piece)
        for byte in range(element_bytes)
    )
    assert zstandard.decompress(bytes(stored.payload)) == shuffled
    frame = zstandard.get_frame_parameters(stored.payload)
    assert (frame.content_size, frame.dict_id, frame.has_checksum) == (len(content), 0, False)


def test_shuffled_numbers_take_less_than_plain_ones():
    content = floats(1 << 20, 5, 2)
    assert len(encoded(content, 2).payload) < 0.75 * len(content)
    assert encoded(content, 1).header.stored_bytes > len(encoded(content, 2).payload)


def test_a_compressed_payload_begins_at_a_page_and_ends_in_zeros_up_to_one():
    encoded(b"\xff" * (64 * PAGE_BYTES), 1)
    stored = encoded(floats(16 * PAGE_BYTES, 3, 2), 2)
    size = len(stored.payload)
    assert size % PAGE_BYTES
    assert len(stored.padded) == -(-size // PAGE_BYTES) * PAGE_BYTES
    assert bytes(stored.padded[:size]) == bytes(stored.payload)
    assert not any(stored.padded[size:])
    assert CODER._thread()._frame.obj is stored.padded.obj, "a mapping, which begins at a page"


def test_a_payload_that_gets_hardly_smaller_is_stored_raw():
    size = 64 * PAGE_BYTES
    for share, codec in ((0.02, Codec.RAW), (0.2, Codec.SHUFFLE_ZSTD)):
        zeros = int(size * share)
        content = bytes(zeros) + random.Random(1).randbytes(size - zeros)
        stored = encoded(content, 1)
        assert stored.header.codec is codec
        assert restored(stored.header, bytes(stored.payload))[0] == content
        assert len(stored.payload) <= size - (size // LEAST_SAVED if codec else 0)


def test_payloads_that_are_no_whole_elements_are_stored_raw():
    stored = encoded(bytes(4099), 2)
    assert stored.header.codec is Codec.RAW
    assert stored.coded == Coded()


def test_raw_is_raw():
    space = Space(DIGEST, PAGE_BYTES, "{}", 2)
    slot = memory(PAGE_BYTES)
    stored = CODER.encode(space, KEY, PARENT, slot, Codec.RAW)
    assert stored == (seal(space.raw, KEY, PARENT, slot), slot, slot, Coded())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bits_never_come_back_as_a_payload(data):
    stored = encoded(floats(4 * PAGE_BYTES, 9, 2), 2)
    changed = bytearray(stored.payload)
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError, match="checksum"):
        restored(stored.header, bytes(changed))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_frame_with_a_right_checksum_fills_no_other_memory(data):
    """A writer that is mistaken, or wants harm: the checksum is right, the frame is not."""
    content = floats(4 * PAGE_BYTES, 9, 2)
    changed = bytearray(encoded(content, 2).payload)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    header = seal(bytes(32), KEY, PARENT, memoryview(changed), Codec.SHUFFLE_ZSTD, len(content), 2)
    try:
        back, _ = restored(header, bytes(changed))
    except RecordError:
        return
    assert len(back) == len(content)


FRAMES = {
    "rubbish": b"rubbish" * 100,
    "the beginning of a frame": zstandard.compress(bytes(PAGE_BYTES))[:9],
    "a smaller payload": zstandard.compress(bytes(PAGE_BYTES - 1)),
    "a larger payload": zstandard.compress(bytes(PAGE_BYTES + 1)),
    "a much larger payload": zstandard.compress(bytes(16 << 20)),
    "a size of 2^62 that it claims": b"\x28\xb5\x2f\xfd\xe0"
    + struct.pack("<Q", 1 << 62)
    + bytes(9),
    "a size that it does not tell": zstandard.ZstdCompressor(write_content_size=False).compress(
        bytes(PAGE_BYTES)
    ),
    "two frames": 2 * zstandard.compress(bytes(PAGE_BYTES)),
    "something behind the frame": zstandard.compress(bytes(PAGE_BYTES)) + b"more",
    "a size that is not its own": b"\x28\xb5\x2f\xfd\x60\x00\x0f\x01\x00\x00",
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_of_anything_else_is_refused(what):
    frame = FRAMES[what]
    header = seal(bytes(32), KEY, PARENT, memoryview(frame), Codec.SHUFFLE_ZSTD, PAGE_BYTES, 2)
    slot = memory(1 << 16)
    slot[: len(frame)] = frame
    with pytest.raises(RecordError):
        CODER._thread().decompress(slot[: len(frame)], slot[:PAGE_BYTES], 2)
    if len(frame) <= PAGE_BYTES:
        with pytest.raises(RecordError):
            restored(header, frame)


def test_coding_goes_on_after_payloads_that_did_not_compress_and_frames_that_were_none():
    content = floats(16 * PAGE_BYTES, 4, 2)
    for _ in range(3):
        assert encoded(random.Random(2).randbytes(16 * PAGE_BYTES), 2).header.codec is Codec.RAW
        with pytest.raises(RecordError):
            CODER._thread().decompress(memoryview(b"none"), memory(PAGE_BYTES), 2)
        stored = encoded(content, 2)
        assert restored(stored.header, bytes(stored.payload))[0] == content


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"dtype": "torch.bfloat16"}, 2),
        ({"dtype": "float16"}, 2),
        ({"dtype": "torch.float32"}, 4),
        ({"dtype": "torch.bfloat16", "kv_dtype": "fp8_e4m3"}, 1),
        ({"dtype": "torch.float32", "kv_dtype": "bfloat16"}, 2),
        ({"dtype": "something new"}, 1),
    ],
)
def test_the_size_of_an_element_is_that_of_the_kv_caches_numbers(fields, size):
    made: Manifest = manifest(**fields)
    assert made.element_bytes == size


# Without the extra.


@pytest.fixture
def without(monkeypatch):
    """Take a module away as if it were not installed."""

    def take(name="zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "kvtier.tiers.shuffle_zstd", raising=False)

    return take


@pytest.fixture
def settings_with(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_HOST__CAPACITY", "16MiB")

    def made(**more):
        return load_settings(None, {"disk.path": str(tmp_path / "store"), **more})

    return made


def tiers(settings):
    return lower_tiers(settings, Metrics(), lambda call: None)


@pytest.mark.parametrize("module", ["zstandard", "numpy"])
def test_always_does_not_start_without_what_it_needs(without, settings_with, module):
    without(module)
    with pytest.raises(SettingsError) as caught:
        tiers(settings_with(**{"disk.codec": "always"}))
    said = str(caught.value)
    assert said.startswith("disk.codec is always, but")
    assert module in said
    assert "pip install 'kvtier[compression]'" in said
    assert said.endswith(".")


def test_auto_compresses_nothing_without_what_it_needs_and_says_so_once(
    without, settings_with, caplog
):
    without()
    made = settings_with(**{"disk.codec": "auto", "redis.url": "redis://127.0.0.1:1"})
    disk, redis = tiers(made)
    assert disk.measures.coding.mode == redis.measures.coding.mode == "none"
    (record,) = caplog.records
    assert "disk.codec is auto" in record.getMessage()
    assert "pip install 'kvtier[compression]'" in record.getMessage()


def test_a_tier_that_is_not_there_needs_nothing(without, settings_with):
    without()
    assert len(tiers(settings_with(**{"redis.codec": "always"}))) == 1


def test_with_what_it_needs_the_setting_is_what_was_set(settings_with):
    for mode in ("none", "always", "auto"):
        (disk,) = tiers(settings_with(**{"disk.codec": mode}))
        assert disk.measures.coding.mode == mode


def test_records_that_cannot_be_decompressed_here_are_missing_and_stay(
    path, without, caplog, monkeypatch
):
    space = space_of(64 * PAGE_BYTES)
    written = store_at(path)
    slot = memory(space.payload_bytes)
    slot[:] = whole(space, KEY)
    written.write(space, KEY, PARENT, slot, Codec.SHUFFLE_ZSTD)
    stored(written, space, PARENT)
    without()
    other = store_at(path)
    for _ in range(3):
        assert read(other, space, KEY) is ReadOutcome.MISSING
    assert read(other, space, PARENT) == whole(space, PARENT)
    (record,) = caplog.records
    assert "pip install 'kvtier[compression]'" in record.getMessage()
    with pytest.raises(CodecMissing):
        other.write(space, KEY, PARENT, slot, Codec.SHUFFLE_ZSTD)
    monkeypatch.undo()
    assert read(store_at(path), space, KEY) == whole(space, KEY)
