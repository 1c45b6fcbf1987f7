"""What a server is asked: requests of token ids, and workloads of them.

A workload is made once, from a seed, and is the same for every system that it is sent to: prompts
hold what a session said before, and never what a server answered. So outputs can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

import msgspec

Parameter = int | float | str
NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})
BLOCK_TOKENS = 32
"""Of the engines' blocks, unless something else is said: reuse is counted in whole blocks."""


class TrafficError(Exception):
    """Traffic can't be made or sent as it was asked for. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload."""

    name: str
    """Unique in its workload."""
    prompt: tuple[int, ...]
    """Token ids, as they are sent to /v1/completions."""
    output_tokens: int
    at: float = 0.0
    """Seconds after the start, for the open loop."""
    after: str | None = None
    """The request that must have ended before this one is sent: turns of one session."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say of a workload without its prompts."""

    name: str
    about: str
    seed: int
    parameters: dict[str, Parameter]
    requests: int
    prompt_tokens: int
    output_tokens: int
    reusable_tokens: int
    """Prompt tokens that a cache without limit would not compute, in blocks of `block_tokens`."""
    block_tokens: int

    @property
    def reusable_share(self) -> float:
        """The share of all prompt tokens that a cache without limit would not compute."""
        return self.reusable_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are sent, and what they were made from."""

    name: str
    about: str
    seed: int
    requests: tuple[Request, ...]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests together."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens that all answers together have."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(len(request.prompt) + request.output_tokens for request in self.requests)

    @property
    def reusable_tokens(self) -> int:
        """Prompt tokens that a cache without limit would not compute, in blocks of 32."""
        return self.facts().reusable_tokens

    def distinct_tokens(self, block_tokens: int = BLOCK_TOKENS) -> int:
        """Return how many tokens the different blocks of all prompts hold: what a cache keeps."""
        chains = (chain(request.prompt, block_tokens) for request in self.requests)
        return len({block for each in chains for block in each}) * block_tokens

    def facts(self, block_tokens: int = BLOCK_TOKENS) -> Facts:
        """Return what there is to say of it, with reuse counted in blocks of so many tokens."""
        return Facts(
            name=self.name,
            about=self.about,
            seed=self.seed,
            parameters=dict(self.parameters),
            requests=len(self.requests),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            reusable_tokens=_reusable(self.requests, block_tokens),
            block_tokens=block_tokens,
        )

    def check(self, model_tokens: int) -> Workload:
        """Return it, if it can be sent to a model of so many tokens. Raises TrafficError."""
        if not self.requests:
            raise TrafficError(f"The workload {self.name} has no request: make it larger.")
        for request in self.requests:
            _check_request(request, model_tokens)
        _check_names(self.requests)
        return self


def chain(prompt: Sequence[int], block_tokens: int) -> list[int]:
    """Return an identity for each complete block of a prompt: equal ones are equal prefixes."""
    whole = len(prompt) // block_tokens
    blocks = [tuple(prompt[n * block_tokens : (n + 1) * block_tokens]) for n in range(whole)]
    return list(accumulate(blocks, lambda parent, block: hash((parent, block)), initial=0))[1:]


def _reusable(requests: Sequence[Request], block_tokens: int) -> int:
    seen: set[int] = set()
    found = 0
    for request in requests:
        blocks = chain(request.prompt, block_tokens)
        hits = next((n for n, each in enumerate(blocks) if each not in seen), len(blocks))
        # An engine computes at least one token of each prompt.
        found += min(hits, (len(request.prompt) - 1) // block_tokens) * block_tokens
        seen.update(blocks)
    return found


def _check_request(request: Request, model_tokens: int) -> None:
    if not request.prompt or request.output_tokens < 1:
        raise TrafficError(
            f"The request {request.name} has {len(request.prompt)} prompt tokens and asks for "
            f"{request.output_tokens}: both must be 1 at least."
        )
    tokens = len(request.prompt) + request.output_tokens
    if tokens > model_tokens:
        raise TrafficError(
            f"The request {request.name} needs {tokens:,} tokens, and the model has "
            f"{model_tokens:,}: make the workload's sizes smaller."
        )


def _check_names(requests: Sequence[Request]) -> None:
    name, times = Counter(request.name for request in requests).most_common(1)[0]
    if times > 1:
        raise TrafficError(f"{times} requests are named {name}: a name must be unique.")
    known: set[str] = set()
    for request in requests:
        if request.after is not None and request.after not in known:
            raise TrafficError(
                f"The request {request.name} waits for {request.after}, which does not stand "
                f"before it."
            )
        known.add(request.name)
