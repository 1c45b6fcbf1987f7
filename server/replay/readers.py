"""Reads trace files: JSON lines, plain or gzipped, in any of the formats registered in `FORMATS`.

A file is of one format, which its first line tells. Whatever does not fit ends the reading with a
sentence that names the file, the line and the format.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from .trace import Trace, TraceError

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
LINE_BYTES_AT_MOST = 64 << 20
GZIP_MAGIC = b"\x1f\x8b"
BYTES_BETWEEN_REPORTS = 1 << 20

Advance = Callable[[int], None]
"""Is told how many more bytes of the file have been read."""


class MooncakeLine(msgspec.Struct):
    """One request of Mooncake's traces: equal ids are equal prefixes."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int = MOONCAKE_BLOCK_TOKENS
    """Not in Mooncake's own files, whose blocks have 512 tokens."""


class BailianLine(msgspec.Struct):
    """One request of the Qwen-Bailian traces: an id tells a block's own tokens, not its prefix."""

    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    type: str
    turn: int
    hash_ids: list[int]


class LMCacheLine(msgspec.Struct):
    """One lookup of LMCache's hash logs: equal hashes are equal prefixes."""

    timestamp: float
    request_id: str
    model_name: str
    chunk_size: int
    seq_len: int
    chunk_hashes: list[int | str]


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a line says: blocks that tell their whole prefix, and the prompt's length."""

    blocks: Sequence[Hashable]
    tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Format:
    """One format: the fields that only its lines have, and how one is understood.

    `parse` raises msgspec.DecodeError for a line of another kind.
    """

    name: str
    marks: frozenset[str]
    parse: Callable[[bytes], Parsed]


_decode_mooncake = msgspec.json.Decoder(MooncakeLine).decode
_decode_bailian = msgspec.json.Decoder(BailianLine).decode
_decode_lmcache = msgspec.json.Decoder(LMCacheLine).decode


def _mooncake(text: bytes) -> Parsed:
    line = _decode_mooncake(text)
    return Parsed(line.hash_ids, line.input_length, line.block_size)


def _bailian(text: bytes) -> Parsed:
    line = _decode_bailian(text)
    # Chained here, since the same tokens after another prefix are another block.
    blocks: list[Hashable] = []
    prefix = 0
    for own in line.hash_ids:
        prefix = hash((prefix, own))
        blocks.append(prefix)
    return Parsed(blocks, line.input_length, BAILIAN_BLOCK_TOKENS)


def _lmcache(text: bytes) -> Parsed:
    line = _decode_lmcache(text)
    blocks = [f"{line.model_name}/{each}" for each in line.chunk_hashes]
    return Parsed(blocks, line.seq_len, line.chunk_size)


FORMATS = (
    Format("bailian", frozenset({"hash_ids", "chat_id"}), _bailian),
    Format("mooncake", frozenset({"hash_ids", "input_length"}), _mooncake),
    Format("lmcache", frozenset({"chunk_hashes"}), _lmcache),
)
"""Formats that can be read; of those whose marks a line has, the first one counts."""


def read_trace(file: Path, advance: Advance | None = None) -> Trace:
    """Return the requests of a trace file. Blocks. Raises TraceError."""
    lines = _numbered_lines(file, advance)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{file} holds no request: name a trace with one JSON object a line.")
    shape = _format_of(first[1])
    if shape is None:
        raise TraceError(
            f"{file}, line {first[0]}: this is no trace that kvtier reads; the formats are "
            f"{_names()}, one JSON object a line."
        )
    trace = Trace(file, shape.name, 0)
    for number, line in chain([first], lines):
        _add(trace, shape, number, line)
    trace.finish()
    return trace


def _add(trace: Trace, shape: Format, number: int, line: bytes) -> None:
    where = f"{trace.file}, line {number}"
    try:
        parsed = shape.parse(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(_misfit(where, shape, line, str(error))) from None
    if shape.name == "mooncake" and b'"chat_id"' in line:
        raise TraceError(_misfit(where, shape, line, "it has a chat_id"))
    if not trace.block_tokens:
        trace.block_tokens = parsed.block_tokens
    what = _contradiction(parsed, trace.block_tokens)
    if what is not None:
        raise TraceError(f"{where}: not a request of the {shape.name} format: {what}.")
    trace.add(parsed.blocks[: parsed.tokens // parsed.block_tokens], parsed.tokens)


def _contradiction(parsed: Parsed, block_tokens: int) -> str | None:
    """Return what is wrong with a line whose fields are each of the right type, if anything."""
    if parsed.block_tokens < 1 or parsed.tokens < 0:
        return f"{parsed.tokens} tokens in blocks of {parsed.block_tokens}"
    if parsed.block_tokens != block_tokens:
        return (
            f"its blocks have {parsed.block_tokens} tokens, and those before it had {block_tokens}"
        )
    complete, rest = divmod(parsed.tokens, block_tokens)
    if not complete <= len(parsed.blocks) <= complete + (rest > 0):
        return (
            f"{len(parsed.blocks)} blocks of {block_tokens} tokens do not make "
            f"{parsed.tokens} tokens"
        )
    return None


def _misfit(where: str, shape: Format, line: bytes, error: str) -> str:
    other = _format_of(line)
    if other is not None and other is not shape:
        return (
            f"{where}: a request of the {other.name} format in a file that began as "
            f"{shape.name}: split the file by format."
        )
    return f"{where}: not a request of the {shape.name} format: {error}."


def _format_of(line: bytes) -> Format | None:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((each for each in FORMATS if each.marks <= fields.keys()), None)


def _names() -> str:
    return ", ".join(each.name for each in FORMATS)


def _numbered_lines(file: Path, advance: Advance | None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1."""
    number = 0
    try:
        with file.open("rb") as raw:
            zipped = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if zipped else raw
            told = 0
            while line := stream.readline(LINE_BYTES_AT_MOST):
                number += 1
                if len(line) == LINE_BYTES_AT_MOST:
                    raise TraceError(f"{file}, line {number}: longer than any request can be.")
                if line.strip():
                    yield number, line
                if advance is not None and (now := raw.tell()) - told > BYTES_BETWEEN_REPORTS:
                    advance(now - told)
                    told = now
    except FileNotFoundError:
        raise TraceError(f"The trace {file} does not exist: check its name.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(
            f"{file} can't be read beyond line {number} ({error}): the file is damaged or not a "
            f"trace."
        ) from None
