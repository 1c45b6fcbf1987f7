"""LMCache's keys as block keys.

LMCache's native key is `model@rank@group@hash`, with `@salt` behind it where a request has one. A
block's key is the sha256 of all of it, so that no salt can be read from what kvtier logs or shows.
"""

from __future__ import annotations

import hashlib
import re

from ..core import BlockKey

HASH_DIGITS_AT_LEAST = 32
"""128 bits: hashes of 64, which LMCache also has, can be made to collide."""
WEAK = (
    "its keys have no hash of 128 bits or more, and shorter ones can be made to collide: start "
    "LMCache with --hash-algorithm blake3"
)
_KEY = re.compile(
    rf"[^@]+@[0-9a-f]{{1,16}}@[0-9a-f]{{1,16}}@[0-9a-f]{{{HASH_DIGITS_AT_LEAST},}}(@[^@]+)?"
)


def block_key(text: str) -> BlockKey | None:
    """Return the block key of LMCache's key, or None for one that kvtier does not store."""
    if _KEY.fullmatch(text) is None:
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
