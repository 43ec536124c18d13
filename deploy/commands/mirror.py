"""`millrace mirror`: the daemon that moves batches, and a check of its config against live clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Mirror topics of N clusters into one.", no_args_is_help=True)

ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="mirror.yaml")]


@app.command("run")
def run(config: ConfigPath) -> None:
    """Run one mirror process until SIGTERM; several with the same name share the work."""
    from millrace.mirror.daemon import run as run_mirror

    raise typer.Exit(run_mirror(config))


@app.command("check")
def check(config: ConfigPath) -> None:
    """Validate a config against the live clusters: reachability, limits, loops, name clashes."""
    from millrace.mirror.check import run as run_check

    raise typer.Exit(run_check(config))
