"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and less well than it could."""
    PROBLEM = "problem"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing, and what to do about it unless it is well."""

    check: str
    level: Level
    said: str
    fix: str = ""


def well(check: str, said: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(check, Level.OK, said)


def warning(check: str, said: str, fix: str) -> Finding:
    """Return that something could be better."""
    return Finding(check, Level.WARNING, said, fix)


def problem(check: str, said: str, fix: str) -> Finding:
    """Return that something does not work."""
    return Finding(check, Level.PROBLEM, said, fix)
