"""Replays the shapes of recorded requests: which prefixes they share, when they came, how long.

A trace has no tokens. Each of its blocks becomes a piece of its own of `block` tokens, so that
equal prefixes are equal prompts; with fewer tokens than the trace's blocks have, long prompts fit a
small model. What is longer than the model loses its end. A few minutes of a trace repeat little of
what was said before; with only some of its conversations, but these as a whole, as many requests
repeat as much as the whole trace does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from kvtier.replay.readers import Parsed, read_requests
from kvtier.replay.trace import TraceError

from .requests import Request, TrafficError, Workload
from .texts import Writer

COMMON_SHARE = 0.05
"""A block that more of all requests begin with is no conversation's own: a system prompt."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which requests of a trace, and how they are scaled."""

    requests: int = 100
    first: int = 0
    """Requests that are passed over before them."""
    conversations: float = 1.0
    """Share of the trace's conversations that are kept; the others are left out as a whole."""
    block: int = 64
    """Tokens that stand for one of the trace's blocks."""
    output: int = 16
    """Tokens of an answer at most; shorter ones stay as long as they were, scaled."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The shape of one request of a window, scaled."""

    seconds: float
    """Since the window's first request."""
    blocks: tuple[str, ...]
    """Names of its blocks of `Window.block` tokens, and of its rest: equal names, equal tokens."""
    rest: int
    """Tokens of the last of them."""
    tokens: int
    """Of all, as far as the model takes them."""
    output: int


def replay(writer: Writer, file: Path, model_tokens: int, window: Window) -> Workload:
    """Return a window of a trace, for a model of so many tokens. Blocks.

    Raises TrafficError if the file is no trace, ends before the window, or does not fit.
    """
    chosen = _chosen(file, writer.seed, window)
    name = file.name.partition(".")[0]
    about = f"What {name} asked, {len(chosen)} requests after the first {window.first}, scaled."
    requests = tuple(_requests(writer, chosen, model_tokens, window))
    parameters = {"trace": file.name, **asdict(window)}
    made = Workload(f"replay {name}", about, writer.seed, requests, parameters)
    return made.check(model_tokens)


def shapes(file: Path, seed: int, model_tokens: int, window: Window) -> list[Timed]:
    """Return the shapes of the same requests, for another load generator. As `replay` otherwise."""
    return list(_shapes(_chosen(file, seed, window), model_tokens, window))


def _chosen(file: Path, seed: int, window: Window) -> list[tuple[int, Parsed]]:
    """Return a window's requests with their numbers in the trace. Raises TrafficError."""
    if min(window.requests, window.block, window.output) < 1 or window.first < 0:
        raise TrafficError("A window has requests, blocks and answers of 1 at least.")
    if not 0 < window.conversations <= 1:
        raise TrafficError(f"{window.conversations:g} is no share of conversations: it is 0 to 1.")
    try:
        lines = list(read_requests(file))
    except TraceError as error:
        raise TrafficError(str(error)) from None
    kept = islice(_kept(lines, seed, window), window.first, window.first + window.requests)
    chosen = list(kept)
    if not chosen:
        raise TrafficError(f"{file} has no request after the first {window.first}.")
    return chosen


def _kept(lines: Sequence[Parsed], seed: int, window: Window) -> Iterator[tuple[int, Parsed]]:
    """Yield the requests of the conversations that are kept, with their numbers in the trace.

    Requests are of one conversation if the first block that few others begin with is the same.
    """
    uses = Counter(block for each in lines for block in _complete(each))
    common = COMMON_SHARE * len(lines)
    for number, each in enumerate(lines):
        own = [block for block in _complete(each) if uses[block] <= common]
        conversation = each.session if each.session is not None else (own or [f"alone {number}"])[0]
        drawn = random.Random(f"{seed}/{conversation}").random()
        if drawn < window.conversations:
            yield number, each


def _requests(
    writer: Writer, chosen: Sequence[tuple[int, Parsed]], model_tokens: int, window: Window
) -> Iterator[Request]:
    latest: dict[Hashable, str] = {}
    for (number, each), shape in zip(chosen, _shapes(chosen, model_tokens, window), strict=True):
        name = f"request {number}"
        prompt = _prompt(writer, shape, window.block)
        after = latest.get(each.session)
        if each.session is not None:
            latest[each.session] = name
        yield Request(name, prompt, shape.output, shape.seconds, after)


def _prompt(writer: Writer, shape: Timed, block: int) -> tuple[int, ...]:
    *complete, rest = shape.blocks
    pieces = [*(writer.write(each, block) for each in complete), writer.write(rest, shape.rest)]
    return tuple(token for piece in pieces for token in piece)[: shape.tokens]


def _shapes(
    chosen: Sequence[tuple[int, Parsed]], model_tokens: int, window: Window
) -> Iterator[Timed]:
    """Yield each request's shape: complete blocks, and a rest of its own of one token at least."""
    began = chosen[0][1].seconds
    for number, each in chosen:
        output = _output(each, window)
        complete = [f"block {one}" for one in _complete(each)]
        behind: int = each.tokens % each.block_tokens
        rest = max(behind * window.block // each.block_tokens, 1)
        tokens = min(len(complete) * window.block + rest, model_tokens - output)
        names = (*complete, f"rest of request {number}")
        yield Timed(max(each.seconds - began, 0.0), names, rest, tokens, output)


def _complete(parsed: Parsed) -> Sequence[Hashable]:
    complete: Sequence[Hashable] = parsed.blocks[: parsed.tokens // parsed.block_tokens]
    return complete


def _output(parsed: Parsed, window: Window) -> int:
    if parsed.output_tokens is None:
        return window.output
    scaled: int = parsed.output_tokens * window.block // parsed.block_tokens
    return min(max(scaled, 1), window.output)
