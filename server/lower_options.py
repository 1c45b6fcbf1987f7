"""The settings of one lower tier, as it takes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .coding import CodecMode
from .core import AdmissionMode, WriteMode
from .tiers.breaker import BreakerOptions


@dataclass(frozen=True, slots=True)
class LowerOptions:
    """Settings of one lower tier. Sizes in bytes, times in seconds."""

    capacity_bytes: int
    policy: str = "lru"
    write_mode: WriteMode = WriteMode.THROUGH
    admission: AdmissionMode = AdmissionMode.ALWAYS
    write_rate: float | None = None
    """Bytes a second that are written at most, on average; None for no limit."""
    codec: CodecMode = CodecMode.NONE
    threads: int = 4
    queue_bytes: int = 256 << 20
    """Of blocks that wait to be written; more are dropped."""
    stuck_seconds: float = 2.0
    """A job that runs for longer opens the breaker, though it never returns."""
    breaker: BreakerOptions = field(default_factory=BreakerOptions)
