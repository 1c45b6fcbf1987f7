"""The commands of blocks and pins. Each imports what it needs, as in `__main__.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command_options import AsJson, DryRun, TokenFile, Url
from .config import DEFAULT_URL

if TYPE_CHECKING:
    from .block_asking import Asker

blocks = typer.Typer(no_args_is_help=True, help="Look up, drop, prefetch and list blocks.")
pins = typer.Typer(no_args_is_help=True, help="Keep prefixes in the host tier for a while.")

NamespaceName = Annotated[
    str | None, typer.Option("--namespace", help="First digits of a namespace, if there are more.")
]
Model = Annotated[
    Path | None, typer.Option("--model", help="Folder with the model's tokenizer.json.")
]
TextFile = Annotated[Path | None, typer.Option("--text-file", help="File with a prompt.")]
TokensFile = Annotated[
    Path | None, typer.Option("--tokens-file", help="File with a prompt's token ids.")
]
Keys = Annotated[
    list[str] | None, typer.Option("--key", help="Block key in hex; once for each, head first.")
]
Salt = Annotated[str | None, typer.Option("--salt", help="The requests' cache_salt.")]
HashSeed = Annotated[
    str | None, typer.Option("--hash-seed", help="The engines' PYTHONHASHSEED, if they have one.")
]


@blocks.command()
def lookup(
    model: Model = None,
    text_file: TextFile = None,
    tokens_file: TokensFile = None,
    key: Keys = None,
    namespace: NamespaceName = None,
    salt: Salt = None,
    hash_seed: HashSeed = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show which tiers hold which blocks of a prompt."""
    from .block_asking import look_up  # noqa: PLC0415
    from .prompt_input import PromptInput  # noqa: PLC0415

    prompt = PromptInput(model, text_file, tokens_file, key or [], namespace, salt, hash_seed)
    look_up(_asker(url, token_file, as_json), prompt)


@blocks.command()
def drop(
    model: Model = None,
    text_file: TextFile = None,
    tokens_file: TokensFile = None,
    key: Keys = None,
    namespace: NamespaceName = None,
    salt: Salt = None,
    hash_seed: HashSeed = None,
    tier: Annotated[str, typer.Option("--tier", help="host, disk, redis or all.")] = "all",
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Drop a prompt's last whole block and all that continues it; without one, a namespace."""
    from .block_asking import drop as drop_blocks  # noqa: PLC0415
    from .prompt_input import PromptInput  # noqa: PLC0415

    prompt = PromptInput(model, text_file, tokens_file, key or [], namespace, salt, hash_seed)
    drop_blocks(_asker(url, token_file, as_json), prompt, tier, dry_run=dry_run)


@blocks.command()
def prefetch(
    model: Model = None,
    text_file: TextFile = None,
    tokens_file: TokensFile = None,
    key: Keys = None,
    namespace: NamespaceName = None,
    salt: Salt = None,
    hash_seed: HashSeed = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring what lower tiers have of a prompt to the host tier."""
    from .block_asking import prefetch as begin  # noqa: PLC0415
    from .prompt_input import PromptInput  # noqa: PLC0415

    prompt = PromptInput(model, text_file, tokens_file, key or [], namespace, salt, hash_seed)
    begin(_asker(url, token_file, as_json), prompt)


@blocks.command(name="list")
def list_blocks(
    namespace: NamespaceName = None,
    order: Annotated[str, typer.Option("--order", help="By bytes or by uses.")] = "bytes",
    limit: Annotated[int, typer.Option("--limit", help="Prefixes to show.")] = 20,
    cursor: Annotated[str | None, typer.Option("--cursor", help="Where a page ended.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the largest or most used prefixes of the host tier."""
    from .block_asking import list_prefixes  # noqa: PLC0415

    list_prefixes(_asker(url, token_file, as_json), namespace, order, limit, cursor)


@pins.command(name="list")
def list_pins(
    url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Show all pins."""
    from .block_asking import list_pins as show_pins  # noqa: PLC0415

    show_pins(_asker(url, token_file, as_json))


@pins.command()
def add(
    seconds: Annotated[float, typer.Option("--seconds", help="How long it is kept.")],
    name: Annotated[str, typer.Option("--name", help="For people.")] = "",
    model: Model = None,
    text_file: TextFile = None,
    tokens_file: TokensFile = None,
    key: Keys = None,
    namespace: NamespaceName = None,
    salt: Salt = None,
    hash_seed: HashSeed = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep what the host tier has of a prompt."""
    from .block_asking import add_pin  # noqa: PLC0415
    from .prompt_input import PromptInput  # noqa: PLC0415

    prompt = PromptInput(model, text_file, tokens_file, key or [], namespace, salt, hash_seed)
    add_pin(_asker(url, token_file, as_json), prompt, seconds, name)


@pins.command()
def remove(
    pin: Annotated[str, typer.Argument(help="As `kvtier pins list` shows it.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """End a pin."""
    from .block_asking import remove_pin  # noqa: PLC0415

    remove_pin(_asker(url, token_file, as_json), pin)


def _asker(url: str, token_file: Path | None, as_json: bool) -> Asker:
    from .asking import Server  # noqa: PLC0415
    from .block_asking import Asker  # noqa: PLC0415

    return Asker(Server(url, token_file), as_json)
