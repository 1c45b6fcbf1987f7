"""`kvtier quotas`: read and change the quotas of a running server, and say whose a salt is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import msgspec
from rich.table import Table

from .asking import Server
from .errors import SettingsError
from .output import plain_console, print_json
from .quota_section import parse_quotas, quota_texts
from .salts import add_salt
from .sizes import rough_size
from .tier_readings import QuotaReading
from .tiers_command import Changed, parse_guard, print_change

EXAMPLE = "soft=6GiB hard=8GiB"


class Quotas(msgspec.Struct, frozen=True):
    """The answer of `/v1/quotas`."""

    version: int
    quotas: dict[str, dict[str, str]]
    tenants: list[QuotaReading]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tenant's quota, as the command line words it; without limits it has none any more."""

    tenant: str
    limits: tuple[str, ...] = ()
    guard: str | None = None
    dry_run: bool = False


def show_quotas(server: Server, *, as_json: bool) -> None:
    """Print the quotas, and where tenants stand. Raises AskError."""
    found = server.ask(Quotas, "GET", "/v1/quotas")
    table = Table(title=f"quotas, version {found.version}", title_justify="left")
    for column in ("tenant", "limits", "host", "disk", "redis", "of hard", "evicted", "refused"):
        table.add_column(column)
    listed = {one.tenant for one in found.tenants}
    for tenant in found.quotas.keys() - listed:
        table.add_row(tenant, _limits(found.quotas[tenant]))
    for one in found.tenants:
        limits = quota_texts({one.tenant: one.quota})[one.tenant]
        used = [rough_size(size) for size in one.used_bytes.values()]
        share = f"{one.fullness:.1%}"
        counts = (f"{one.evicted_blocks:,}", f"{one.refused_blocks:,}")
        table.add_row(one.tenant or "(nobody)", _limits(limits), *used, share, *counts)
    if as_json:
        print_json(found)
    else:
        plain_console().print(table)


def change_quota(server: Server, wanted: Wanted, *, as_json: bool) -> None:
    """Replace or remove one tenant's quota. Raises AskError, SettingsError."""
    found = server.ask(Quotas, "GET", "/v1/quotas")
    quotas = {name: quota for name, quota in found.quotas.items() if name != wanted.tenant}
    if wanted.limits:
        quotas[wanted.tenant] = parse_limits(wanted)
    elif wanted.tenant not in found.quotas:
        raise SettingsError(f'"{wanted.tenant}" has no quota of its own.')
    body: dict[str, object] = {"quotas": quotas}
    if wanted.guard is not None:
        body["guard"] = parse_guard(wanted.guard)
    query = f"?{urlencode({'dry_run': 'true'})}" if wanted.dry_run else ""
    done = server.ask(Changed, "PUT", f"/v1/quotas{query}", body, f'"{found.version}"')
    print_change(done, as_json=as_json)


def parse_limits(wanted: Wanted) -> dict[str, str]:
    """Return the limits that texts such as "hard=8GiB" ask for. Raises SettingsError."""
    limits: dict[str, str] = {}
    for text in wanted.limits:
        key, equals, size = text.partition("=")
        if not equals:
            raise SettingsError(f'"{text}" is no limit with a size: write {EXAMPLE}.')
        limits[key.strip()] = size.strip()
    try:
        parse_quotas({wanted.tenant: limits})
    except ValueError as error:
        raise SettingsError(f"{error}.") from None
    return limits


def write_salt(file: Path, tenant: str) -> None:
    """Say in a file of salts whose the salt on standard input is, and print its digest.

    Raises SettingsError.
    """
    digest = add_salt(file, sys.stdin.read().rstrip("\r\n"), tenant)
    plain_console().print(digest)


def _limits(texts: dict[str, str]) -> str:
    return ", ".join(f"{key} {size}" for key, size in texts.items())
