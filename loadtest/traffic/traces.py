"""Replays the shapes of recorded requests: which prefixes they share, when they came, how long.

A trace has no tokens. Each of its blocks becomes a piece of its own of `block` tokens, so that
equal prefixes are equal prompts; with fewer tokens than the trace's blocks have, long prompts fit a
small model. What is longer than the model loses its end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from kvtier.replay.readers import Parsed, read_requests
from kvtier.replay.trace import TraceError

from .requests import Request, TrafficError, Workload
from .texts import Writer


@dataclass(frozen=True, slots=True)
class Window:
    """Which requests of a trace, and how they are scaled."""

    requests: int = 100
    first: int = 0
    """Requests that are passed over before them."""
    block: int = 64
    """Tokens that stand for one of the trace's blocks."""
    output: int = 16
    """Tokens of an answer at most; shorter ones stay as long as they were, scaled."""


def replay(writer: Writer, file: Path, model_tokens: int, window: Window) -> Workload:
    """Return a window of a trace, for a model of so many tokens. Blocks.

    Raises TrafficError if the file is no trace, ends before the window, or does not fit.
    """
    if min(window.requests, window.block, window.output) < 1 or window.first < 0:
        raise TrafficError("A window has requests, blocks and answers of 1 at least.")
    try:
        parsed = list(islice(read_requests(file), window.first, window.first + window.requests))
    except TraceError as error:
        raise TrafficError(str(error)) from None
    if not parsed:
        raise TrafficError(f"{file} has no request after the first {window.first}.")
    name = file.name.partition(".")[0]
    about = f"What {name} asked, requests {window.first} to {window.first + len(parsed)}, scaled."
    requests = tuple(_requests(writer, parsed, model_tokens, window))
    parameters = {"trace": file.name, **asdict(window)}
    made = Workload(f"replay {name}", about, writer.seed, requests, parameters)
    return made.check(model_tokens)


def _requests(
    writer: Writer, parsed: list[Parsed], model_tokens: int, window: Window
) -> Iterator[Request]:
    began = parsed[0].seconds
    latest: dict[Hashable, str] = {}
    for number, each in enumerate(parsed, window.first):
        output = _output(each, window)
        name = f"request {number}"
        prompt = _prompt(writer, name, each, window.block)[: model_tokens - output]
        after = latest.get(each.session)
        if each.session is not None:
            latest[each.session] = name
        yield Request(name, prompt, output, max(each.seconds - began, 0.0), after)


def _prompt(writer: Writer, name: str, parsed: Parsed, block: int) -> tuple[int, ...]:
    """Return the blocks of a request, and a rest of its own."""
    complete, rest = divmod(parsed.tokens, parsed.block_tokens)
    pieces = [writer.write(f"block {each}", block) for each in parsed.blocks[:complete]]
    pieces.append(writer.write(f"rest of {name}", max(rest * block // parsed.block_tokens, 1)))
    return tuple(token for piece in pieces for token in piece)


def _output(parsed: Parsed, window: Window) -> int:
    if parsed.output_tokens is None:
        return window.output
    scaled: int = parsed.output_tokens * window.block // parsed.block_tokens
    return min(max(scaled, 1), window.output)
