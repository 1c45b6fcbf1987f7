"""The command line. Each command imports what it needs, so that none waits for another's parts."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer
import yaml

from . import __version__, block_commands, quota_commands
from .command_options import AsJson, DryRun, Guard, TokenFile, Url
from .config import DEFAULT_URL, descriptions, load_settings
from .errors import KVTierError

app = typer.Typer(
    help="A tiered KV cache server for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

tiers_app = typer.Typer()
app.add_typer(tiers_app, name="tiers")
app.add_typer(block_commands.blocks, name="blocks")
app.add_typer(block_commands.pins, name="pins")
app.add_typer(quota_commands.quotas, name="quotas")

Config = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Socket = Annotated[str | None, typer.Option("--socket", help="Unix socket for engines.")]
Capacity = Annotated[str | None, typer.Option("--capacity", help="Host memory, such as 20GiB.")]
Port = Annotated[str | None, typer.Option("--port", help="TCP port of the HTTP control plane.")]
Disk = Annotated[str | None, typer.Option("--disk", help="Directory for blocks on disk.")]
Redis = Annotated[str | None, typer.Option("--redis", help="URL of a Redis for blocks.")]
Many = Annotated[list[str] | None, typer.Option(help="Policy; once for each. Default: all.")]


def main() -> None:
    """Run the command line. An expected error is one sentence on stderr and exit code 1."""
    try:
        app()
    except KVTierError as error:
        print(f"kvtier: {str(error).rstrip('.')}.", file=sys.stderr)  # noqa: T201
        sys.exit(1)


@app.command()
def serve(
    config: Config = None,
    socket: Socket = None,
    capacity: Capacity = None,
    port: Port = None,
    disk: Disk = None,
    redis: Redis = None,
    reset_settings: Annotated[
        bool, typer.Option("--reset-settings", help="Forget what was changed at run time.")
    ] = False,
) -> None:
    """Run a server until SIGTERM or SIGINT. SIGHUP reads the settings file again."""
    given = _given(socket, capacity, port, disk, redis)
    settings = load_settings(config, given)  # First: it may end the start.
    from .serve import serve as run_server  # noqa: PLC0415

    run_server(settings, lambda: load_settings(config, given), reset=reset_settings)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def up(
    context: typer.Context,
    config: Config = None,
    socket: Socket = None,
    capacity: Capacity = None,
    port: Port = None,
    disk: Disk = None,
    redis: Redis = None,
) -> None:
    """Run a server and vLLM beside it: kvtier up -- MODEL [arguments of vllm serve]."""
    if not context.args:
        raise typer.BadParameter("name a model, such as: kvtier up -- path/to/model")
    from .up import run_up  # noqa: PLC0415

    given = _given(socket, capacity, port, disk, redis)
    sys.exit(run_up(context.args, load_settings(config, given)))


@app.command()
def status(url: Url = DEFAULT_URL, as_json: AsJson = False, token_file: TokenFile = None) -> None:
    """Show tiers, hit ratios, sessions and namespaces of a running server."""
    from .status import show_status  # noqa: PLC0415

    show_status(url, as_json=as_json, token_file=token_file)


@app.command(name="config")
def show_config(
    config: Config = None,
    socket: Socket = None,
    capacity: Capacity = None,
    port: Port = None,
    disk: Disk = None,
    redis: Redis = None,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option(help="Say what each setting does.")] = False,
) -> None:
    """Show the settings that a server would run with here, as a settings file."""
    settings = load_settings(config, _given(socket, capacity, port, disk, redis))
    if as_json:
        typer.echo(json.dumps(settings.effective(), indent=2))
        return
    if explain:
        for key, description in descriptions().items():
            typer.echo(textwrap.fill(f"# {key}: {description}", 96, subsequent_indent="#   "))
        typer.echo()
    typer.echo(yaml.safe_dump(settings.effective(), sort_keys=False), nl=False)


@app.command()
def replay(
    files: Annotated[
        list[Path], typer.Argument(help="Traces, or folders of recordings. See docs/formats.md.")
    ],
    policy: Many = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help='Host tier, such as "10%" of the distinct blocks, or "20GiB"; once for each. '
            "Default: 1%, 5%, 10%, 25%."
        ),
    ] = None,
    disk: Annotated[
        list[str] | None, typer.Option(help="Disk tier, as --size; once for each. Default: none.")
    ] = None,
    redis: Annotated[
        list[str] | None, typer.Option(help="Redis tier, as --size; once for each. Default: none.")
    ] = None,
    lower_policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy of disk and Redis; once for each. Default: mq."),
    ] = None,
    write_mode: Annotated[
        list[str] | None,
        typer.Option(help="through, on_reuse or on_evict; once for each. Default: through."),
    ] = None,
    admission: Annotated[
        list[str] | None,
        typer.Option(help="always, second_hit, learned or cost; once for each. Default: always."),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(help='Bytes of one block, such as "2MiB"; recordings tell them.')
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Tokens a second that an engine computes, for cost.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help='Of disk and Redis, such as "1GiB" a second, for cost.')
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay recorded requests: the hits that policies, sizes, tiers and admissions would get."""
    from .replay.command import run_replay  # noqa: PLC0415
    from .replay.grid import SIZES, ReplayOptions  # noqa: PLC0415

    options = ReplayOptions(
        files=files,
        policies=policy or (),
        sizes=size or SIZES,
        disks=disk or (),
        redises=redis or (),
        lower_policies=lower_policy or ("mq",),
        write_modes=write_mode or ("through",),
        admissions=admission or ("always",),
        block_bytes=block_bytes,
        prefill_rate=prefill_rate,
        bandwidth=bandwidth,
        plot=plot,
    )
    run_replay(options, as_json=as_json)


@app.command()
def doctor(
    config: Config = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A server's control plane. Default: the settings'.")
    ] = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Check this host, its settings and a running server; exit code 1 if something can't work."""
    from .doctor.command import DoctorOptions, run_doctor  # noqa: PLC0415

    sys.exit(run_doctor(DoctorOptions(config, url, token_file), as_json=as_json))


@app.command()
def top(
    url: Url = DEFAULT_URL,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading.")] = False,
    as_json: AsJson = False,
    token_file: TokenFile = None,
) -> None:
    """Watch a running server: hit ratios, lookups, evictions, sessions, queues. q quits."""
    from .top import TopOptions, run_top  # noqa: PLC0415

    run_top(TopOptions(url, interval, token_file, once), as_json=as_json)


@tiers_app.callback(invoke_without_command=True)
def tiers(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the settings that can be changed while a server runs; `tiers set` changes them."""
    if context.invoked_subcommand is None:
        from .asking import Server  # noqa: PLC0415
        from .tiers_command import show_settings  # noqa: PLC0415

        show_settings(Server(url, token_file), as_json=as_json)


@tiers_app.command(name="set")
def tiers_set(
    settings: Annotated[list[str], typer.Argument(help="Such as disk.capacity=200GiB.")],
    guard: Guard = None,
    dry_run: DryRun = False,
    version: Annotated[
        int | None, typer.Option("--if-version", help="Only if the settings have this version.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a running server, all of them or none."""
    from .asking import Server  # noqa: PLC0415
    from .tiers_command import Wanted, change_settings  # noqa: PLC0415

    wanted = Wanted(settings, guard, dry_run, version)
    change_settings(Server(url, token_file), wanted, as_json=as_json)


@app.command()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Entries to show.")] = 20,
    before: Annotated[int | None, typer.Option(help="Show entries older than this one.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed which setting when, and what followed."""
    from .asking import Server  # noqa: PLC0415
    from .tiers_command import show_audit  # noqa: PLC0415

    show_audit(Server(url, token_file), limit=limit, before=before, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _given(
    socket: str | None,
    capacity: str | None,
    port: str | None,
    disk: str | None,
    redis: str | None,
) -> dict[str, str | None]:
    return {
        "socket": socket,
        "host.capacity": capacity,
        "http.port": port,
        "disk.path": disk,
        "redis.url": redis,
    }


if __name__ == "__main__":
    main()
