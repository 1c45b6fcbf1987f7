"""Run all checks and print what they find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..asking import AskError, login
from ..config import Settings, load_settings
from ..core import Tier
from ..endpoints import ANYWHERE, Endpoint, listens
from ..errors import SettingsError
from ..output import plain_console, print_json
from . import fleet, host
from .disk import disk_tier
from .findings import Finding, Level, problem, well
from .redis import redis_tier
from .state import state

_MARKS = {Level.OK: ("✓", "green"), Level.WARNING: ("!", "yellow"), Level.PROBLEM: ("✗", "red")}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What to look at. Without a URL, the one that the settings say."""

    config: Path | None = None
    url: str | None = None
    token_file: Path | None = None


def run_doctor(options: DoctorOptions, *, as_json: bool) -> int:
    """Print all findings; return 1 if there is a problem among them. Blocks for some seconds."""
    found = examine(options)
    console = plain_console()
    if as_json:
        print_json({"findings": found})
    else:
        console.print(_table(found))
        console.print(_summary(found))
    return int(any(finding.level is Level.PROBLEM for finding in found))


def examine(options: DoctorOptions) -> list[Finding]:
    """Return what all checks find. Blocks."""
    try:
        settings = load_settings(options.config)
    except SettingsError as error:
        found = [problem("settings", str(error), "The server would not start; mend them first.")]
        return found if options.url is None else found + _server(options.url, options, None)[1]
    url = options.url or _url(settings)
    running, about_server = None, [well("server", "http.port is 0: name the server with --url.")]
    if url is not None:
        running, about_server = _server(url, options, settings)
    return [
        well("settings", f"They are valid ({options.config or 'no file'}, environment)."),
        host.memory(settings, running=running is not None),
        host.memlock(settings),
        host.shared_memory(),
        host.huge_pages(settings, running=running is not None),
        host.socket_folder(settings),
        *state(settings),
        *host.secret_files(settings),
        *host.extras(settings),
        *disk_tier(settings.disk, running.used(Tier.DISK) if running else None),
        redis_tier(settings),
        *about_server,
    ]


def _server(
    url: str, options: DoctorOptions, settings: Settings | None
) -> tuple[fleet.Running | None, list[Finding]]:
    expected = options.url is not None or (settings is not None and listens(settings.socket))
    try:
        running = fleet.ask_server(url, _login(options, settings))
    except AskError as error:
        return None, [fleet.absent(error, expected=expected)]
    except SettingsError as error:
        return None, [problem("server", str(error), "Mend it, or leave it out.")]
    return running, [*fleet.server(running, url), *fleet.sharing(running.namespaces)]


def _login(options: DoctorOptions, settings: Settings | None) -> Mapping[str, str]:
    """Return the headers with the token that was named, else with the one of the settings."""
    if (named := login(options.token_file)) or settings is None:
        return named
    tokens = settings.http_tokens()
    token = tokens.read or tokens.change
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _url(settings: Settings) -> str | None:
    address, port = settings.http.host, settings.http.port
    return Endpoint(ANYWHERE.get(address, address), port).url if port else None


def _table(found: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    before = ""
    for finding in found:
        mark, colour = _MARKS[finding.level]
        check = finding.check if finding.check != before else ""
        before = finding.check
        said = Text(finding.said)
        if finding.fix:
            said.append(f"\n→ {finding.fix}", style=colour)
        table.add_row(Text(mark, style=colour), Text(check, style="bold"), said)
    return table


def _summary(found: Sequence[Finding]) -> Text:
    problems = sum(finding.level is Level.PROBLEM for finding in found)
    warnings = sum(finding.level is Level.WARNING for finding in found)
    return Text(f"\n{problems} problems, {warnings} warnings.")
