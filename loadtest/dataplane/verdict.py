"""Where a curve stops to rise, and what is full there."""

from __future__ import annotations

from collections.abc import Sequence

from .points import Point

GAIN = 1.1
"""More engines that do less than this many times the requests are no gain."""
FULL = 0.9
"""Share from which on a core, or the machine, is called full."""


def stops(points: Sequence[Point]) -> str:
    """Return in a sentence where more engines bring nothing any more, and why."""
    for at, point in enumerate(points[:-1]):
        most = max(later.requests_per_second for later in points[at + 1 :])
        if most < GAIN * point.requests_per_second:
            return f"no gain beyond {_reached(point)}: {_full(points[at + 1])}."
    return f"still rises at {_reached(points[-1])}."


def _reached(point: Point) -> str:
    engines = "1 engine" if point.engines == 1 else f"{point.engines} engines"
    return f"{engines} ({point.requests_per_second:,.0f} requests/s)"


def _full(point: Point) -> str:
    """Return what is full at a point."""
    server, machine = f"{100 * point.server_core_share:.0f} %", f"{100 * point.machine_share:.0f} %"
    if point.server_core_share >= FULL:
        return f"the server's one core is full ({server})"
    if point.machine_share >= FULL:
        return f"all cores of the machine are busy ({machine}), the server's with {server}"
    return f"nothing is full (server {server} of a core, machine {machine}): they wait"
