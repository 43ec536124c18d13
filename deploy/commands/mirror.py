"""`millrace mirror`: the daemon that moves batches, and a check of its config against live clusters."""

from __future__ import annotations

import gc

import typer

from millrace.deploy.commands import mirror_control, mirror_translate
from millrace.deploy.commands.group import command_group
from millrace.deploy.commands.mirror_worker import FileOption, config_file
from millrace.deploy.lean_imports import lean

app = command_group("Mirror topics of N clusters into one.")


@app.command("run")
def run(config: FileOption = None) -> None:
    """Run one mirror process until SIGTERM; several with the same name share the work."""
    path = config_file(config)
    gc.disable()  # until its compiled loops are loaded (`broker/telemetry/garbage.py`)
    with lean():
        from millrace.mirror.daemon import run as run_mirror

    raise typer.Exit(run_mirror(path))


@app.command("check")
def check(config: FileOption = None) -> None:
    """Validate a config against the live clusters: reachability, limits, loops, name clashes."""
    with lean():
        from millrace.mirror.checks.check import run as run_check

    raise typer.Exit(run_check(config_file(config)))


mirror_control.register(app)
app.command("translate")(mirror_translate.translate)
