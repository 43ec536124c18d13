"""What every command that talks to a cluster has: options that say where and as whom, and a connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.deploy.commands.values import addresses
from millrace.deploy.lean_imports import lean

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "--bootstrap-server",
        "-b",
        envvar="MILLRACE_BOOTSTRAP",
        help="host:port[,host:port…] of the cluster.",
    ),
]


CommandConfig = Annotated[
    Path | None,
    typer.Option(
        "--command-config",
        envvar="MILLRACE_COMMAND_CONFIG",
        help="Client properties for TLS and login, as Apache Kafka's tools take them.",
    ),
]


def confirm(question: str) -> None:
    """Goes on after a yes. Raises Abort after a no, BadParameter where nobody answers (a script, a pipe)."""
    try:
        is_wanted = typer.confirm(question)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo()
        raise typer.BadParameter("nobody has answered; --yes does it without asking") from None
    if not is_wanted:
        raise typer.Abort


def _warn(line: str) -> None:
    print(f"millrace: {line}", file=sys.stderr)


def with_cluster(
    bootstrap: str,
    command: Callable[[Cluster], Awaitable[None]],
    command_config: Path | None = None,
) -> None:
    """Runs `command` with a connection to the cluster; its errors name the cluster and the topic. A cluster
    at whose addresses nothing takes connections is an error at once."""
    servers = addresses(bootstrap, option="--bootstrap")
    with lean():
        from millrace.broker.client.client_properties import load_client_properties
        from millrace.broker.client.cluster import Cluster

    security = load_client_properties(command_config, _warn) if command_config is not None else None

    async def session() -> None:
        async with Cluster(
            bootstrap, servers, client_id="millrace-cli", awaits_start=False, security=security
        ) as cluster:
            await command(cluster)

    try:
        asyncio.run(session())
    except UnicodeEncodeError as error:
        if error.encoding != "utf-8":  # a terminal's
            raise
        raise typer.BadParameter(f"{error.object!r} is not a text in UTF-8") from None
