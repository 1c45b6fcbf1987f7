"""Compressing begins and ends by what is measured, and nothing is assumed before."""

from __future__ import annotations

import queue

import pytest
from kvtier.accounts import Accounts
from kvtier.codec import Codec
from kvtier.coding import GAIN_TO_BEGIN, GAIN_TO_GO_ON, SAMPLE_EVERY, CodecMode, Coding
from kvtier.core import ReadOutcome
from kvtier.lower import LowerTier
from kvtier.lower_options import LowerOptions
from kvtier.metrics import Metrics
from kvtier.tiers.base import Space, Written
from kvtier.tiers.compression import Coded
from kvtier.tiers.disk import DiskOptions, DiskStore
from kvtier.tiers.pool import Job, Urgency
from support import chain, until

RAW, SMALL = Codec.RAW, Codec.SHUFFLE_ZSTD
SIZE = 1_000_000


def measured(decode_rate, share=0.5, decoders=1):
    """Return a choice that knows a ratio and a decode rate, of samples among raw blocks."""
    coding = Coding(CodecMode.AUTO, decoders)
    coding.encoded(SIZE, int(share * SIZE))
    coding.read(SIZE, int(share * SIZE), SIZE / decode_rate)
    for _ in range(300):
        coding.read(SIZE, SIZE, 0.0)
    return coding


def test_none_never_and_always_always_compress():
    for mode, codec in ((CodecMode.NONE, RAW), (CodecMode.ALWAYS, SMALL)):
        coding = Coding(mode, 4)
        assert {coding.choose(None) for _ in range(2 * SAMPLE_EVERY)} == {codec}


def test_what_is_not_known_is_sampled():
    coding = Coding(CodecMode.AUTO, 4)
    writes = [coding.choose(1e9) for _ in range(3 * SAMPLE_EVERY)]
    assert writes[::SAMPLE_EVERY] == [SMALL] * 3
    assert writes.count(SMALL) == 3


@pytest.mark.parametrize("known", [(), ("encoded",), ("encoded", "raw read")])
def test_nothing_is_gained_before_ratio_and_decode_rate_are_known(known):
    coding = Coding(CodecMode.AUTO, 4)
    if "encoded" in known:
        coding.encoded(SIZE, SIZE // 2)
    if "raw read" in known:
        coding.read(SIZE, SIZE, 0.0)
    assert coding.gain(1e9) is None
    assert measured(1e9).gain(None) is None


@pytest.mark.parametrize(
    ("bandwidth", "decode_rate", "decoders", "gain"),
    [
        (1e8, 1e9, 1, 1 / (0.5 + 0.1)),
        (1e9, 1e9, 1, 1 / (0.5 + 1)),
        (1e9, 1e9, 4, 1 / (0.5 + 0.25)),
        (1e8, 1e12, 1, 1 / 0.5),
    ],
)
def test_the_gain_is_raw_time_by_compressed_time(bandwidth, decode_rate, decoders, gain):
    coding = measured(decode_rate, decoders=decoders)
    assert coding.gain(bandwidth) == pytest.approx(gain, rel=1e-3)


def test_a_slow_medium_is_compressed_for_and_a_fast_one_sampled():
    coding = measured(1e9)
    writes = [coding.choose(1e8) for _ in range(SAMPLE_EVERY)]
    assert writes == [SMALL] * SAMPLE_EVERY
    assert coding.pays
    writes = [coding.choose(1e10) for _ in range(SAMPLE_EVERY)]
    assert writes.count(SMALL) == 1
    assert not coding.pays


def test_what_does_not_get_smaller_is_not_compressed_for_long():
    coding = measured(1e9)
    assert [coding.choose(1e8) for _ in range(4)] == [SMALL] * 4
    for _ in range(100):
        coding.encoded(SIZE, SIZE)
    assert [coding.choose(1e8) for _ in range(4)] == [RAW] * 4


def test_a_small_change_does_not_turn_it_over():
    coding = measured(1e9)
    near = range(10**8, 10**9, 10**7)
    between = [each for each in near if GAIN_TO_GO_ON < coding.gain(each) < GAIN_TO_BEGIN]
    assert between
    for bandwidth in between:
        coding.choose(bandwidth)
        assert not coding.pays
    coding.choose(near[0])
    for bandwidth in between:
        coding.choose(bandwidth)
        assert coding.pays
    coding.choose(10 * near[-1])
    assert not coding.pays


def test_reads_of_compressed_blocks_do_not_hide_what_the_medium_is():
    """It reads 100 MB/s; what is compressed to half comes at 1 ÷ (0.5 ÷ 100 MB/s + decoding)."""
    medium, decode_rate = 1e8, 1e9
    coding = measured(decode_rate)
    before = coding.gain(medium)
    for _ in range(300):
        coding.read(SIZE, SIZE // 2, SIZE / decode_rate)
    effective = 1 / (0.5 / medium + 1 / decode_rate)
    assert coding.gain(effective) == pytest.approx(before, rel=1e-3)


def test_a_tier_counts_what_it_codes_and_leaves_it_out_of_the_mediums_time(tmp_path):
    metrics, calls = Metrics(), queue.SimpleQueue()
    options = LowerOptions(1 << 30, codec=CodecMode.ALWAYS)
    store = DiskStore(DiskOptions(tmp_path / "store", 0))
    tier = LowerTier(store, options, metrics, lambda: 0.0, calls.put)

    def turned(done):
        while not calls.empty():
            calls.get()()
        return bool(done())

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"kvtier_{name}", {"tier": "disk", **labels})

    tier.start()
    until(lambda: turned(lambda: tier.health.up), "the tier")
    size = 1 << 20
    space = Space("ab" * 32, size, "{}", 4)
    payload = memoryview(bytearray(b"\1\2\3\4" * (size // 4)))
    ended, nobody = [], Accounts().of("")
    for key in (keys := chain("counted", 3)):
        assert tier.write(space, key, b"", payload, nobody, ended.append) is None
    until(lambda: turned(lambda: len(ended) == 3), "the writes")
    assert value("codec_raw_bytes_total") == 3 * size
    assert 0 < value("codec_stored_bytes_total") < size
    assert value("codec_seconds_total", op="encode") > 0
    assert tier.used_bytes < size
    for key in keys:
        into = memoryview(bytearray(size))
        tier.read(space, key, into, Urgency.REQUEST, ended.append)
    until(lambda: turned(lambda: len(ended) == 6), "the reads")
    assert into == payload
    assert value("codec_seconds_total", op="decode") > 0
    assert value("read_bytes_total") == 3 * size
    assert tier.measures.coding.gain(1e6) > 10, "it knows ratio and rate"
    tier.close()


def test_a_write_that_was_long_because_it_was_compressed_is_not_a_slow_medium():
    """Three slow calls would open the breaker."""
    tier = LowerTier(
        DiskStore(DiskOptions("unused", 0)), LowerOptions(1 << 30), Metrics(), lambda: 0.0, print
    )
    job = Job(Urgency.WRITE, None, print)
    job.result, job.seconds = Written(1, 0, Coded(SIZE, SIZE // 2, 4.0)), 4.5
    tier.measures.wrote(job)
    assert job.seconds == pytest.approx(0.5)
    job = Job(Urgency.REQUEST, None, print)
    job.result, job.seconds = ReadOutcome.READ, 4.5
    tier.measures.read(job, SIZE, [Coded(SIZE, SIZE // 2, 4.0)])
    assert job.seconds == pytest.approx(0.5)
