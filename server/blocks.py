"""What an operator asks of single blocks and prefixes: where they lie, and that they go.

Each operation is work in pieces (`walking.py`), for the loop to turn in between. Nothing here
counts as a use. Runs on the event loop, over the hierarchy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .block_readings import TierHolding
from .core import BlockKey, Tier
from .directory import Namespace
from .errors import KVTierError
from .hierarchy import Hierarchy
from .lower import LowerTier
from .promotion import ASKED_AT_MOST
from .walking import AT_ONCE, NEXT_TURN, Work

DIGITS_AT_LEAST = 6
"""Of a namespace's digest, to name it by."""
PAUSE_SECONDS = 0.005
PAUSES_AT_MOST = 400
"""So often something is waited for that a thread of a lower tier does."""


class UnknownNamespace(KVTierError):
    """There is no such namespace, or more than one."""


def find_namespace(cache: Hierarchy, name: str | None) -> Namespace:
    """Return the namespace whose digest begins with `name`, or the only one. Raises."""
    spaces = cache.directory.namespaces
    found = [space for digest, space in spaces.items() if digest.startswith(name or "")]
    if len(found) == 1 and (name is None or len(name) >= DIGITS_AT_LEAST):
        return found[0]
    known = ", ".join(digest[:12] for digest in spaces) or "none: no engine has connected yet"
    what = "Name a namespace" if name is None else f'"{name}" names no single namespace'
    raise UnknownNamespace(f"{what}; there are: {known}.")


@dataclass(frozen=True, slots=True)
class Held:
    """By tier, for each block of a chain whether it is there. `silent` tiers could not say."""

    flags: dict[Tier, bytearray]
    silent: frozenset[Tier]

    @property
    def matched(self) -> int:
        """Blocks of the prefix that all tiers have together."""
        return _reach(self.flags.values(), 0)

    def readings(self) -> list[TierHolding]:
        """Return which blocks each tier holds."""
        return [
            TierHolding(tier, sum(flags), _ranges(flags), tier not in self.silent)
            for tier, flags in self.flags.items()
        ]


def locate(cache: Hierarchy, space: Namespace, keys: Sequence[BlockKey]) -> Work[Held]:
    """Find out which tiers hold which blocks of a chain.

    Redis tells of the prefix only, and beyond that counts what this server wrote there.
    """
    flags = {Tier.HOST: bytearray(len(keys))}
    flags |= {lower.tier: bytearray(len(keys)) for lower in cache.lowers}
    for at, key in enumerate(keys):
        flags[Tier.HOST][at] = key in space.blocks
        for lower in cache.lowers:
            flags[lower.tier][at] = lower.holds(space.records, key)
        if not (at + 1) % AT_ONCE:
            yield NEXT_TURN
    silent = {lower.tier for lower in cache.lowers if not lower.health.up}
    for lower in cache.lowers:
        if lower.askable(space.records) and not (yield from _ask(lower, space, keys, flags)):
            silent.add(lower.tier)
    return Held(flags, frozenset(silent))


def _ask(
    lower: LowerTier, space: Namespace, keys: Sequence[BlockKey], flags: dict[Tier, bytearray]
) -> Work[bool]:
    """Ask a medium for the prefix, going on where another tier fills its gaps."""
    own = flags[lower.tier]
    at = 0
    for _ in range(ASKED_AT_MOST):
        answers: list[int | None] = []
        lower.peek(space.records, keys[at:], answers.append)
        for _ in range(PAUSES_AT_MOST):
            if answers:
                break
            yield PAUSE_SECONDS
        count = answers[0] if answers else None
        if count is None:
            return False
        own[at : at + count] = b"\1" * count
        end = at + count
        if end < len(keys):
            own[end] = 0
        at = _reach(flags.values(), end)
        if at in (end, len(keys)):
            break
    return True


def _reach(flags: Collection[bytearray], at: int) -> int:
    """Return up to where each block from `at` on is in some tier."""
    end = max((len(each) for each in flags), default=0)
    while at < end and any(each[at] for each in flags):
        at += 1
    return at


def _ranges(flags: bytearray) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    begin = flags.find(1)
    while begin >= 0:
        end = flags.find(0, begin)
        ranges.append((begin, len(flags) if end < 0 else end))
        begin = -1 if end < 0 else flags.find(1, end)
    return ranges


def prefetch(cache: Hierarchy, space: Namespace, keys: Sequence[BlockKey]) -> Work[int]:
    """Begin to bring a prefix to the host tier. Returns how many blocks are on their way.

    Raises PrefetchRefused.
    """
    held = yield from locate(cache, space, keys)
    where: list[LowerTier | None] = []
    for at in range(held.matched):
        lowers = (one for one in cache.lowers if held.flags[one.tier][at])
        where.append(None if held.flags[Tier.HOST][at] else next(lowers))
    return cache.prefetches.begin(space, keys[: len(where)], where)
