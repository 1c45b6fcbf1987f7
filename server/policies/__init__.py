"""Eviction policies by name."""

from .arc import ARC
from .auto import Auto
from .base import EvictionPolicy, Known, PolicyState
from .fifo import FIFO
from .gdsf import GDSF
from .ghosts import Ghosts
from .lru import LRU
from .mq import MQ
from .s3fifo import S3FIFO
from .slru import SLRU

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Auto, LRU, MQ, SLRU, ARC, S3FIFO, GDSF, FIFO)
}

__all__ = ["LRU", "POLICIES", "EvictionPolicy", "Ghosts", "Known", "PolicyState"]
