"""Makes `deploy.generate`, `loadtest` and the real Redis servers importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent / "tiers")]
