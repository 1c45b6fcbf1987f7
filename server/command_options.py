"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[str, typer.Option("--url", help="Address of a server's control plane.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with its token; default: KVTIER_TOKEN.")
]
Guard = Annotated[
    str | None,
    typer.Option(help="Roll back if the hit ratio falls, such as drop=0.05,within=10m."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
