"""Whether Redis answers as the settings say, and what it should be set to."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from ..config import Settings
from ..errors import SettingsError
from ..tiers import redis
from ..tiers.base import TierFault
from .findings import Finding, problem, warning, well

CHECK = "Redis tier"
RUNBOOK = 'See "Setting up Redis for kvtier" in docs/operations.md.'


def redis_tier(settings: Settings) -> Finding:
    """Connect as the tier does, and pass on what it says. Blocks for some `timeout_seconds`."""
    if settings.redis.url is None:
        return well(CHECK, "The settings have none (redis.url).")
    where = redis.shown_url(settings.redis.url)
    began = time.monotonic()
    try:
        store = _store(settings, settings.redis.url)
        with _said() as lines, contextlib.closing(store):
            store.open()
    except (TierFault, SettingsError) as error:
        return problem(CHECK, f"{error}.", RUNBOOK)
    took = f"{where} answers, after {(time.monotonic() - began) * 1e3:.0f} ms"
    if lines:
        return warning(CHECK, f"{took}; it should be set up otherwise.", f"{'; '.join(lines)}.")
    return well(CHECK, f"{took}, and is set up well as far as may be seen.")


def _store(settings: Settings, url: str) -> redis.RedisStore:
    section = settings.redis
    return redis.RedisStore(
        redis.RedisOptions(
            url=url,
            username=section.username,
            password=settings.redis_password(),
            timeout_seconds=section.timeout_seconds,
            ca_file=section.ca_file,
            cluster=section.cluster,
        )
    )


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Collect what the store logs, which is its advice, and keep it from stderr."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage().partition("): ")[2])

    log, collector = logging.getLogger(redis.__name__), Collector()
    log.addHandler(collector)
    log.propagate = False
    try:
        yield lines
    finally:
        log.propagate = True
        log.removeHandler(collector)
