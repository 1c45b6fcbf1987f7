"""An L2 adapter for LMCache's multiprocess mode: its chunks lie in kvtier's tiers.

LMCache 0.5.6 loads it by name (`"type": "native_plugin"`, `"module_path":
"kvtier.lmcache_adapter"`, `"class_name": "KVTierAdapter"`), calls it from several threads, and
reads its descriptor in one. Bytes go between LMCache's buffers and kvtier's slots, both mapped
here, and never through a socket. No call raises for what the server does, and none blocks: what
can't be stored is reported as failed, what can't be loaded as missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from .lmcache.batches import Operation
from .lmcache.lanes import Completion, Lanes
from .lmcache.options import read_options


class KVTierAdapter:
    """What LMCache's `native_plugin` calls a connector. `parameters` are its `adapter_params`."""

    def __init__(self, **parameters: object) -> None:
        """Begin, with or without a server. Raises EngineError for parameters that do not fit."""
        self._lanes = Lanes(read_options(parameters))

    def event_fd(self) -> int:
        """Return the descriptor that is readable while completions wait to be drained."""
        return self._lanes.event_fd

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Store values. The buffers are the adapter's until the completion of this number."""
        return self._lanes.submit(Operation.SET, keys, views)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Load values into buffers of just their sizes. The completion says which came."""
        return self._lanes.submit(Operation.GET, keys, views)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask which values there are. This is their use: it is what hit ratios count."""
        return self._lanes.submit(Operation.EXISTS, keys, ())

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Drop values from all tiers. The completion says which are gone now."""
        return self._lanes.submit(Operation.DELETE, keys, ())

    def drain_completions(self) -> list[Completion]:
        """Return what ended since the last call: number, whether it went well, error, per key."""
        return self._lanes.drain()

    def close(self) -> None:
        """End within seconds: what is copied now is finished, what waits fails."""
        self._lanes.close()
