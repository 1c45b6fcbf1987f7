"""Where prompt tokens came from, by vLLM's own counters: the same for every cache behind it.

A cache that names its tiers to vLLM (`vllm:prompt_tokens_cached_by_source_total`) is split by them;
of any other one it is known that the tokens came through its connector. Where a kvtier server's
metrics are read beside the engine's, its own count splits what came through the connector further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx
import msgspec

from .web import new_client

PROMPT = "vllm:prompt_tokens_total"
DEVICE = "vllm:prefix_cache_hits_total"
CONNECTOR = "vllm:external_prefix_cache_hits_total"
BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
BY_TIER = "kvtier_tokens_hit_total"
ENGINE_PREFIX = "kvtier_engine_"
SCRAPE_SECONDS = 30.0

Series = tuple[str, str]
"""A metric's name and its labels as they stand there."""
Totals = Mapping[Series, float]


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompts during a run, and where they came from."""

    prompt: int
    """Of all requests that began to be answered."""
    device: int
    """From the engine's own cache (L0)."""
    connector: int
    """From whatever is behind the engine's connector."""
    by_source: dict[str, int]
    """Cached tokens by what vLLM calls their source: device, host, disk, external, …"""
    by_tier: dict[str, int]
    """Tokens that each of a kvtier server's tiers served, by its own count; empty for others."""
    engine: dict[str, float]
    """What kvtier's connector counts in the engine, by metric; empty for others."""

    @property
    def computed(self) -> int:
        """Tokens that came from no cache."""
        return self.prompt - self.device - self.connector

    @property
    def tiers(self) -> dict[str, int]:
        """Cached tokens by tier, as far as vLLM was told."""
        cached = {"device": self.device, "connector": self.connector}
        below = {name: tokens for name, tokens in self.by_tier.items() if name != "device"}
        if sum(below.values()) == self.connector:
            cached = {"device": self.device, **below}
        elif sum(self.by_source.values()) == self.device + self.connector:
            cached = self.by_source
        return {name: tokens for name, tokens in cached.items() if tokens}


async def totals(urls: Sequence[str]) -> Totals | None:
    """Return all counters of some engines, added up; None if one of them tells none."""
    found: dict[Series, float] = {}
    async with new_client(httpx.Timeout(SCRAPE_SECONDS)) as http:
        for url in urls:
            try:
                answer = await http.get(url.rstrip("/") + "/metrics")
            except httpx.HTTPError:
                return None
            if answer.status_code != 200:
                return None
            for series, value in read_series(answer.text):
                found[series] = found.get(series, 0.0) + value
    return found


def read_series(text: str) -> list[tuple[Series, float]]:
    """Return the series of an exposition in Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        try:
            found.append(((name, labels.rstrip("}")), float(value)))
        except ValueError:
            continue
    return found


def sources_since(before: Totals | None, after: Totals | None) -> Sources | None:
    """Return what was counted in between; None if that is not known.

    A counter that fell belongs to an engine that started anew: it counts from 0.
    """
    if before is None or after is None or not any(name == PROMPT for name, _ in after):
        return None
    grown = {
        series: value - before.get(series, 0.0) if value >= before.get(series, 0.0) else value
        for series, value in after.items()
    }
    return Sources(
        prompt=_sum(grown, PROMPT),
        device=_sum(grown, DEVICE),
        connector=_sum(grown, CONNECTOR),
        by_source=_by(grown, BY_SOURCE, "source"),
        by_tier=_by(grown, BY_TIER, "tier"),
        engine=_engine(grown),
    )


def _sum(grown: Totals, name: str) -> int:
    return round(sum(value for (each, _), value in grown.items() if each == name))


def _by(grown: Totals, name: str, label: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for (each, labels), value in grown.items():
        if each == name:
            key = _label(labels, label)
            found[key] = found.get(key, 0) + round(value)
    return found


def _engine(grown: Totals) -> dict[str, float]:
    found: dict[str, float] = {}
    for (name, labels), value in grown.items():
        if name.startswith(ENGINE_PREFIX) and name.endswith("_total"):
            key = f"{name} {_label(labels, 'reason')}".strip()
            found[key] = found.get(key, 0.0) + value
    return {name: value for name, value in sorted(found.items()) if value}


def _label(labels: str, name: str) -> str:
    return labels.partition(f'{name}="')[2].partition('"')[0]
