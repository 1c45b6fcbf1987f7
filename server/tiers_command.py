"""`kvtier tiers` and `kvtier audit`: read and change settings of a running server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlencode

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from .asking import ask, login
from .errors import SettingsError

Scalar: TypeAlias = str | int | float | None
Json: TypeAlias = "dict[str, Json] | list[Json] | Scalar | bool"

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
GUARD_EXAMPLE = "drop=0.05,within=10m"


@dataclass(frozen=True, slots=True)
class Server:
    """Which server is asked, with which token: that of a file, or of KVTIER_TOKEN."""

    url: str
    token_file: Path | None = None

    def ask(self, method: str, path: str, body: Json = None, if_match: str = "") -> Json:
        """Return the answer. Raises AskError."""
        headers = login(self.token_file) | ({"If-Match": if_match} if if_match else {})
        found: Json = ask(self.url, method, path, body, headers).json  # type: ignore[assignment]
        return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """A change, as the command line words it."""

    assignments: Sequence[str]
    guard: str | None = None
    dry_run: bool = False
    version: int | None = None


def show_settings(server: Server, *, as_json: bool) -> None:
    """Print the settings that can be changed, and which were. Raises AskError."""
    found = server.ask("GET", "/v1/settings")
    if as_json:
        return _print_json(found)
    body = _object(found)
    settings, changed = _object(body["settings"]), _object(body["changed"])
    table = Table(title=f"settings, version {body['version']}", title_justify="left")
    for column in ("setting", "value", "changed at run time"):
        table.add_column(column)
    for key in _list(body["live"]):
        section, _, name = str(key).partition(".")
        value = _object(settings[section])[name]
        table.add_row(str(key), _text(value), "yes" if key in changed else "")
    Console(highlight=False, markup=False).print(table)
    return None


def change_settings(server: Server, wanted: Wanted, *, as_json: bool) -> None:
    """Change settings, all or none. Raises AskError, SettingsError."""
    body: dict[str, Json] = {"changes": dict(parse_assignments(wanted.assignments))}
    if wanted.guard is not None:
        body["guard"] = dict(parse_guard(wanted.guard))
    path = "/v1/settings?dry_run=true" if wanted.dry_run else "/v1/settings"
    version = "*" if wanted.version is None else f'"{wanted.version}"'
    found = server.ask("PATCH", path, body, version)
    if as_json:
        return _print_json(found)
    done = _object(found)
    console = Console(highlight=False, markup=False)
    changes = _object(done["changes"])
    if not changes:
        console.print(f"Everything is so already (version {done['version']}).")
    for key, values in changes.items():
        before, after = _list(values)
        console.print(f"{key}: {_text(before)} to {_text(after)}")
    for tier, size in _object(done["evict_bytes"]).items():
        if isinstance(size, int) and size:
            console.print(f"{size:,} bytes have to leave the {tier} tier.")
    if wanted.dry_run:
        console.print("Nothing was changed: this was a dry run.")
    elif changes:
        console.print(f"version {done['version']}, entry {done['audit']} of the audit")
    return None


def show_audit(server: Server, *, limit: int, before: int | None, as_json: bool) -> None:
    """Print who changed what when, and what followed. Raises AskError."""
    query = urlencode({"limit": limit} | ({} if before is None else {"before": before}))
    found = server.ask("GET", f"/v1/audit?{query}")
    if as_json:
        return _print_json(found)
    table = Table()
    for column in ("entry", "when (UTC)", "who", "what", "changes, and what followed"):
        table.add_column(column)
    for each in _list(_object(found)["entries"]):
        entry = _object(each)
        when = datetime.fromtimestamp(float(str(entry["time"])), UTC).strftime("%Y-%m-%d %H:%M:%S")
        what = f"{entry['what']} of {entry['of']}" if entry["of"] else str(entry["what"])
        table.add_row(str(entry["id"]), when, str(entry["who"]), what, _told(entry))
    Console(highlight=False, markup=False).print(table)
    return None


def parse_assignments(assignments: Sequence[str]) -> dict[str, Scalar]:
    """Return the changes that texts such as "disk.capacity=200GiB" ask for.

    Values are read as in a settings file. Raises SettingsError.
    """
    changes: dict[str, Scalar] = {}
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


def _told(entry: Mapping[str, Json]) -> str:
    lines = [str(entry["note"])] if entry["note"] else []
    for key, values in _object(entry["changes"]).items():
        before, after = _list(values)
        lines.append(f"{key}: {_text(before)} to {_text(after)}")
    lines += [
        f"{count:,} blocks evicted from {tier}"
        for tier, count in _object(entry["evicted_blocks"]).items()
        if isinstance(count, int) and count
    ]
    for name in ("before", "after"):
        if isinstance(ratio := entry[f"hit_ratio_{name}"], float):
            lines.append(f"hit ratio {name}: {ratio:.1%}")
    return "\n".join(lines)


def _text(value: Json) -> str:
    return "none" if value is None else str(value)


def _print_json(found: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    Console(highlight=False, markup=False, emoji=False).print(text, soft_wrap=True)


def _object(value: object) -> dict[str, Json]:
    assert isinstance(value, dict), "the server answers as its OpenAPI description says"
    return value


def _list(value: object) -> list[Json]:
    assert isinstance(value, list), "the server answers as its OpenAPI description says"
    return value
