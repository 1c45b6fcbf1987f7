"""What the dashboards show, one file for each. `python -m deploy.generate` writes them.

To add a panel, add it to a dashboard's file: a series or a label that does not exist stops the run.
There is no dashboard of tenants, because no metric is counted by tenant; `/v1/tenants` has their
totals.
"""

from __future__ import annotations

from .overview import OVERVIEW
from .tiers import TIERS
from .vllm import VLLM

DASHBOARDS = (OVERVIEW, TIERS, VLLM)
