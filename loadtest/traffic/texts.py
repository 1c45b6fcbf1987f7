"""What prompts are made of: token ids drawn from a seed, or real text by a model's tokenizer.

A piece is asked for by a name. Equal names give equal tokens, and the tokens of different names
differ from the first few on, so that no engine's block of one is a block of the other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from .requests import TrafficError

LICENCES = Path("/usr/share/common-licenses")
MODULES = (
    "argparse", "asyncio.base_events", "collections", "datetime", "decimal", "difflib", "doctest",
    "email.message", "fractions", "functools", "heapq", "inspect", "ipaddress", "logging",
    "pathlib", "pickletools", "random", "statistics", "subprocess", "tarfile", "textwrap",
    "threading", "turtle", "typing", "unittest.mock", "zipfile",
)  # fmt: skip
"""Of the standard library: those that say much about themselves."""
TEXT_BYTES = 400_000
"""Of real text: enough that prompts differ, and tokenised in a second."""
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000
"""Of most vocabularies: no special tokens."""
MARK_CHARACTERS = 12


class Writer(Protocol):
    """Writes pieces of prompts."""

    seed: int

    def write(self, name: str, tokens: int) -> tuple[int, ...]:
        """Return a piece of so many tokens. Equal names give equal pieces."""
        ...


class SeededWriter:
    """Token ids drawn from a seed, for any model with such a vocabulary."""

    def __init__(self, seed: int, first: int = FIRST_TOKEN, last: int = LAST_TOKEN) -> None:
        """Tokens are at least `first` and below `last`."""
        if not 0 <= first < last:
            raise TrafficError(f"No token is at least {first} and below {last}.")
        self.seed = seed
        self._tokens = range(first, last)

    def write(self, name: str, tokens: int) -> tuple[int, ...]:
        """Return a piece of so many tokens. Equal names give equal pieces."""
        generator = random.Random(f"{self.seed}/{name}")
        return tuple(generator.choices(self._tokens, k=tokens))


class TextWriter:
    """Real text: licences, and what Python's standard library says about itself.

    Each piece begins with a mark of its own, and goes on at a place in the text that its name
    tells.
    """

    def __init__(self, seed: int, model: Path) -> None:
        """Read the tokenizer of a model's folder and tokenise the text. Takes about a second.

        Raises TrafficError if the folder has none.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TrafficError("Real text needs tokenizers: install kvtier[text].") from None
        file = model / "tokenizer.json"
        if not file.is_file():
            raise TrafficError(f"{model} has no tokenizer.json: name the folder of a model.")
        self.seed = seed
        self._tokenizer = Tokenizer.from_file(str(file))
        self._text = self._encode("\n\n".join(_texts()))

    def write(self, name: str, tokens: int) -> tuple[int, ...]:
        """Return a piece of so many tokens. Equal names give equal pieces."""
        mark = hashlib.sha256(f"{self.seed}/{name}".encode()).hexdigest()
        head = self._encode(f"[{mark[:MARK_CHARACTERS]}] ")
        begin = int(mark, 16) % len(self._text)
        piece = head + self._text[begin : begin + tokens]
        while len(piece) < tokens:
            piece += self._text[:tokens]
        return tuple(piece[:tokens])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _texts() -> Iterator[str]:
    """Yield real texts that this system has, up to TEXT_BYTES."""
    left = TEXT_BYTES
    for text in _all_texts():
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _all_texts() -> Iterator[str]:
    for file in sorted(LICENCES.glob("*")) if LICENCES.is_dir() else []:
        if not file.is_symlink():
            yield file.read_text("utf-8", "replace")
    for name in MODULES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            yield Path(found.origin).read_text("utf-8", "replace")
