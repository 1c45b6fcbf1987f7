"""The connector as on a GPU, over host memory: copies are carried out as late as they may be.

vLLM then holds requests back until their loads are reported, and a fence that is missing, or a
block that is given away too early, gives a wrong answer.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]  # for late_paging.py

from kvtier.connector import KVTierConnector
from kvtier.engine.paging import HostPaging
from late_paging import LatePaging

POLLS = 8
"""Times that a copy is asked for before it is there: vLLM takes about three steps for them."""


class LateConnector(KVTierConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._half.page_caches = lambda caches, blocks: LatePaging(
            HostPaging(caches, blocks), POLLS
        )
