"""The systems that are measured beside each other, by name.

Each is started, driven and stopped in the same way (`peer.py`), whatever keeps its blocks
(`base.Host`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

from ..rig import BLOCK_TOKENS
from .base import PeerError, Setup, Tiers
from .example import ExampleHost
from .kvtier import KVTierHost
from .lmcache import LMCacheHost
from .offloading import OffloadingHost
from .peer import MakeHost, Peer
from .peer import running as _running
from .plain import PlainHost

PEERS: Mapping[str, MakeHost] = {
    "kvtier": KVTierHost,
    "vllm": PlainHost,
    "example": ExampleHost,
    "offloading": OffloadingHost,
    "lmcache": LMCacheHost,
    "lmcache-32": partial(LMCacheHost, chunk=BLOCK_TOKENS),
}
"""`lmcache` has its default chunk of 256 tokens, `lmcache-32` the smallest that vLLM's block of 32
allows."""


def running(name: str, setup: Setup) -> contextlib.AbstractContextManager[Peer]:
    """Give the peer of that name, ready, in a temporary folder; it ends with the block."""
    return _running(name, PEERS[name], setup)


__all__ = ["PEERS", "Peer", "PeerError", "Setup", "Tiers", "running"]
