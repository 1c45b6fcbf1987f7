"""What a replay tries: each way to run (a row of the table) at each size (a column)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ..admission import Price
from ..core import LOWER_TIERS, AdmissionMode, Tier, WriteMode
from ..errors import SettingsError
from ..policies import POLICIES
from ..sizes import parse_size
from .simulator import LowerSetup, Setup
from .trace import Trace

SIZES = ("1%", "5%", "10%", "25%")
"""Shares of a trace's distinct blocks that the host tier has unless others are named."""
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay. Sizes are texts such as "10%" (of the distinct blocks) or "20GiB"."""

    files: Sequence[Path]
    policies: Sequence[str] = ()
    """Names; empty for all of them."""
    sizes: Sequence[str] = SIZES
    """Of the host tier."""
    disks: Sequence[str] = ()
    """Sizes of the disk tier; empty for none."""
    redises: Sequence[str] = ()
    """Sizes of the Redis tier; empty for none."""
    lower_policies: Sequence[str] = ("mq",)
    write_modes: Sequence[str] = (WriteMode.THROUGH,)
    admissions: Sequence[str] = (AdmissionMode.ALWAYS,)
    block_bytes: str | None = None
    """Bytes of one block, such as "2MiB"; needed for sizes in bytes where the trace has none."""
    prefill_rate: float | None = None
    """Tokens that the engine computes in a second, for the admission `cost`."""
    bandwidth: str | None = None
    """Bytes that a lower tier reads or writes in a second, such as "1GiB", for the same."""
    plot: Path | None = None
    """PNG or SVG file to write."""


class Below(NamedTuple):
    """What lower tiers do, all of them the same."""

    policy: str
    write_mode: WriteMode
    admission: AdmissionMode


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run."""

    policy: str
    below: Below | None = None

    @property
    def label(self) -> str:
        """How the table and the plot call it."""
        return self.policy if self.below is None else f"{self.policy} / {' '.join(self.below)}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the tiers, as they were named."""

    host: str
    lowers: tuple[tuple[Tier, str], ...] = ()

    @property
    def label(self) -> str:
        """How the table calls them."""
        return " + ".join([self.host, *(size for _, size in self.lowers)])


class Grid:
    """All ways and sizes of some options. Raises SettingsError if they do not fit."""

    def __init__(self, options: ReplayOptions) -> None:
        policies = _names(options.policies, POLICIES, "policies") or list(POLICIES)
        lower_policies = _names(options.lower_policies, POLICIES, "policies")
        modes = [WriteMode(name) for name in _names(options.write_modes, WriteMode, "write modes")]
        names = _names(options.admissions, AdmissionMode, "admissions")
        self.admissions = [AdmissionMode(name) for name in names]
        lower_sizes = {Tier.DISK: options.disks, Tier.REDIS: options.redises}
        tiers = [tier for tier in LOWER_TIERS if lower_sizes[tier]]
        self.ways = [Way(policy) for policy in policies]
        if tiers:
            below = [Below(*each) for each in product(lower_policies, modes, self.admissions)]
            self.ways = [Way(policy, each) for policy, each in product(policies, below)]
        lowers = list(product(*([(tier, size) for size in lower_sizes[tier]] for tier in tiers)))
        self.sizes = [Sizes(host, tuple(below)) for host in options.sizes for below in lowers]
        self._block_bytes = _optional_size(options.block_bytes, "block bytes")
        self._bandwidth = _optional_size(options.bandwidth, "bandwidth")
        self._prefill_rate = options.prefill_rate
        self._check(tiers)

    def block_bytes(self, trace: Trace) -> int | None:
        """Return the bytes of one block, if they were named or the trace tells."""
        return self._block_bytes or trace.block_bytes

    def setups(self, trace: Trace) -> Iterator[tuple[Way, Sizes, Setup]]:
        """Yield all there is to try. Raises SettingsError if sizes need the bytes of a block."""
        price = self._price(trace)
        for way in self.ways:
            for sizes in self.sizes:
                lowers = tuple(
                    LowerSetup(tier, self.blocks(trace, size), *way.below)
                    for tier, size in sizes.lowers
                    if way.below is not None
                )
                yield way, sizes, Setup(way.policy, self.blocks(trace, sizes.host), lowers, price)

    def total(self, trace: Trace, sizes: Sizes) -> int:
        """Return the capacity of all tiers together, in blocks."""
        return sum(self.blocks(trace, size) for size in (sizes.host, *(s for _, s in sizes.lowers)))

    def blocks(self, trace: Trace, size: str) -> int:
        """Return a size in blocks, at least one."""
        if match := PERCENT.fullmatch(size):
            return max(int(trace.distinct * float(match[1]) / 100), 1)
        block_bytes = self.block_bytes(trace)
        if block_bytes is None:
            raise SettingsError(
                f"The size {size} needs the bytes of one block: add for example --block-bytes "
                f'2MiB, or write a share of the distinct blocks, such as "10%".'
            )
        return max(_size(size, "size") // block_bytes, 1)

    def _price(self, trace: Trace) -> Price:
        block_bytes = self.block_bytes(trace)
        if AdmissionMode.COST not in self.admissions:
            return Price(None, None, None)
        if self._prefill_rate is None or self._bandwidth is None or block_bytes is None:
            raise SettingsError(
                "The admission cost needs what things cost: add for example --prefill-rate 8000, "
                "--bandwidth 1GiB and --block-bytes 2MiB."
            )
        moved = block_bytes / self._bandwidth
        return Price(trace.block_tokens / self._prefill_rate, moved, moved)

    def _check(self, tiers: Sequence[Tier]) -> None:
        """Refuse before the first file is read, which takes a while."""
        for sizes in self.sizes:
            for size in (sizes.host, *(size for _, size in sizes.lowers)):
                if not PERCENT.fullmatch(size):
                    _size(size, "size")
        if not tiers and self.admissions != [AdmissionMode.ALWAYS]:
            raise SettingsError(
                "Admission is about lower tiers, and there is none: add one, such as --disk 40%."
            )
        if self._prefill_rate is not None and self._prefill_rate <= 0:
            raise SettingsError(
                f"A prefill rate of {self._prefill_rate:g} tokens a second computes nothing: "
                f"name one such as 8000."
            )


def _names(names: Sequence[str], known: Iterable[str], what: str) -> list[str]:
    known = list(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, 0)[0]
            raise SettingsError(
                f'"{name}" is not one of the {what} {", ".join(known)}; the nearest is {nearest}.'
            )
    return list(dict.fromkeys(names))


def _optional_size(text: str | None, what: str) -> int | None:
    return None if text is None else _size(text, what)


def _size(text: str, what: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"The {what}: {error}.") from None
