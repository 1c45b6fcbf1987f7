"""vLLM by itself: its prefix cache is all that it has."""

from __future__ import annotations

from .base import Host, Tiers


class PlainHost(Host):
    """Nothing beside the engine, whose prefix caching is on by default."""

    offers = frozenset({Tiers.DEVICE})
