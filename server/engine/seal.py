"""Checksums of shards, for engines that verify what they load.

The seal of a shard lies right behind its bytes: xxh3-128 of them, seeded with the start of the
block's key, so that neither changed bytes nor another block's bytes pass. It costs a read of the
shard, at some tens of GB/s.
"""

from __future__ import annotations

import torch
import xxhash

SEAL_BYTES = 16


def seal(shard: torch.Tensor, trailer: torch.Tensor, seed: int) -> None:
    """Write the seal of `shard` (uint8 [bytes]) into `trailer` (uint8 [16])."""
    digest = bytearray(_digest(shard, seed))
    trailer.copy_(torch.frombuffer(digest, dtype=torch.uint8))


def sound(shard: torch.Tensor, trailer: torch.Tensor, seed: int) -> bool:
    """Return whether `trailer` is the seal of `shard` as it is now."""
    return bytes(trailer.numpy()) == _digest(shard, seed)


def _digest(shard: torch.Tensor, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(shard.numpy(), seed)
