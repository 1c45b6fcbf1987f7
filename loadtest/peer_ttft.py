"""Time to the first token beside LMCache: hits from L1, disk and Redis, and cold prompts.

    python -m loadtest.peer_ttft host|disk|redis|cold|long

prints what `loadtest.figures` makes figures of; `long` tells what an L1 hit of a long prompt gains.
All engines run at once, with the same options, and are asked in turn for the same prompts: kvtier,
LMCache with its default chunk, LMCache with the smallest that vLLM's block allows; then the other
way round. Times are a client's, as in `loadtest.ttft`.

An engine that rested for some seconds, while the others were asked, is slower once, by as much as
an L1 hit takes, whichever it is. So each is asked for something unrelated and shorter than a block
right before its hit.

LMCache caches whole chunks only, and computes the rest of a prompt: with its default chunk that is
most of what its hits take, and part of the ratio. The cached tokens stand beside the times.

Before each hit L0 is emptied, and for a hit from a lower tier L1 too, by what each server offers
an operator for that (`POST /v1/blocks/drop` here, `POST /cache/clear` there). Files leave the page
cache first, so that both read them from the disk; LMCache would else read memory that is in no
budget. Redis is a redis-server for each, over TCP. That hits came from their tier is checked at
the end, by vLLM's count and by each server's own.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from . import model
from .peers import Peer, Setup, Tiers, running
from .report import Row, show
from .rig import MODEL_TOKENS, Engine, RigError, prompt
from .ttft import COLD_TOKENS, PROMPT_TOKENS, more

OURS, DEFAULT, SMALLEST, PLAIN = "kvtier", "lmcache", "lmcache-32", "vllm"
ROUNDS_AT_LEAST = 10
ROUNDS_AT_MOST = 40
ROUNDS_SECONDS = 90.0
"""After the least number of rounds, more are asked for only so long."""
WARM_ROUNDS = 1
COLD_ROUNDS_AT_LEAST = 8
COLD_ROUNDS_AT_MOST = 20
COLD_SECONDS = 150.0
LONG_TOKENS = 29 * 256 + 25
"""Whole chunks of both systems, and a rest that is computed: nearly what the model can take."""
LONG_MODEL_TOKENS = 8192
LONG_PROMPTS = 3
LONG_HITS = 5
"""Of each prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One system's answers, round by round."""

    ttfts: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The same prompts' answers of several systems."""

    by_name: Mapping[str, Asked]

    def ratios(self, other: str) -> list[float]:
        """Return kvtier's TTFT ÷ another's, round by round."""
        pairs = zip(self.by_name[OURS].ttfts, self.by_name[other].ttfts, strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def medians(self, *others: str) -> list[float]:
        """Return the median of the ratios to each of the others."""
        return [statistics.median(self.ratios(other)) for other in others]


@functools.cache
def hits(tiers: Tiers) -> Rounds:
    """Measure hits from the lowest of the tiers. Takes about four minutes.

    Raises RigError if a hit did not come from there.
    """
    names = (OURS, DEFAULT, SMALLEST)
    tokens = prompt(f"peers-{tiers.value}", PROMPT_TOKENS)
    with _asking(names, tiers) as asking:
        for each in asking.values():
            each.engine.ask(tokens)
            each.peer.settle()
        for number in range(WARM_ROUNDS):
            _round(asking, number, tokens)
        before = {name: each.outside() for name, each in asking.items()}
        rounds = Rounds({name: Asked() for name in names})
        for number in more(ROUNDS_AT_LEAST, ROUNDS_AT_MOST, ROUNDS_SECONDS):
            for name, answer in _round(asking, number, tokens).items():
                rounds.by_name[name].ttfts.append(answer[0])
                rounds.by_name[name].cached.append(answer[1])
        for name, each in asking.items():
            each.check(before[name], sum(rounds.by_name[name].cached))
    _show(f"hits of {PROMPT_TOKENS} tokens from {_WHERE[tiers]}", rounds, (DEFAULT, SMALLEST))
    return rounds


@functools.cache
def cold() -> Rounds:
    """Measure prompts that nobody has seen, with host tiers. Takes about four minutes."""
    names = (OURS, DEFAULT, PLAIN)
    rounds = Rounds({name: Asked() for name in names})
    with _asking(names, Tiers.HOST) as asking:
        for number in more(COLD_ROUNDS_AT_LEAST, COLD_ROUNDS_AT_MOST, COLD_SECONDS):
            tokens = prompt(f"peers-cold-{number}", COLD_TOKENS)
            for name in _order(names, number):
                rounds.by_name[name].ttfts.append(asking[name].cold(tokens))
    _show(f"cold prompts of {COLD_TOKENS} tokens", rounds, (DEFAULT, PLAIN))
    return rounds


def long() -> dict[str, list[float]]:
    """Measure cold TTFT ÷ L1 hits' median, prompt by prompt and by system. Takes seven minutes.

    Raises RigError if a hit did not come from L1.
    """
    names = (OURS, DEFAULT)
    colds: dict[str, list[float]] = {name: [] for name in names}
    warms: dict[str, list[float]] = {name: [] for name in names}
    with _asking(names, Tiers.HOST, LONG_MODEL_TOKENS) as asking:
        for number in range(LONG_PROMPTS):
            tokens = prompt(f"peers-long-{number}", LONG_TOKENS)
            for name in _order(names, number):
                each = asking[name]
                colds[name].append(each.cold(tokens))
                before = each.outside()
                answers = [each.hit(tokens) for _ in range(LONG_HITS)]
                each.check(before, sum(cached for _, cached in answers))
                warms[name].append(statistics.median(ttft for ttft, _ in answers))
    gains = {
        name: [cold / warm for cold, warm in zip(colds[name], warms[name], strict=True)]
        for name in names
    }
    rows = [Row(f"TTFT {name}, cold", colds[name], "ms", 1e3) for name in names]
    rows += [Row(f"TTFT {name}, L1", warms[name], "ms", 1e3) for name in names]
    rows += [Row(f"cold ÷ L1, {name}", gains[name]) for name in names]
    show(f"prompts of {LONG_TOKENS} tokens", rows)
    return gains


@dataclass(frozen=True, slots=True)
class _Asking:
    """A peer and the connection to its engine."""

    peer: Peer
    engine: Engine

    def cold(self, tokens: Sequence[int]) -> float:
        """Return the TTFT of a new prompt. Raises RigError if it is none."""
        answer = self.engine.ask(tokens)
        if answer.cached:
            raise RigError(f"{self.peer.name} had {answer.cached} tokens of a new prompt cached.")
        return answer.ttft

    def hit(self, tokens: Sequence[int]) -> tuple[float, int]:
        """Return TTFT and cached tokens of a hit from the lowest tier."""
        if self.peer.setup.tiers is Tiers.HOST:
            self.peer.forget_device()
        else:
            self.peer.drop_host()
        self.engine.wake()
        answer = self.engine.ask(tokens)
        return answer.ttft, answer.cached

    def outside(self) -> tuple[float, float]:
        """Return the tokens from outside L0 by vLLM's count, and from the tier by the server's."""
        self.peer.settle()
        return self.peer.cached_external(), self.peer.served()[self.peer.setup.tiers]

    def check(self, before: tuple[float, float], tokens: int) -> None:
        """Raise RigError unless so many tokens came from the tier, and all that were cached."""
        found = [now - then for now, then in zip(self.outside(), before, strict=True)]
        if not tokens or found != [tokens, tokens]:
            raise RigError(
                f"{self.peer.name} had {tokens} tokens cached, but vLLM counts {found[0]:.0f} from "
                f"outside and {self.peer.name} {found[1]:.0f} from {self.peer.setup.tiers.value}."
            )


@contextlib.contextmanager
def _asking(
    names: Sequence[str], tiers: Tiers, model_tokens: int = MODEL_TOKENS
) -> Iterator[dict[str, _Asking]]:
    """Start the peers, one after the other, with these tiers; vLLM by itself has none."""
    folder = model.prepare(model.DEFAULT_FOLDER)
    with contextlib.ExitStack() as ends:
        asking = {}
        for name in names:
            wanted = Tiers.DEVICE if name == PLAIN else tiers
            setup = Setup(folder, wanted, model_tokens=model_tokens)
            peer = ends.enter_context(running(name, setup))
            engine = ends.enter_context(contextlib.closing(Engine(peer.engine, name)))
            asking[name] = _Asking(peer, engine)
        yield asking


def _round(
    asking: Mapping[str, _Asking], number: int, tokens: Sequence[int]
) -> dict[str, tuple[float, int]]:
    return {name: asking[name].hit(tokens) for name in _order(list(asking), number)}


def _order(names: Sequence[str], number: int) -> Sequence[str]:
    """Return who is asked when in a round: each second one goes the other way."""
    return names if number % 2 == 0 else names[::-1]


_WHERE = {Tiers.HOST: "L1", Tiers.DISK: "disk", Tiers.REDIS: "Redis over TCP"}


def _show(title: str, rounds: Rounds, others: Sequence[str]) -> None:
    rows = [Row(f"TTFT {name}", one.ttfts, "ms", 1e3) for name, one in rounds.by_name.items()]
    rows += [
        Row(f"cached tokens, {name}", one.cached)
        for name, one in rounds.by_name.items()
        if one.cached
    ]
    rows += [Row(f"{OURS} ÷ {other}", rounds.ratios(other)) for other in others]
    show(title, rows)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    match sys.argv[1]:
        case "cold":
            cold()
        case "long":
            long()
        case tiers:
            hits(Tiers(tiers))
