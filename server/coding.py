"""Whether a lower tier compresses what it writes: where blocks come back sooner for it.

Pure arithmetic over what was measured. A raw block comes back in raw ÷ bandwidth, a compressed one
in stored ÷ bandwidth + raw ÷ decode rate, of all threads that may decode at once. Where nothing is
known yet, and where compressing does not pay, one write in `SAMPLE_EVERY` is compressed all the
same, so that it becomes known and stays so.
"""

from __future__ import annotations

from enum import StrEnum

from .averages import averaged
from .codec import Codec

SAMPLE_EVERY = 64
GAIN_TO_BEGIN = 1.2
"""How many times as soon blocks must come back before compressing begins."""
GAIN_TO_GO_ON = 1.0
"""And how many times as soon so that it does not end."""
WEIGHT = 0.1
"""Of the latest measure in an average."""


class CodecMode(StrEnum):
    """When a tier compresses what it writes. What it holds is read whatever this is."""

    NONE = "none"
    ALWAYS = "always"
    AUTO = "auto"
    """Where it pays, by measurement."""


class Coding:
    """The choice for one tier, of which `decoders` threads may decode at once."""

    def __init__(self, mode: CodecMode, decoders: int) -> None:
        self.mode = mode
        self.pays = False
        """By the last measures. Means nothing unless the mode is AUTO."""
        self._decoders = decoders
        self._writes = 0
        self._written_share: float | None = None
        """Stored ÷ raw bytes of what was compressed."""
        self._read_share: float | None = None
        """Stored ÷ raw bytes of all that was read."""
        self._decoded_share: float | None = None
        """Of the bytes that were read, how many were decoded."""
        self._decode_seconds: float | None = None
        """Of one thread, for a raw byte."""

    def choose(self, bandwidth: float | None) -> Codec:
        """Return how the next block is to be stored.

        `bandwidth` is that of reads: bytes of blocks, whatever was stored of them, a second.
        """
        match self.mode:
            case CodecMode.NONE:
                return Codec.RAW
            case CodecMode.ALWAYS:
                return Codec.SHUFFLE_ZSTD
            case CodecMode.AUTO:
                gain = self.gain(bandwidth)
                if gain is not None:
                    self.pays = gain >= (GAIN_TO_GO_ON if self.pays else GAIN_TO_BEGIN)
                sample = self._writes % SAMPLE_EVERY == 0
                self._writes += 1
                return Codec.SHUFFLE_ZSTD if self.pays or sample else Codec.RAW

    def gain(self, bandwidth: float | None) -> float | None:
        """Return how many times as soon blocks come back if compressed; None if unknown."""
        medium = self._medium_seconds(bandwidth)
        if medium is None or self._written_share is None or self._decode_seconds is None:
            return None
        return medium / (medium * self._written_share + self._decode_seconds / self._decoders)

    def encoded(self, raw: int, stored: int) -> None:
        """A write compressed so many bytes."""
        self._written_share = averaged(self._written_share, stored / raw, WEIGHT)

    def read(self, raw: int, stored: int, seconds: float) -> None:
        """A block was read; decoding it took so long, 0.0 if it was stored raw."""
        self._read_share = averaged(self._read_share, stored / raw, WEIGHT)
        decoded = 1.0 if seconds else 0.0
        self._decoded_share = averaged(self._decoded_share, decoded, WEIGHT)
        if seconds:
            self._decode_seconds = averaged(self._decode_seconds, seconds / raw, WEIGHT)

    def _medium_seconds(self, bandwidth: float | None) -> float | None:
        """Return what the medium alone takes for a stored byte.

        The bandwidth is of blocks as they came back, some of them compressed.
        """
        if bandwidth is None or self._read_share is None or self._decoded_share is None:
            return None
        decoding = self._decoded_share * (self._decode_seconds or 0.0) / self._decoders
        return max(1.0 / bandwidth - decoding, 0.0) / self._read_share
