"""The commands of quotas. Each imports what it needs, as in `__main__.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .command_options import AsJson, DryRun, Guard, TokenFile, Url
from .config import DEFAULT_URL

quotas = typer.Typer(help="What tenants may take.")

Tenant = Annotated[str, typer.Argument(help='A tenant; "*" is each that is not listed.')]


@quotas.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the quotas of tenants, what they take, and what went or was refused for it."""
    if context.invoked_subcommand is None:
        from .asking import Server  # noqa: PLC0415
        from .quotas_command import show_quotas  # noqa: PLC0415

        show_quotas(Server(url, token_file), as_json=as_json)


@quotas.command(name="set")
def set_quota(
    tenant: Tenant,
    limits: Annotated[list[str], typer.Argument(help="Such as hard=8GiB or disk_soft=1TiB.")],
    guard: Guard = None,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Give a tenant these limits, and no others."""
    from .asking import Server  # noqa: PLC0415
    from .quotas_command import Wanted, change_quota  # noqa: PLC0415

    wanted = Wanted(tenant, tuple(limits), guard, dry_run)
    change_quota(Server(url, token_file), wanted, as_json=as_json)


@quotas.command()
def remove(
    tenant: Tenant,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a tenant's quota away."""
    from .asking import Server  # noqa: PLC0415
    from .quotas_command import Wanted, change_quota  # noqa: PLC0415

    change_quota(Server(url, token_file), Wanted(tenant, dry_run=dry_run), as_json=as_json)


@quotas.command()
def salt(
    file: Annotated[Path, typer.Argument(help="As quotas.salts_file names it; made if need be.")],
    tenant: Annotated[str, typer.Argument(help="Whose requests have the salt.")],
) -> None:
    """Write down whose the salt on standard input is: as a digest, which is printed."""
    from .quotas_command import write_salt  # noqa: PLC0415

    write_salt(file, tenant)
