"""Output tokens a second on prompts that nobody has seen, with kvtier and without, in turn.

`python -m loadtest.throughput` prints what `loadtest.figures` makes a figure of.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

from .report import Row, show
from .rig import SETTLE_SECONDS, WITH, WITHOUT, Engine, prompt, rig
from .ttft import Pairs, in_turn, more

REQUESTS = 8
"""At the same time."""
PROMPT_TOKENS = 200
ANSWER_TOKENS = 32
PAIRS_AT_LEAST = 7
PAIRS_AT_MOST = 30
SECONDS = 300.0
"""After the least number of pairs, more are asked for only so long."""


def unique() -> Pairs:
    """Measure output tokens a second, in pairs. Takes about six minutes."""
    with ThreadPoolExecutor(REQUESTS) as threads, rig(WITH, WITHOUT) as running:
        for name in (WITH, WITHOUT):
            _tokens_a_second(running[name], f"warm-up-{name}", threads)
        pairs = Pairs([], [])
        for number in more(PAIRS_AT_LEAST, PAIRS_AT_MOST, SECONDS):
            for name in in_turn(number):
                found = _tokens_a_second(running[name], f"unique-{number}", threads)
                (pairs.with_kvtier if name == WITH else pairs.without).append(found)
    rows = [Row(WITH, pairs.with_kvtier, "tokens/s"), Row(WITHOUT, pairs.without, "tokens/s")]
    title = f"{REQUESTS} requests at once, {PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out"
    show(title, [*rows, Row("with ÷ without", pairs.ratios)])
    return pairs


def _tokens_a_second(engine: Engine, name: str, threads: ThreadPoolExecutor) -> float:
    prompts = [prompt(f"{name}-{number}", PROMPT_TOKENS) for number in range(REQUESTS)]
    time.sleep(SETTLE_SECONDS)
    began = time.perf_counter()
    list(threads.map(lambda each: engine.answer(each, ANSWER_TOKENS), prompts))
    return REQUESTS * ANSWER_TOKENS / (time.perf_counter() - began)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    unique()
