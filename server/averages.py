"""The moving average that everything measured here is kept as."""

from __future__ import annotations


def averaged(before: float | None, latest: float, weight: float) -> float:
    """Return the average after one more measure; `before` is None if that is the first."""
    return latest if before is None else before + weight * (latest - before)
