"""Prompts as a person gives them to a command: text, token ids or block keys. Blocks."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from .errors import KVTierError

_NUMBERS = re.compile(r"[\s,\[\]\d]*")
Body: TypeAlias = "dict[str, str | float | bool | list[int] | list[str]]"


class PromptError(KVTierError):
    """What was given is no prompt."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt, given in one way."""

    model: Path | None = None
    text_file: Path | None = None
    tokens_file: Path | None = None
    keys: list[str] = field(default_factory=list)
    namespace: str | None = None
    salt: str | None = None
    hash_seed: str | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return bool(self.text_file or self.tokens_file or self.keys)

    def body(self) -> Body:
        """Return the fields of a request. Raises PromptError."""
        body: Body = {
            name: value
            for name, value in (
                ("namespace", self.namespace),
                ("salt", self.salt),
                ("hash_seed", self.hash_seed),
            )
            if value is not None
        }
        if self.given:
            body |= self._prompt()
        return body

    def _prompt(self) -> Body:
        ways = [self.text_file is not None, self.tokens_file is not None, bool(self.keys)]
        if sum(ways) > 1:
            raise PromptError("Give a prompt in one way: --text-file, --tokens-file or --key")
        if self.keys:
            return {"keys": [key.lower() for key in self.keys]}
        if self.tokens_file is not None:
            return {"tokens": read_tokens(self.tokens_file)}
        assert self.text_file is not None, "one of them is given"
        if self.model is None:
            raise PromptError("--text-file needs --model, the folder with its tokenizer.json")
        return {"tokens": tokenize(self.model, _read(self.text_file))}


def read_tokens(file: Path) -> list[int]:
    """Return token ids from a file with a JSON list, or with numbers apart. Raises PromptError."""
    text = _read(file)
    if not _NUMBERS.fullmatch(text):
        raise PromptError(f"{file} is no list of token ids, such as [1, 2, 3]")
    return [int(number) for number in re.findall(r"\d+", text)]


def tokenize(model: Path, text: str) -> list[int]:
    """Return the token ids of a text, as the model's tokenizer.json makes them. Raises PromptError.

    Special tokens are added as in vLLM's completions; a chat's template is not applied.
    """
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise PromptError(
            "Texts need the library tokenizers, which is not installed: pip install "
            "'kvtier[text]', or give token ids with --tokens-file (vLLM's /tokenize tells them)"
        ) from None
    file = model / "tokenizer.json" if model.is_dir() else model
    if not file.is_file():
        raise PromptError(f"{file} does not exist: --model names a folder with a tokenizer.json")
    try:
        ids = library.Tokenizer.from_file(str(file)).encode(text).ids
    except Exception as error:  # The library raises nothing narrower.
        raise PromptError(f"{file} can't be used ({error})") from error
    return [int(one) for one in ids]


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file} can't be read: {error}") from error
