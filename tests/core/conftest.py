"""Lets a machine build on another test file's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
