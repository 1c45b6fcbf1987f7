"""Choices and expressions that several panels have."""

from __future__ import annotations

from ..panels import Query, Variable

SERVER = Variable("server", "Server", "kvtier_build_info", "instance")
ENGINE = Variable("engine", "Engine", "vllm:num_requests_running", "instance")
MODEL = Variable("model", "Model", "vllm:num_requests_running", "model_name")

AT = 'instance=~"$server"'
"""Of the chosen servers."""
OF = 'instance=~"$engine", model_name=~"$model"'
"""Of the chosen engines and models."""
LOOKUP = 'op="lookup"'
DEVICE = 'tier="device"'


def rate(name: str, *matchers: str, at: str = AT) -> str:
    """Return how much a counter rises in a second."""
    return f"rate({name}{{{', '.join([at, *matchers])}}}[$__rate_interval])"


def each(label: str, expression: str) -> str:
    """Return the sum over everything but one or several labels."""
    return f"sum by ({label}) ({expression})"


def quantile(share: float, histogram: str, *matchers: str, at: str = AT, by: str = "") -> str:
    """Return a quantile over all servers or engines together."""
    labels = f"{by}, le" if by else "le"
    buckets = each(labels, rate(f"{histogram}_bucket", *matchers, at=at))
    return f"histogram_quantile({share}, {buckets})"


def quantiles(histogram: str, *matchers: str, at: str = AT) -> list[Query]:
    """Return the usual three."""
    return [
        Query(quantile(share, histogram, *matchers, at=at), f"p{share * 100:.0f}")
        for share in (0.5, 0.95, 0.99)
    ]
