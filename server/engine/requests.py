"""What the scheduler side remembers of a request, and which requests it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..protocol import salted
from .controls import Controls, ControlsError, read_controls
from .plan import Promise
from .tracing import Span


class Bypass(StrEnum):
    """Why a request neither loads nor stores."""

    POOLING = "pooling"
    """It leaves no KV that another request could go on from."""
    LORA = "lora"
    """vLLM's block hash has an adapter's name and path, and not what lies there."""
    CONTROLS = "controls"
    """Its `kv_transfer_params` ask for something unknown."""


@dataclass(slots=True)
class Match:
    """A lookup's answer, until vLLM has allocated blocks for it."""

    first: int
    last: int
    slots: list[int]
    by: Promise
    lease: int
    disk: int = 0
    redis: int = 0

    @property
    def question(self) -> tuple[Promise, int, int]:
        """Return who was asked for which blocks."""
        return self.by, self.first, self.last

    def origins(self, blocks: int) -> tuple[int, int, int]:
        """Return how many of the first `blocks` blocks came from host, disk and Redis tier."""
        redis = min(self.redis, blocks)
        disk = min(self.disk, blocks - redis)
        return blocks - disk - redis, disk, redis


@dataclass(slots=True)
class Awaited:
    """A lookup whose answer has yet to come, because lower tiers have more."""

    first: int
    last: int
    by: Promise
    lease: int
    until: float
    """The answer is overdue then, in seconds of the monotonic clock."""
    span: Span

    @property
    def question(self) -> tuple[Promise, int, int]:
        """Return who was asked for which blocks."""
        return self.by, self.first, self.last


@dataclass(slots=True)
class Tracked:
    """A request that vLLM has not finished. Positions count blocks of the request."""

    request: Any
    controls: Controls
    bypass: Bypass | None
    refusal: str
    """One sentence for the user, if the bypass is their controls'."""
    limit: int | None
    """Blocks from the head on that may be cached; None for all."""
    stored: int = 0
    """Blocks before this one are held by the server, or on their way, or not ours to store."""
    refill: list[int] = field(default_factory=list)
    """Blocks before `stored` that the device holds, or will, and the server does not."""
    match: Match | None = None
    awaited: Awaited | None = None
    refused: bool = False
    """The tier had no room for a block of it, and what follows would be of no use."""
    load_failed: bool = False
    """A load of it failed: it is computed, and nothing is tried twice."""
    admitted: bool = False
    """vLLM has taken it up at least once: what it asked of the tiers is counted."""

    def tenant(self, salt_key: bytes) -> str:
        """Return who the request is counted for, as it travels: by name, or by its salt."""
        named, salt = self.controls.tenant, self.request.cache_salt
        return salted(salt_key, salt) if salt_key and salt and not named else named

    def cacheable(self, tokens: int, block_tokens: int) -> int:
        """Return how many whole blocks of the first `tokens` tokens may be cached."""
        blocks = min(tokens // block_tokens, len(self.request.block_hashes))
        return blocks if self.limit is None else min(blocks, self.limit)

    def reusable(self, block_tokens: int) -> int:
        """Return the blocks that a cache may serve: at least one token is left to compute."""
        return self.cacheable(self.request.num_tokens - 1, block_tokens)


def track(request: Any, block_tokens: int) -> Tracked:
    """Return what to remember of a new request."""
    controls, bypass, refusal = Controls(), None, ""
    if request.pooling_params is not None:
        bypass = Bypass.POOLING
    elif request.lora_request is not None:
        bypass = Bypass.LORA
    try:
        controls = read_controls(request.kv_transfer_params)
    except ControlsError as error:
        bypass, refusal = Bypass.CONTROLS, str(error)
    limit = None if controls.limit_tokens is None else controls.limit_tokens // block_tokens
    return Tracked(request, controls, bypass, refusal, limit)


def joined(keys: Sequence[bytes]) -> bytes:
    """Return a chain of keys as it travels."""
    return b"".join(keys)
