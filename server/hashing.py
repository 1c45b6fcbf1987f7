"""Block keys of a prompt, byte for byte as vLLM 0.32 computes them.

A block's key is the hash of its parent's key, its tokens and what else tells requests apart. The
parent of a first block is the hash of a seed; a request's `cache_salt` counts in its first block
alone, and so in all that follow it. Prompts with LoRA, images or embeddings have more in their
keys and can't be told here. Standard library only; nothing here blocks.
"""

from __future__ import annotations

import hashlib
import pickle  # Nothing is unpickled.
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from .core import BlockKey

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed where PYTHONHASHSEED is not set."""
KNOWN_SEEDS = (DEFAULT_SEED, "0")
"""Seeds that are tried without being told."""

Extra: TypeAlias = tuple[tuple[str, str], ...] | None
"""What vLLM adds to a block's tokens: here, at most the salt."""
Content: TypeAlias = tuple[BlockKey, tuple[int, ...], Extra]
"""Parent, tokens, extra keys."""


def find_seed(digest: str, given: str | None) -> str | None:
    """Return the seed that a manifest's `hash_seed` is the digest of; None if none of these is.

    A digest can't be turned round: an engine's PYTHONHASHSEED must be `given`, or be a known one.
    """
    seeds = KNOWN_SEEDS if given is None else (given,)
    return next((seed for seed in seeds if seed_digest(seed) == digest), None)


def seed_digest(seed: str) -> str:
    """Return what a manifest holds of a seed."""
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def block_keys(
    algorithm: str, seed: str, tokens: Sequence[int], block_tokens: int, salt: str | None = None
) -> Iterator[BlockKey]:
    """Yield the keys of the whole blocks of a prompt, head first.

    `algorithm` is one of `core.SHARED_HASHES`; tokens are not negative.
    """
    encode = _ENCODERS[algorithm]
    parent = hashlib.sha256(encode(seed)).digest()
    # A copy: pickle writes one object that comes twice in another way than two equal ones.
    extra: Extra = (("cache_salt", salt.encode().decode()),) if salt else None
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        content = parent, tuple(tokens[at : at + block_tokens]), extra
        parent = hashlib.sha256(encode(content)).digest()
        yield parent
        extra = None


def _pickled(content: str | Content) -> bytes:
    return pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(content: str | Content) -> bytes:
    """Return what cbor2 makes of it in its canonical form (RFC 8949, 4.2)."""
    if isinstance(content, str):
        return _cbor_text(content)
    parent, tokens, extra = content
    parts = [_head(_ARRAY, 3), _head(_BYTES, len(parent)), parent, _head(_ARRAY, len(tokens))]
    parts += [_head(_NUMBER, token) for token in tokens]
    if extra is None:
        parts.append(_NULL)
    else:
        parts.append(_head(_ARRAY, len(extra)))
        for name, value in extra:
            parts += [_head(_ARRAY, 2), _cbor_text(name), _cbor_text(value)]
    return b"".join(parts)


def _cbor_text(text: str) -> bytes:
    coded = text.encode()
    return _head(_TEXT, len(coded)) + coded


def _head(major: int, value: int) -> bytes:
    """Return the first bytes of an item: its kind, and a number in as few bytes as it takes."""
    if value < 24:
        return _WIDTHS[1](major | value)
    if value < 1 << 8:
        return _WIDTHS[2](major | 24, value)
    if value < 1 << 16:
        return _WIDTHS[3](major | 25, value)
    if value < 1 << 32:
        return _WIDTHS[5](major | 26, value)
    return _WIDTHS[9](major | 27, value)


_NUMBER, _BYTES, _TEXT, _ARRAY = 0 << 5, 2 << 5, 3 << 5, 4 << 5
_NULL = b"\xf6"
_WIDTHS = {
    struct.calcsize(layout): struct.Struct(layout).pack
    for layout in (">B", ">BB", ">BH", ">BI", ">BQ")
}
_ENCODERS: dict[str, Callable[[str | Content], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
