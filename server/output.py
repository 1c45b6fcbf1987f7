"""How the commands print: for a person, or as JSON for programs."""

from __future__ import annotations

import msgspec
from rich.console import Console


def plain_console() -> Console:
    """Return a console that takes texts as they are."""
    return Console(highlight=False, markup=False, emoji=False)


def print_json(found: object) -> None:
    """Print anything that msgspec can encode, indented."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    plain_console().print(text, soft_wrap=True)
