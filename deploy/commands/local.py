"""`millrace local`: the sandbox of `deploy/local/three-datacenters.yaml` on this machine, detached."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from millrace.deploy.commands.group import command_group
from millrace.deploy.commands.output import Format, OutputFormat, print_rows

app = command_group("A whole system on this machine: ZooKeeper, brokers, mirrors.")

SandboxFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Sandbox YAML; three datacenters and an aggregate by default."),
]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="Folder for data, logs and pid files; overrides the file's.")
]

NOT_RUNNING_STATUS = 1


@app.command("up")
def up(file: SandboxFile = None, data: DataFolder = None) -> None:
    """Start what does not run yet, and a drained mirror worker again; returns when all of it serves."""
    from millrace.deploy.local.sandbox import Sandbox

    sandbox = Sandbox.from_file(file, data, say=lambda line: typer.echo(line, err=True))
    for name in sandbox.up():
        typer.echo(f"started {name}")
    for row in sandbox.addresses():
        typer.echo(f"{row['service']:<22}{row['address']}")
    given = (("--file", file), ("--data", data))
    again = "".join(f" {option} {shlex.quote(str(path))}" for option, path in given if path)
    typer.echo(f"data and logs in {sandbox.folder}; stop with: millrace local down{again}")


@app.command("status")
def status(file: SandboxFile = None, data: DataFolder = None, output: OutputFormat = Format.TABLE) -> None:
    """Show each process, also one that the file does not name any more ("left over").

    Exit status 1 when one of the file does not serve.
    """
    from millrace.deploy.local.sandbox import LEFT_OVER, Sandbox

    rows = Sandbox.from_file(file, data).status()
    print_rows(rows, ["service", "state", "pid", "address", "log"], output)
    if any(row["state"] not in ("serving", LEFT_OVER) for row in rows):
        raise typer.Exit(NOT_RUNNING_STATUS)


@app.command("down")
def down(
    file: SandboxFile = None,
    data: DataFolder = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete its data and logs too.")] = False,
) -> None:
    """Stop every process of the sandbox, mirrors first, ZooKeeper last.

    Also one that the file does not name any more. A folder that is not a sandbox's is never deleted.
    """
    from millrace.deploy.local.sandbox import Sandbox, is_sandbox

    sandbox = Sandbox.from_file(file, data)
    stopped = sandbox.down()
    for name in stopped:
        typer.echo(f"stopped {name}")
    if not stopped:
        why = "" if is_sandbox(sandbox.folder) else ": no sandbox is there"
        typer.echo(f"nothing runs in {sandbox.folder}{why}")
    if delete and sandbox.delete_data():
        typer.echo(f"deleted {sandbox.folder}")
