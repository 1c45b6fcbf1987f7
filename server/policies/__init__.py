"""Eviction policies by name."""

from .base import EvictionPolicy, PolicyState
from .lru import LRU

POLICIES: dict[str, type[EvictionPolicy]] = {LRU.name: LRU}

__all__ = ["LRU", "POLICIES", "EvictionPolicy", "PolicyState"]
