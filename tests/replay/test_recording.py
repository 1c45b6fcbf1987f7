"""Recordings: what a server writes of lookups is what replay reads, whatever happens to it."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.core import KEY_BYTES
from kvtier.metrics import Metrics
from kvtier.recording import HASH_BYTES, Files, Piece, Recorder
from kvtier.replay.readers import read_together, read_trace, together
from kvtier.replay.trace import TraceError
from support import chain, until

BLOCK = (16, 4096)
SPACE, OTHER = "ab" * 32, "cd" * 32


class Rig:
    """A recorder whose calls for the loop are made on the loop of the test."""

    def __init__(self, folder, capacity=1 << 20):
        self.now = 1000.0
        self.metrics = Metrics()
        loop = asyncio.get_running_loop()
        self.recorder = Recorder(
            folder,
            capacity,
            self.metrics,
            loop.call_soon_threadsafe,
            lambda: self.now,
        )

    def record(self, keys, device=0, space=SPACE):
        self.recorder.record(space, BLOCK, keys, device)
        self.now += 0.25

    def counted(self):
        counter = self.metrics.recorded_lookups
        return tuple(counter.labels(name)._value.get() for name in ("recorded", "dropped"))


def requests(trace):
    return [list(blocks) for blocks in trace.requests()]


async def recorded(folder, *chains, **options):
    rig = Rig(folder, **options)
    for keys in chains:
        rig.record(keys)
    await rig.recorder.close()
    return sorted(folder.iterdir())


async def test_what_is_recorded_is_read_again(tmp_path):
    a, b = chain("a", 6), chain("b", 2)
    (file,) = await recorded(tmp_path, a[:3], a, b, a[:2], [])
    trace = read_trace(file)
    assert requests(trace) == [
        [0, 1, 2],
        [0, 1, 2, 3, 4, 5],
        [6, 7],
        [0, 1],
        [],
    ]
    assert (trace.format, trace.block_tokens, trace.block_bytes) == ("kvtier", *BLOCK)
    assert trace.tokens == 16 * 13


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30)


@settings(max_examples=40, deadline=None)
@given(paths=PATHS)
def test_any_requests_are_read_as_they_were(paths, tmp_path_factory):
    """Each request is a path in a tree, as chained hashes are."""
    folder = tmp_path_factory.mktemp("recording")
    keys = {}
    chains = [
        [
            keys.setdefault(tuple(path[: end + 1]), len(keys).to_bytes(KEY_BYTES, "little"))
            for end in range(len(path))
        ]
        for path in paths
    ]
    files = asyncio.run(recorded(folder, *chains))
    if not paths:
        assert files == []
        return
    (file,) = files
    numbers = {}
    assert requests(read_trace(file)) == [
        [numbers.setdefault(key, len(numbers)) for key in keys] for keys in chains
    ]


async def test_a_line_has_hashes_lengths_and_times_and_nothing_else(tmp_path):
    rig = Rig(tmp_path)
    keys = chain("a", 2)
    rig.record(keys, device=1)
    rig.record(keys)
    await rig.recorder.close()
    (file,) = tmp_path.iterdir()
    head, first, second = map(json.loads, gzip.decompress(file.read_bytes()).splitlines())
    assert head == {
        "kvtier_lookups": 1,
        "namespace": SPACE[:16],
        "block_tokens": 16,
        "block_bytes": 4096,
    }
    new = b"".join(key[:HASH_BYTES] for key in keys).hex()
    assert first == {"t": 1_000_000, "device": 1, "new": new}
    assert second == {"t": 1_000_250, "device": 0, "after": 1}


async def test_a_conversation_takes_room_for_what_each_turn_adds(tmp_path):
    keys = chain("chat", 1000)
    (file,) = await recorded(tmp_path, *(keys[:end] for end in range(10, 1000, 10)))
    assert len(gzip.decompress(file.read_bytes())) < 1000 * 17 + 100 * 60


async def test_files_end_in_turn_and_stay_within_the_capacity(tmp_path):
    rig = Rig(tmp_path, capacity=80_000)
    for number in range(400):
        rig.record(chain(f"{number}", 64))
        if not number % 20:
            rig.recorder.flush()
            await asyncio.sleep(0.01)
    await rig.recorder.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert sum(file.stat().st_size for file in files) <= 80_000
    assert rig.counted() == (400, 0)
    trace = read_together(files)
    assert 0 < len(trace) < 400
    assert trace.distinct == 64 * len(trace)


async def test_each_namespace_has_files_of_its_own_and_a_folder_stands_for_all(tmp_path):
    rig = Rig(tmp_path)
    rig.record(chain("a", 3))
    rig.record(chain("b", 4), space=OTHER)
    await rig.recorder.close()
    again = Rig(tmp_path)
    again.now = 2000.0
    again.record(chain("a", 5))
    await again.recorder.close()
    traces = [read_together(files) for files in together([tmp_path])]
    assert sorted(map(requests, traces)) == [[[0, 1, 2], [0, 1, 2, 3, 4]], [[0, 1, 2, 3]]]


async def test_a_folder_without_a_recording_is_refused(tmp_path):
    with pytest.raises(TraceError, match="holds no recording: name a trace file"):
        together([tmp_path])


async def test_half_a_line_that_a_killed_server_left_is_passed_over(tmp_path):
    rig = Rig(tmp_path)
    rig.record(chain("a", 3))
    rig.recorder.flush()
    await asyncio.to_thread(until, lambda: list(tmp_path.iterdir()), "a file")
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".jsonl", "a file that goes on is not compressed"
    with file.open("ab") as out:
        out.write(b'{"t": 12, "dev')
    assert requests(read_trace(file)) == [[0, 1, 2]]
    await rig.recorder.close()


async def test_a_folder_that_can_not_be_written_costs_lookups_of_a_minute_and_is_counted(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    rig = Rig(taken)
    rig.record(chain("a", 3))
    rig.recorder.flush()
    while not rig.counted()[1]:
        await asyncio.sleep(0.01)
        rig.record(chain("a", 3))
    taken.unlink()
    rig.now += 61.0
    rig.record(chain("b", 2))
    await rig.recorder.close()
    (file,) = taken.iterdir()
    assert requests(read_trace(file)) == [[0, 1]], "a new file, that stands alone"


async def test_a_medium_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    rig = Rig(tmp_path, capacity=1 << 30)
    hangs = asyncio.Event()

    def never(self, pieces):
        asyncio.run(asyncio.wait_for(hangs.wait(), 5))

    monkeypatch.setattr(Files, "write", never)
    monkeypatch.setattr("kvtier.recording.CLOSE_SECONDS", 0.05)
    monkeypatch.setattr("kvtier.recording.UNWRITTEN_BYTES_AT_MOST", 10_000)
    for number in range(100):
        rig.record(chain(f"{number}", 64))
        rig.recorder.flush()
    recorded_lookups, dropped = rig.counted()
    assert recorded_lookups + dropped == 100
    assert dropped > 80
    await rig.recorder.close()
    hangs.set()


def test_what_a_crash_left_of_compressing_goes_with_the_oldest(tmp_path):
    (tmp_path / ".lookups-1-0001-x.jsonl.gz").write_bytes(bytes(900))
    Files(tmp_path, 1000).write([Piece("lookups-2-0001-y.jsonl", bytes(500), last=False)])
    assert [file.name for file in tmp_path.iterdir()] == ["lookups-2-0001-y.jsonl"]


HEAD = {"kvtier_lookups": 1, "namespace": "ab", "block_tokens": 16, "block_bytes": 4096}
LINE = {"t": 1, "device": 0, "new": "00" * 16}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEAD | {"kvtier_lookups": 2}], "line 1: not a file of the kvtier format: it has version"),
        ([HEAD | {"block_tokens": 0}], "line 1: not a file of the kvtier format: blocks of 0"),
        ([{"kvtier_lookups": 1}], "line 1: not a file of the kvtier format"),
        ([HEAD, LINE | {"after": 0}], "line 2: .* it continues block 0, and there are 0"),
        ([HEAD, LINE, LINE | {"after": 7}], "line 3: .* continues block 7, and there are 2"),
        ([HEAD, LINE | {"new": "00"}], "line 2: .* 1 bytes are no whole number of hashes"),
        ([HEAD, LINE | {"new": "xy"}], "line 2: not a request of the kvtier format"),
        ([HEAD, LINE | {"tokens": [1]}], "line 2: not a request of the kvtier format"),
        ([HEAD, HEAD], "line 2: not a request of the kvtier format"),
    ],
)
def test_a_damaged_recording_is_refused_with_its_line(tmp_path, lines, said):
    file = tmp_path / "lookups.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(TraceError, match=said):
        read_trace(file)
