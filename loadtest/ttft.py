"""Time to the first token: from L1 against from L0, and cold with kvtier against without.

`python -m loadtest.ttft l1` and `python -m loadtest.ttft cold` print what `loadtest.figures` makes
figures of. Times are a client's: HTTP, tokens in, one token out, streamed.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .report import Row, show
from .rig import BLOCK_TOKENS, WITH, WITHOUT, Engine, Rig, RigError, prompt, rig

PROMPTS = 2
PROMPT_BLOCKS = 92
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 25
"""Whole blocks, and the rest of a prompt that ends anywhere: computed however much is cached."""
PAIRS_AT_LEAST = 6
"""Of each prompt."""
PAIRS_AT_MOST = 40
PAIRS_SECONDS = 60.0
"""Of each prompt: after the least number of pairs, more are asked for only so long."""
COPY_BYTES = 1 << 27
SOURCE_METRIC = "vllm:prompt_tokens_cached_by_source_total"
LOADED_METRIC = "kvtier_engine_loaded_bytes_total"

COLD_TOKENS = 1000
COLD_PAIRS_AT_LEAST = 7
COLD_PAIRS_AT_MOST = 25
COLD_SECONDS = 150.0
"""After the least number of pairs, more are asked for only so long."""


@dataclass(frozen=True, slots=True)
class Warm:
    """TTFTs in seconds, pair by pair, and what an L1 hit of a prompt has to move."""

    device: list[float]
    host: list[float]
    copies: list[float]
    """Seconds that one thread took to copy COPY_BYTES, in between."""
    loaded_bytes: float
    """Of one L1 hit."""

    @property
    def ratios(self) -> list[float]:
        """L1 ÷ L0 of each pair."""
        return [host / device for host, device in zip(self.host, self.device, strict=True)]

    @property
    def limit_ratio(self) -> float:
        """What L1 takes longer than L0, pair by pair, ÷ what copying its bytes takes."""
        pairs = zip(self.host, self.device, strict=True)
        extra = statistics.median(host - device for host, device in pairs)
        copy = self.loaded_bytes / COPY_BYTES * statistics.median(self.copies)
        return extra / copy


@dataclass(frozen=True, slots=True)
class Pairs:
    """The same quantity with kvtier and without, pair by pair."""

    with_kvtier: list[float]
    without: list[float]

    @property
    def ratios(self) -> list[float]:
        """With ÷ without, of each pair."""
        return [one / other for one, other in zip(self.with_kvtier, self.without, strict=True)]


@functools.cache
def l1() -> Warm:
    """Measure L0 and L1 hits of the same prompts, in turn. Takes about two minutes.

    Raises RigError if a hit did not come from its tier.
    """
    with rig(WITH) as running:
        engine = running[WITH]
        prompts = [prompt(f"l1-{number}", PROMPT_TOKENS) for number in range(PROMPTS)]
        for number, each in enumerate(prompts, 1):
            engine.ask(each)
            running.wait_stored(number * PROMPT_BLOCKS)
        copy = _Copy()
        _warm_pair(engine, prompts[0], copy)
        before = _sources(engine)
        found = Warm([], [], [], 0.0)
        for each in prompts:
            _from_host(engine, each)
            _measure_warm(engine, each, copy, found)
        loaded = _loaded(engine, before, len(found.host))
        warm = Warm(found.device, found.host, found.copies, loaded)
    _show_warm(warm)
    return warm


@functools.cache
def cold() -> Pairs:
    """Measure prompts that nobody has seen, with kvtier and without. Takes three minutes."""
    with rig(WITH, WITHOUT) as running:
        return cold_pairs(running, "")


def cold_pairs(running: Rig, about: str) -> Pairs:
    """Measure the same with the engines of a rig; `about` stands in the table's title."""
    for name in (WITH, WITHOUT) * 2:
        running[name].ask(prompt(f"warm-up-{name}", COLD_TOKENS))
    pairs = Pairs([], [])
    for number in more(COLD_PAIRS_AT_LEAST, COLD_PAIRS_AT_MOST, COLD_SECONDS):
        _cold_pair(running, number, pairs)
    rows = [Row(f"TTFT {WITH}", pairs.with_kvtier, "ms", 1e3)]
    rows += [Row(f"TTFT {WITHOUT}", pairs.without, "ms", 1e3)]
    rows += [Row("with ÷ without", pairs.ratios)]
    show(f"cold prompts of {COLD_TOKENS} tokens{about}", rows)
    return pairs


def _measure_warm(engine: Engine, tokens: list[int], copy: _Copy, found: Warm) -> None:
    for _ in more(PAIRS_AT_LEAST, PAIRS_AT_MOST, PAIRS_SECONDS):
        device, host, seconds = _warm_pair(engine, tokens, copy)
        found.device.append(device)
        found.host.append(host)
        found.copies.append(seconds)


def more(at_least: int, at_most: int, seconds: float) -> Iterator[int]:
    """Count up to `at_most`, but beyond `at_least` only for so many seconds."""
    began = time.monotonic()
    for number in range(at_most):
        if number >= at_least and time.monotonic() - began > seconds:
            return
        yield number


def in_turn(number: int) -> tuple[str, str]:
    """Return who goes first in pair `number`, and who second: ABBA, so that drift cancels."""
    return (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH)


def _cold_pair(running: Rig, number: int, pairs: Pairs) -> None:
    tokens = prompt(f"cold-{number}", COLD_TOKENS)
    for name in in_turn(number):
        asked = running[name].ask(tokens)
        if asked.cached:
            raise RigError(f"{asked.cached} tokens of a prompt that nobody has seen were cached.")
        (pairs.with_kvtier if name == WITH else pairs.without).append(asked.ttft)


def _warm_pair(engine: Engine, tokens: list[int], copy: _Copy) -> tuple[float, float, float]:
    """Return TTFT from L0, TTFT from L1, and seconds of a copy, one right after the other."""
    device = hit(engine, tokens)
    host = _from_host(engine, tokens)
    return device, host, copy.seconds()


def _from_host(engine: Engine, tokens: list[int]) -> float:
    engine.forget()
    return hit(engine, tokens)


def hit(engine: Engine, tokens: list[int]) -> float:
    """Return the TTFT of a prompt that is cached as a whole. Raises RigError if it is not."""
    asked = engine.ask(tokens)
    if asked.cached != PROMPT_BLOCKS * BLOCK_TOKENS:
        raise RigError(f"only {asked.cached} of {PROMPT_TOKENS} tokens were cached.")
    return asked.ttft


@dataclass(frozen=True, slots=True)
class _Sources:
    """What came from where since the engine's start: tokens by tier, and bytes from L1."""

    device: float
    host: float
    loaded_bytes: float


def _sources(engine: Engine) -> _Sources:
    return _Sources(
        engine.counter(SOURCE_METRIC, source="device"),
        engine.counter(SOURCE_METRIC, source="host"),
        engine.counter(LOADED_METRIC),
    )


def _loaded(engine: Engine, before: _Sources, pairs: int) -> float:
    """Return the bytes of one L1 hit. Raises RigError unless each hit came from its tier."""
    # vLLM counts a step's copies when the next step is over.
    engine.ask(prompt("last", 8))
    after = _sources(engine)
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    device, host = after.device - before.device, after.host - before.host
    if device != pairs * tokens or host != (pairs + PROMPTS) * tokens:
        raise RigError(f"{device:.0f} tokens came from L0 and {host:.0f} from L1, out of turn.")
    return (after.loaded_bytes - before.loaded_bytes) / (pairs + PROMPTS)


class _Copy:
    """A copy between two pieces of memory that are there already, by one thread."""

    def __init__(self) -> None:
        self._pieces = [mmap.mmap(-1, COPY_BYTES) for _ in range(2)]
        self._places = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._pieces]
        for place in self._places:
            ctypes.memset(place, 1, COPY_BYTES)

    def seconds(self) -> float:
        """Return how long the copy took."""
        began = time.perf_counter()
        ctypes.memmove(*self._places, COPY_BYTES)
        return time.perf_counter() - began


def _show_warm(warm: Warm) -> None:
    extra = [host - device for host, device in zip(warm.host, warm.device, strict=True)]
    copies = [warm.loaded_bytes / COPY_BYTES * each for each in warm.copies]
    show(
        f"prompts of {PROMPT_TOKENS} tokens, {warm.loaded_bytes / 1e6:.0f} MB from L1",
        [
            Row("TTFT from L0", warm.device, "ms", 1e3),
            Row("TTFT from L1", warm.host, "ms", 1e3),
            Row("L1 ÷ L0", warm.ratios),
            Row("L1 - L0", extra, "ms", 1e3),
            Row("one thread copies as much", copies, "ms", 1e3),
            Row(
                "one thread's bandwidth", [COPY_BYTES / each for each in warm.copies], "GB/s", 1e-9
            ),
        ],
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    {"l1": l1, "cold": cold}[sys.argv[1]]()
