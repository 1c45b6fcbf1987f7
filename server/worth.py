"""Recompute or load: how much of a prefix is loaded sooner than it is computed.

Pure arithmetic over what was measured: each tier's latency and bandwidth, and the rate at which the
engine computes prompts. What is not measured yet counts as worth it, so that it gets measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from .core import Tier


class LoadMode(StrEnum):
    """When blocks of lower tiers are loaded."""

    AUTO = "auto"
    """Where that is expected to be sooner than computing them."""
    ALWAYS = "always"
    NEVER = "never"


class Stretch(NamedTuple):
    """Consecutive blocks of a prefix that come from one place."""

    tier: Tier
    blocks: int
    seconds: float
    """What loading them is expected to take; 0.0 where they are on their way, or nobody knows."""


class Verdict(NamedTuple):
    """How many blocks to load, and what is gained by not loading the rest."""

    blocks: int
    skipped: dict[Tier, int]
    saved_seconds: dict[Tier, float]


def judge(stretches: Sequence[Stretch], block_seconds: float | None) -> Verdict:
    """Return how many leading blocks to load; `block_seconds` is what computing one takes.

    Only a prefix can be loaded, so that a slow stretch may be worth it for what lies behind it.
    """
    best, gain = 0, 0.0
    total, blocks = 0.0, 0
    for at, stretch in enumerate(stretches):
        blocks += stretch.blocks
        total += stretch.blocks * (block_seconds or 0.0) - stretch.seconds
        if block_seconds is None or total >= gain:
            best, gain = at + 1, total
    skipped: dict[Tier, int] = {}
    saved: dict[Tier, float] = {}
    for stretch in stretches[best:]:
        worth = stretch.seconds - stretch.blocks * (block_seconds or 0.0)
        skipped[stretch.tier] = skipped.get(stretch.tier, 0) + stretch.blocks
        saved[stretch.tier] = saved.get(stretch.tier, 0.0) + max(worth, 0.0)
    return Verdict(sum(each.blocks for each in stretches[:best]), skipped, saved)
