"""What the dashboards show, one file for each. `python -m deploy.generate` writes them.

To add a panel, add it to a dashboard's file: a series or a label that does not exist stops the run.
"""

from __future__ import annotations

from .overview import OVERVIEW
from .tenants import TENANTS
from .tiers import TIERS
from .vllm import VLLM

DASHBOARDS = (OVERVIEW, TIERS, TENANTS, VLLM)
