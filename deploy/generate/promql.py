"""Reads from a PromQL expression which series and labels it uses. `promtool` judges the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

AGGREGATIONS = frozenset({
    "avg", "bottomk", "count", "count_values", "group", "max", "min", "quantile", "stddev",
    "stdvar", "sum", "topk",
})  # fmt: skip
RATES = frozenset({"increase", "irate", "rate", "resets"})
"""Functions that are for counters only."""
WORDS = frozenset({"and", "bool", "end", "inf", "nan", "offset", "or", "start", "unless"})
LABEL_LISTS = frozenset({"by", "group_left", "group_right", "ignoring", "on", "without"})

_TOKEN = re.compile(
    r"""\s*(?: (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<number>\$?[0-9][0-9a-zA-Z.]*)
    | (?P<range>\[[^\]]*\])
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>@]))""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Selector:
    """One series that an expression reads; `rated` if a rate is taken of it."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""
    rated: bool

    def __str__(self) -> str:
        """Return the selector as PromQL."""
        matchers = (f'{label}{sign}"{value}"' for label, sign, value in self.matchers)
        return f"{self.name}{{{', '.join(matchers)}}}"


@dataclass(slots=True)
class Usage:
    """What an expression uses."""

    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)
    """All labels in lists."""
    dropped: set[str] = field(default_factory=set)
    """Labels that the result does not have."""
    kept: set[str] | None = None
    """The only labels that the result has; None where that is not said."""


def usage(expression: str) -> Usage:
    """Return what an expression uses."""
    return _Reader(expression).read()


class _Reader:
    def __init__(self, expression: str) -> None:
        self._tokens = list(_tokens(expression))
        self._at = 0
        self._found = Usage()

    def read(self) -> Usage:
        previous: list[str] = ["", ""]
        while self._at < len(self._tokens):
            kind, token = self._take()
            if kind == "name":
                self._name(token, rated=previous[-1] == "(" and previous[-2] in RATES)
            previous = [previous[-1], token]
        return self._found

    def _name(self, name: str, *, rated: bool) -> None:
        if name in LABEL_LISTS:
            self._labels(name)
        elif name in AGGREGATIONS:
            if self._peek() not in ("by", "without"):
                self._found.kept = set()
        elif self._peek() == "(":
            if name == "histogram_quantile":
                self._found.dropped.add("le")
        elif name not in WORDS:
            self._found.selectors.append(Selector(name, tuple(self._matchers()), rated))

    def _labels(self, word: str) -> None:
        if self._peek() != "(":
            return
        listed: set[str] = set()
        while (listing := self._take()[1]) != ")":
            if listing not in "(,":
                listed.add(listing)
        self._found.grouping |= listed
        if word == "without":
            self._found.dropped |= listed
        elif word == "by":
            self._found.kept = (self._found.kept or set()) | listed

    def _matchers(self) -> Iterator[tuple[str, str, str]]:
        if self._peek() != "{":
            return
        self._take()
        while self._peek() != "}":
            label, operator, value = (self._take()[1] for _ in range(3))
            yield label, operator, value[1:-1]
            if self._peek() == ",":
                self._take()
        self._take()

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    text = expression.strip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"{text[at:]!r} in {text!r} can't be read.")
        at = found.end()
        yield found.lastgroup, found[found.lastgroup]
