"""Reads trace files: JSON lines, plain or gzipped, in any of the formats registered in `FORMATS`.

A file is of one format, which its first line tells. Whatever does not fit ends the reading with a
sentence that names the file, the line and the format.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from ..recording import HASH_BYTES, VERSION
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
    session: int | None = None
    """Not there either."""


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


class RecordedHead(msgspec.Struct):
    """The first line of a file that a kvtier server recorded; see `docs/formats.md`."""

    kvtier_lookups: int
    namespace: str
    block_tokens: int
    block_bytes: int


class RecordedLine(msgspec.Struct, forbid_unknown_fields=True):
    """One lookup of such a file. `after` is the number of the last block that the file knows."""

    t: int
    device: int
    after: int | None = None
    new: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a line says: blocks that tell their whole prefix, and the prompt's length."""

    blocks: Sequence[Hashable]
    tokens: int
    block_tokens: int
    seconds: float
    """When it came, by the trace's own clock."""
    output_tokens: int | None = None
    """Of its answer, where the trace tells."""
    session: Hashable = None
    """The conversation that it belongs to, where the trace tells."""


Parser = Callable[[bytes], Parsed]
"""Understands the lines of one file, in order.

Raises msgspec.DecodeError or ValueError for a line of another kind.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """One format: the fields that only its first lines have, and what begins to read a file.

    `begin` is given the first line, and says of it what it tells of the whole file.
    """

    name: str
    marks: frozenset[str]
    begin: Callable[[bytes], tuple[Parser, RecordedHead | None]]


_decode_mooncake = msgspec.json.Decoder(MooncakeLine).decode
_decode_bailian = msgspec.json.Decoder(BailianLine).decode
_decode_lmcache = msgspec.json.Decoder(LMCacheLine).decode
_decode_head = msgspec.json.Decoder(RecordedHead).decode
_decode_recorded = msgspec.json.Decoder(RecordedLine).decode


def _mooncake(text: bytes) -> Parsed:
    line = _decode_mooncake(text)
    return Parsed(
        line.hash_ids,
        line.input_length,
        line.block_size,
        line.timestamp / 1000,
        line.output_length,
        line.session,
    )


def _bailian(text: bytes) -> Parsed:
    line = _decode_bailian(text)
    # Chained here, since the same tokens after another prefix are another block.
    blocks: list[Hashable] = []
    prefix = 0
    for own in line.hash_ids:
        prefix = hash((prefix, own))
        blocks.append(prefix)
    return Parsed(
        blocks, line.input_length, BAILIAN_BLOCK_TOKENS, line.timestamp, line.output_length
    )


def _lmcache(text: bytes) -> Parsed:
    line = _decode_lmcache(text)
    blocks = [f"{line.model_name}/{each}" for each in line.chunk_hashes]
    return Parsed(blocks, line.seq_len, line.chunk_size, line.timestamp)


class _Recording:
    """The lines of a recording: each names the block that it continues by its number."""

    def __init__(self, head: RecordedHead) -> None:
        self._block_tokens = head.block_tokens
        self._hashes: list[int] = []
        self._parents: list[int] = []

    def line(self, text: bytes) -> Parsed:
        line = _decode_recorded(text)
        at = -1 if line.after is None else line.after
        if not -1 <= at < len(self._hashes):
            raise ValueError(f"it continues block {at}, and there are {len(self._hashes)} so far")
        raw = bytes.fromhex(line.new)
        if len(raw) % HASH_BYTES:
            raise ValueError(f"{len(raw)} bytes are no whole number of hashes")
        for begin in range(0, len(raw), HASH_BYTES):
            self._hashes.append(int.from_bytes(raw[begin : begin + HASH_BYTES]))
            self._parents.append(at)
            at = len(self._hashes) - 1
        blocks: list[int] = []
        while at >= 0:
            blocks.append(self._hashes[at])
            at = self._parents[at]
        blocks.reverse()
        tokens = len(blocks) * self._block_tokens
        return Parsed(blocks, tokens, self._block_tokens, line.t / 1000)


def _stateless(parse: Parser) -> Callable[[bytes], tuple[Parser, None]]:
    return lambda _: (parse, None)


def _recorded(first: bytes) -> tuple[Parser, RecordedHead]:
    head = _decode_head(first)
    if head.kvtier_lookups != VERSION:
        raise ValueError(f"it has version {head.kvtier_lookups}, and this build reads {VERSION}")
    if head.block_tokens < 1 or head.block_bytes < 1:
        raise ValueError(f"blocks of {head.block_tokens} tokens and {head.block_bytes} bytes")
    return _Recording(head).line, head


RECORDED = Format("kvtier", frozenset({"kvtier_lookups"}), _recorded)
FORMATS = (
    RECORDED,
    Format("bailian", frozenset({"hash_ids", "chat_id"}), _stateless(_bailian)),
    Format("mooncake", frozenset({"hash_ids", "input_length"}), _stateless(_mooncake)),
    Format("lmcache", frozenset({"chunk_hashes"}), _stateless(_lmcache)),
)
"""Formats that can be read; of those whose marks a line has, the first one counts."""


def read_trace(file: Path, advance: Advance | None = None) -> Trace:
    """Return the requests of one trace file. Blocks. Raises TraceError."""
    trace = Trace(file)
    _read(trace, file, advance)
    trace.finish()
    return trace


def read_together(files: Sequence[Path], advance: Advance | None = None) -> Trace:
    """Return the requests of recordings of one namespace, in the order given, as one trace.

    Blocks. Raises TraceError.
    """
    trace = Trace(files[0])
    for file in files:
        _read(trace, file, advance)
    trace.finish()
    return trace


def read_requests(file: Path) -> Iterator[Parsed]:
    """Yield the requests of one trace file, as it tells them. Blocks. Raises TraceError."""
    shape, _, lines = _opened(file, None)
    block_tokens = 0
    for where, parsed in lines:
        block_tokens = block_tokens or parsed.block_tokens
        _check_sizes(where, shape, parsed, block_tokens)
        yield parsed


def together(files: Sequence[Path]) -> list[list[Path]]:
    """Return which files are read as one trace: those that servers recorded of one namespace.

    A folder stands for the recordings in it. Blocks. Raises TraceError.
    """
    groups: dict[str | int, list[Path]] = {}
    for number, file in enumerate(_expanded(files)):
        head = _head(file)
        groups.setdefault(number if head is None else head.namespace, []).append(file)
    return list(groups.values())


def _expanded(files: Sequence[Path]) -> Iterator[Path]:
    for file in files:
        if not file.is_dir():
            yield file
            continue
        recorded = sorted(file.glob("lookups-*.jsonl*"))
        if not recorded:
            raise TraceError(f"The folder {file} holds no recording: name a trace file.")
        yield from recorded


def _head(file: Path) -> RecordedHead | None:
    """Return what a recording says of itself; None for a trace of another format."""
    first = next(_numbered_lines(file, None), None)
    if first is None or _format_of(first[1]) is not RECORDED:
        return None
    return _begin(file, RECORDED, *first)[1]


def _read(trace: Trace, file: Path, advance: Advance | None) -> None:
    shape, head, lines = _opened(file, advance)
    trace.format = shape.name
    if head is not None:
        trace.block_bytes = head.block_bytes
    for where, parsed in lines:
        if not trace.block_tokens:
            trace.block_tokens = parsed.block_tokens
        _check_sizes(where, shape, parsed, trace.block_tokens)
        trace.add(parsed.blocks[: parsed.tokens // parsed.block_tokens], parsed.tokens)


Lines = Iterator[tuple[str, Parsed]]
"""Where each request stands, for a sentence, and the request."""


def _opened(file: Path, advance: Advance | None) -> tuple[Format, RecordedHead | None, Lines]:
    lines = _numbered_lines(file, advance)
    if (first := next(lines, None)) is None:
        raise TraceError(f"{file} holds no request: name a trace with one JSON object a line.")
    shape = _format_of(first[1])
    if shape is None:
        raise TraceError(
            f"{file}, line {first[0]}: this is no trace that kvtier reads; the formats are "
            f"{_names()}, one JSON object a line."
        )
    parse, head = _begin(file, shape, *first)
    rest = lines if head is not None else chain([first], lines)
    return shape, head, _parsed(file, shape, parse, rest)


def _parsed(file: Path, shape: Format, parse: Parser, lines: Iterable[tuple[int, bytes]]) -> Lines:
    for number, line in lines:
        if shape is RECORDED and not line.endswith(b"\n"):
            return  # A server that was killed left half a line.
        where = f"{file}, line {number}"
        yield where, _parse(where, shape, parse, line)


def _begin(
    file: Path, shape: Format, number: int, first: bytes
) -> tuple[Parser, RecordedHead | None]:
    try:
        return shape.begin(first)
    except (msgspec.DecodeError, ValueError) as error:
        where = f"{file}, line {number}"
        raise TraceError(f"{where}: not a file of the {shape.name} format: {error}.") from None


def _parse(where: str, shape: Format, parse: Parser, line: bytes) -> Parsed:
    try:
        parsed = parse(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(_misfit(where, shape, line, str(error))) from None
    if shape.name == "mooncake" and b'"chat_id"' in line:
        raise TraceError(_misfit(where, shape, line, "it has a chat_id"))
    return parsed


def _check_sizes(where: str, shape: Format, parsed: Parsed, block_tokens: int) -> None:
    if (what := _contradiction(parsed, block_tokens)) is not None:
        raise TraceError(f"{where}: not a request of the {shape.name} format: {what}.")


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
