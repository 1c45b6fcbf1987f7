"""vLLM's ExampleConnector, which keeps each prompt's KV in files, a folder a prompt.

It finds a prompt only as a whole: one that goes on beyond a cached one is computed from its start,
and whoever asks two prompts with a beginning in common gets nothing from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from .base import Host, Tiers


class ExampleHost(Host):
    """A directory. There is no server and no memory of its own."""

    offers = frozenset({Tiers.DISK})

    def start(self) -> None:
        """Make the directory."""
        self.place.blocks.mkdir(exist_ok=True)

    def settings(self) -> Mapping[str, object]:
        """Return why its engines have options of their own."""
        return {"whole_prompts": "it stores what a prompt's first step computes"}

    def engine_options(self) -> list[str]:
        """Return the connector's configuration, and steps that hold a whole prompt.

        It stores a prompt in the step that begins it, and fails at what later steps computed:
        prompts must not be cut into chunks.
        """
        config = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self.place.blocks)},
        }
        tokens = str(self.place.setup.model_tokens)
        steps = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", tokens]
        return [*steps, "--kv-transfer-config", json.dumps(config)]

    def stored(self) -> float:
        """Return the number of files."""
        return sum(1 for _ in self.place.blocks.rglob("*"))
