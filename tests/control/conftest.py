"""Fixtures that run kvtier as a user would."""

import pytest
from servers import run_kvtier


@pytest.fixture
def kvtier():
    """Run a command to its end."""
    return run_kvtier
