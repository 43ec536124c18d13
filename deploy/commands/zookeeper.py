"""`millrace zookeeper`: a real ZooKeeper server for sandboxes and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.deploy.commands.group import command_group

app = command_group("Run Apache ZooKeeper from PySpark's jars.")


@app.callback()
def _group() -> None:
    """Keeps `run` a subcommand of its own although it is the only one."""


@app.command("run")
def run(
    port: Annotated[int, typer.Option(help="Port that clients connect to.", min=1, max=65535)] = 2181,
    data: Annotated[Path, typer.Option(help="Folder for its data; created when missing.")] = Path(
        "zookeeper-data"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    heap_mib: Annotated[int, typer.Option(help="Java heap in MiB.", min=32)] = 128,
) -> None:
    """Run one standalone ZooKeeper server in the foreground until it is stopped."""
    from millrace.deploy.zookeeper import run_in_foreground

    run_in_foreground(port, data, host=host, heap_mib=heap_mib)
