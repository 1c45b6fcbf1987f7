"""`kvtier tiers` and `kvtier audit`: read and change settings of a running server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlencode

import msgspec
import yaml
from msgspec.structs import asdict
from rich.table import Table

from .asking import Server
from .audit import Entry
from .errors import SettingsError
from .output import plain_console, print_json
from .sections import Scalar, Section, Value

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
GUARD_EXAMPLE = "drop=0.05,within=10m"


class Settings(msgspec.Struct, frozen=True):
    """The answer of `/v1/settings`."""

    version: int
    settings: dict[str, Section | Scalar]
    changed: dict[str, Value]
    live: list[str]

    def value(self, key: str) -> Value | list[str]:
        """Return the value of a setting by its dotted key."""
        section, _, name = key.partition(".")
        values = self.settings[section]
        return values[name] if isinstance(values, dict) else values


class Changed(msgspec.Struct, frozen=True):
    """The answer to a change."""

    version: int
    changes: dict[str, tuple[Value, Value]]
    evict_bytes: dict[str, int]
    audit: int | None
    dry_run: bool


class AuditPage(msgspec.Struct, frozen=True):
    """The answer of `/v1/audit`."""

    entries: list[Entry]
    before: int | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A change, as the command line words it."""

    assignments: Sequence[str]
    guard: str | None = None
    dry_run: bool = False
    version: int | None = None


def show_settings(server: Server, *, as_json: bool) -> None:
    """Print the settings that can be changed, and which were. Raises AskError."""
    found = server.ask(Settings, "GET", "/v1/settings")
    table = Table(title=f"settings, version {found.version}", title_justify="left")
    for column in ("setting", "value", "changed at run time"):
        table.add_column(column)
    for key in found.live:
        table.add_row(key, _text(found.value(key)), "yes" if key in found.changed else "")
    if as_json:
        print_json(found)
    else:
        plain_console().print(table)


def change_settings(server: Server, wanted: Wanted, *, as_json: bool) -> None:
    """Change settings, all or none. Raises AskError, SettingsError."""
    body: dict[str, object] = {"changes": parse_assignments(wanted.assignments)}
    if wanted.guard is not None:
        body["guard"] = parse_guard(wanted.guard)
    path = "/v1/settings?dry_run=true" if wanted.dry_run else "/v1/settings"
    version = "*" if wanted.version is None else f'"{wanted.version}"'
    done = server.ask(Changed, "PATCH", path, body, version)
    print_change(done, as_json=as_json)


def print_change(done: Changed, *, as_json: bool) -> None:
    """Print what became of a change."""
    if as_json:
        print_json(done)
    else:
        plain_console().print("\n".join(_told_of(done)))


def show_audit(server: Server, *, limit: int, before: int | None, as_json: bool) -> None:
    """Print who changed what when, and what followed. Raises AskError."""
    query = urlencode({"limit": limit} | ({} if before is None else {"before": before}))
    found = server.ask(AuditPage, "GET", f"/v1/audit?{query}")
    table = Table()
    for column in ("entry", "when (UTC)", "who", "what", "changes, and what followed"):
        table.add_column(column)
    for entry in found.entries:
        when = datetime.fromtimestamp(entry.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        what = f"{entry.what} of {entry.of}" if entry.of else entry.what
        table.add_row(str(entry.id), when, entry.who, what, _told(entry))
    if as_json:
        print_json({"entries": [asdict(entry) for entry in found.entries], "before": found.before})
    else:
        plain_console().print(table)


def parse_assignments(assignments: Sequence[str]) -> dict[str, Value]:
    """Return the changes that texts such as "disk.capacity=200GiB" ask for.

    Values are read as in a settings file. Raises SettingsError.
    """
    changes: dict[str, Value] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f'"{text}" is no setting with a value: write host.policy=lru.')
        read: object = yaml.safe_load(value) if value.strip() else None
        if not isinstance(read, str | int | float | None) or isinstance(read, bool):
            read = value
        changes[key.strip()] = read
    return changes


def parse_guard(text: str) -> dict[str, float]:
    """Return the guard that a text such as "drop=0.05,within=10m" asks for.

    Raises SettingsError.
    """
    names = {"drop": "max_drop", "within": "within_seconds", "tokens": "least_tokens"}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        duration = _DURATION.fullmatch(value)
        try:
            number = (
                float(duration[1]) * _SECONDS[duration[2]]
                if duration is not None and name == "within"
                else float(value)
            )
            found[names[name]] = int(number) if name == "tokens" else number
        except (KeyError, ValueError):
            raise SettingsError(
                f'"{part}" is no part of a guard: write for example --guard {GUARD_EXAMPLE}.'
            ) from None
    if "max_drop" not in found:
        raise SettingsError(f"The guard says no drop: write for example --guard {GUARD_EXAMPLE}.")
    return found


def _told_of(done: Changed) -> list[str]:
    """Return what became of a change, in lines."""
    lines = _lines(done.changes) or [f"Everything is so already (version {done.version})."]
    lines += [
        f"{size:,} bytes have to leave the {tier} tier."
        for tier, size in done.evict_bytes.items()
        if size
    ]
    if done.dry_run:
        lines.append("Nothing was changed: this was a dry run.")
    elif done.changes:
        lines.append(f"version {done.version}, entry {done.audit} of the audit")
    return lines


def _told(entry: Entry) -> str:
    lines = [entry.note] if entry.note else []
    lines += _lines(entry.changes)
    lines += [
        f"{count:,} blocks evicted from {tier}"
        for tier, count in entry.evicted_blocks.items()
        if count
    ]
    ratios = {"before": entry.hit_ratio_before, "after": entry.hit_ratio_after}
    lines += [
        f"hit ratio {name}: {ratio:.1%}" for name, ratio in ratios.items() if ratio is not None
    ]
    return "\n".join(lines)


def _lines(changes: Mapping[str, tuple[Value, Value]]) -> list[str]:
    return [f"{key}: {_text(old)} to {_text(new)}" for key, (old, new) in changes.items()]


def _text(value: Value | list[str]) -> str:
    return "none" if value is None or value == {} else str(value)
