"""A connector that promises two blocks of every prompt and never brings them."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

PROMISED = 2
"""Blocks of every prompt that are said to be there."""
LOST = set()
"""Device blocks promised in this step. Both halves live in one process."""


class BrokenMetadata(KVConnectorMetadata):
    """Nothing to tell."""


class BrokenConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._tokens = PROMISED * vllm_config.cache_config.block_size

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        promising = num_computed_tokens == 0 and request.num_tokens > self._tokens
        return (self._tokens if promising else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            LOST.update(blocks.get_block_ids()[0][:PROMISED])

    def build_connector_meta(self, scheduler_output):
        return BrokenMetadata()

    def get_block_ids_with_load_errors(self):
        lost = set(LOST)
        LOST.clear()
        return lost

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        """Nothing comes."""

    def wait_for_layer_load(self, layer_name):
        """Nothing comes."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Nothing is kept."""

    def wait_for_save(self):
        """Nothing is kept."""
