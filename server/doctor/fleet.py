"""A running server and its engines: whether it does well, and what keeps engines from sharing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations

from .. import __version__
from ..asking import AskError, read
from ..core import Manifest, Tier
from ..stats import Stats
from ..tier_readings import LowerDetails, NamespaceReading, TierReading
from .findings import Finding, problem, warning, well

FIELDS_AT_MOST = 3
"""Namespaces that differ in more are not meant to share."""
PAIRS_AT_MOST = 10
_FIXES = {
    "weights": "the same model files, and the same options that change the model",
    "quantization": "the same --quantization",
    "dtype": "the same --dtype",
    "kv_dtype": "the same --kv-cache-dtype",
    "block_tokens": "the same --block-size",
    "layout": "the same attention backend and VLLM_KV_CACHE_LAYOUT",
    "shard_bytes": "the same --tensor-parallel-size and --block-size",
    "shards": "the same --tensor-parallel-size",
    "hash_algorithm": "the same --prefix-caching-hash-algo",
    "hash_seed": "the same PYTHONHASHSEED, or none",
    "format_version": "the same version of kvtier",
    "checksum": "the same verify_loads",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """What a server that runs says."""

    stats: Stats
    tiers: list[TierReading]
    namespaces: list[NamespaceReading]

    def used(self, tier: Tier) -> int | None:
        """Return the bytes in one of its tiers, or None if it has no such tier."""
        return next((each.used_bytes for each in self.tiers if each.tier is tier), None)


def ask_server(url: str, headers: Mapping[str, str]) -> Running:
    """Return what the server at `url` says. Blocks. Raises AskError."""
    return Running(
        read(url, "/v1/stats", Stats, headers),
        read(url, "/v1/tiers", list[TierReading], headers),
        read(url, "/v1/namespaces", list[NamespaceReading], headers),
    )


def absent(error: AskError, *, expected: bool) -> Finding:
    """Return what it means that no server could be asked."""
    said = f"{str(error).rstrip('.')}."
    if expected or error.status:
        return problem("server", said, "Start the server, or name its address and its token.")
    return well("server", said)


def server(running: Running, url: str) -> list[Finding]:
    """Return how a server does."""
    found = [well("server", f"kvtier {running.stats.version} answers at {url}.")]
    if running.stats.version != __version__:
        said = f"The server at {url} is kvtier {running.stats.version}, and this is {__version__}."
        found = [warning("server", said, "Install the same version for both, and restart.")]
    if not running.stats.ready:
        said = "Its memory is still being allocated: fewer blocks can be kept."
        found.append(warning("server", said, "Wait; a terabyte takes a few minutes."))
    lowers = [(each.tier, each.lower) for each in running.tiers if each.lower is not None]
    return found + [_lower(tier, lower) for tier, lower in lowers]


def sharing(namespaces: Sequence[NamespaceReading]) -> list[Finding]:
    """Return the pairs that differ in so few fields that they are likely meant to share."""
    apart = []
    for one, other in combinations(namespaces, 2):
        fields = _differing(one.manifest, other.manifest)
        related = not {"model", "weights"} <= set(fields)
        if related and len(fields) <= FIELDS_AT_MOST:
            apart.append((len(fields), _pair(one, other, fields)))
    nearest = sorted(apart, key=lambda pair: pair[0])[:PAIRS_AT_MOST]
    if nearest:
        return [finding for _, finding in nearest]
    return [well("sharing", f"{len(namespaces)} namespaces; none is nearly the same as another.")]


def _lower(tier: Tier, lower: LowerDetails) -> Finding:
    if lower.up:
        return well("server", f"The {tier} tier is up.")
    said = f"The {tier} tier is left alone (breaker {lower.breaker}): no block comes from it."
    return problem("server", said, "The server's log says why; it comes back by itself.")


def _pair(one: NamespaceReading, other: NamespaceReading, fields: Sequence[str]) -> Finding:
    values = [
        f"{name} ({getattr(one.manifest, name)} and {getattr(other.manifest, name)})"
        for name in fields
    ]
    fixes = [_FIXES.get(name, f"the same {name}") for name in fields]
    return warning(
        "sharing",
        f"Engines of {one.digest[:12]} and {other.digest[:12]} ({one.manifest.model}) share "
        f"nothing, because of {', '.join(values)}.",
        f"If they should, give both {'; '.join(dict.fromkeys(fixes))}.",
    )


def _differing(one: Manifest, other: Manifest) -> list[str]:
    names = [field.name for field in dataclasses.fields(Manifest)]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
