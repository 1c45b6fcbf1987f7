"""Trace files: what is read from each format, and what is said of files that are none."""

from __future__ import annotations

import gzip
import json

import pytest
from kvtier.replay.readers import FORMATS, read_trace
from kvtier.replay.trace import TraceError

MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 40,
    "output_length": 132,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090, 1091],
}
LMCACHE = {
    "timestamp": 1764500000.5,
    "request_id": "cmpl-1",
    "model_name": "m",
    "chunk_size": 256,
    "seq_len": 600,
    "dtypes": ["torch.bfloat16"],
    "shapes": [[2, 24, 256, 512]],
    "chunk_hashes": ["0xa1", "0xb2"],
}
LINES = {"mooncake": MOONCAKE, "bailian": BAILIAN, "lmcache": LMCACHE}
TOKENS = {"mooncake": 512, "bailian": 16, "lmcache": 256}


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="trace.jsonl"):
        file = tmp_path / name
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        data = text.encode()
        file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return file

    return write


def requests(trace):
    return [list(blocks) for blocks in trace.requests()]


def test_every_format_has_an_example_here():
    assert {each.name for each in FORMATS} == {*LINES, "kvtier"}, "of kvtier: test_recording.py"


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("file", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_complete_blocks_of_each_request_are_read(write, name, file):
    trace = read_trace(write(LINES[name], "", LINES[name], name=file))
    assert trace.format == name
    assert trace.block_tokens == TOKENS[name]
    assert requests(trace) == [[0, 1], [0, 1]]
    assert (len(trace), trace.distinct, trace.accesses) == (2, 2, 4)
    tokens = LINES[name].get("input_length", LINES[name].get("seq_len"))
    assert trace.tokens == 2 * tokens
    assert len(set(trace.keys)) == 2


def test_a_trace_may_state_the_size_of_its_blocks(write):
    line = {**MOONCAKE, "block_size": 64, "input_length": 130}
    assert requests(read_trace(write(line))) == [[0, 1]]


def test_equal_tokens_after_another_prefix_are_another_block_in_the_bailian_format(write):
    other = {**BAILIAN, "hash_ids": [5, 1090, 1091]}
    assert requests(read_trace(write(BAILIAN, other, BAILIAN))) == [[0, 1], [2, 3], [0, 1]]


def test_hashes_of_different_models_are_different_blocks_in_the_lmcache_format(write):
    trace = read_trace(write(LMCACHE, {**LMCACHE, "model_name": "n"}))
    assert requests(trace) == [[0, 1], [2, 3]]


def test_prompts_shorter_than_a_block_count_with_their_tokens(write):
    trace = read_trace(write({**MOONCAKE, "input_length": 100, "hash_ids": [1]}))
    assert requests(trace) == [[]]
    assert trace.tokens == 100


@pytest.mark.parametrize("name", LINES)
def test_a_line_with_a_wrong_field_is_named(write, name):
    broken = {key: "x" if key == "timestamp" else value for key, value in LINES[name].items()}
    file = write(LINES[name], broken)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert str(caught.value).startswith(f"{file}, line 2: not a request of the {name} format: ")
    assert "timestamp" in str(caught.value)


@pytest.mark.parametrize("name", LINES)
def test_a_line_cut_short_is_named(write, name):
    file = write(LINES[name], LINES[name], json.dumps(LINES[name])[:-20])
    with pytest.raises(TraceError, match=f"line 3: not a request of the {name} format"):
        read_trace(file)


@pytest.mark.parametrize("first", LINES)
@pytest.mark.parametrize("second", LINES)
def test_files_of_two_formats_are_refused_by_both_names(write, first, second):
    file = write(LINES[first], LINES[second])
    if first == second:
        assert len(read_trace(file)) == 2
        return
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert f"line 2: a request of the {second} format" in str(caught.value)
    assert f"began as {first}" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "hello"}',
        "[1, 2]",
        "timestamp,input_length",
        "\x00\x01\x02",
        '{"hash_ids": "unfinished',
    ],
)
def test_a_foreign_file_is_refused_with_the_formats_that_there_are(write, line):
    with pytest.raises(TraceError, match=r"line 1: .* bailian, mooncake, lmcache"):
        read_trace(write(line))


def test_a_binary_file_is_refused(tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(TraceError, match="line 1: this is no trace"):
        read_trace(file)


def test_an_empty_file_is_refused(write):
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(write(""))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "trace.jsonl")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(tmp_path)


def test_a_gzip_file_cut_short_is_refused_with_the_line(write):
    file = write(*[MOONCAKE] * 2000, name="trace.jsonl.gz")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(TraceError, match=r"can't be read beyond line \d+ .*damaged"):
        read_trace(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hash_ids": [1]}, "1 blocks of 512 tokens do not make 1100 tokens"),
        ({"hash_ids": [1, 2, 3, 4]}, "4 blocks of 512 tokens do not make 1100 tokens"),
        ({"input_length": -1, "hash_ids": []}, "-1 tokens in blocks of 512"),
        ({"block_size": 0}, "1100 tokens in blocks of 0"),
        ({"block_size": 1024}, "its blocks have 1024 tokens, and those before it had 512"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(write, change, said):
    with pytest.raises(TraceError) as caught:
        read_trace(write(MOONCAKE, {**MOONCAKE, **change}))
    assert str(caught.value).endswith(f"line 2: not a request of the mooncake format: {said}.")


def test_the_reading_is_reported_byte_by_byte(write):
    told = []
    file = write(*[MOONCAKE] * 40_000)
    read_trace(file, told.append)
    assert 0 < sum(told) <= file.stat().st_size
