"""`millrace broker`: one broker process in the foreground."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from millrace.deploy.commands.group import command_group

app = command_group("Run a Kafka-protocol broker.")


@app.callback()
def _group() -> None:
    """Keeps `run` a subcommand of its own although it is the only one."""


@app.command("run")
def run(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="broker.yaml; flags go before it.")
    ] = None,
    broker_id: Annotated[
        int | None, typer.Option("--id", help="Number of this broker, unique in its cluster.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    advertised: Annotated[
        str | None, typer.Option(help="host:port that clients are told; --listen by default.")
    ] = None,
    zookeeper: Annotated[
        str | None, typer.Option(help="host:port[,host:port…]/chroot of the cluster.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="Folder for logs; may be given several times.")
    ] = None,
    rack: Annotated[str | None, typer.Option(help="Rack or zone of this broker.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Kafka-named setting, e.g. num.partitions=4."),
    ] = None,
) -> None:
    """Run one broker until SIGTERM or Ctrl-C; it leaves its cluster and closes its logs cleanly."""
    gc.disable()  # until the broker serves (`broker/telemetry/garbage.py`)
    from millrace.broker.config import load_config
    from millrace.deploy.commands.values import key_value_pairs
    from millrace.deploy.lean_imports import lean

    overrides: dict[str, object] = {
        "id": broker_id,
        "listen": listen,
        "advertised": advertised,
        "zookeeper": zookeeper,
        "data": data or None,
        "rack": rack,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    loaded = load_config(config, {**given, **key_value_pairs(settings or [], option="--set")})
    with lean():
        from millrace.broker.server.broker import run as run_broker

    raise typer.Exit(run_broker(loaded))
