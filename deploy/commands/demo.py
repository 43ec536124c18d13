"""`millrace demo`: three datacenters, one aggregate, real events, and the proof."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    input_file: Annotated[
        Path | None, typer.Option("--input", help="Replay this CSV or JSONL file instead of the flights.")
    ] = None,
    datacenter_column: Annotated[
        str | None,
        typer.Option(help="Column that says which datacenter a row comes from. [default: datacenter]"),
    ] = None,
    producer_column: Annotated[
        str | None, typer.Option(help="Column that names a row's producer. [default: producer]")
    ] = None,
    time_column: Annotated[
        str | None, typer.Option(help="Column with a row's creation time; without it, now.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option(help="Topic to replay into. [default: the file's name]")
    ] = None,
    lose: Annotated[int, typer.Option(min=0, help="Drop this many random records in the mirror.")] = 0,
    duplicate: Annotated[int, typer.Option(min=0, help="Repeat this many random records in the mirror.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random choice.")] = 1,
    kill: Annotated[
        bool, typer.Option("--kill", help="SIGKILL a mirror and the aggregate's broker in mid-replay.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running, print the addresses.")
    ] = False,
    report: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report"),
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to spread the replay over; 0: as fast as it goes.")
    ] = 15.0,
) -> None:
    """Replay real events in three datacenters, mirror them, and audit every record.

    Exit status: 0 proven, 1 a loss or a duplicate, 2 something unknown, 3 the demo itself failed.
    """
    columns = {
        "--datacenter-column": datacenter_column,
        "--producer-column": producer_column,
        "--time-column": time_column,
    }
    if input_file is None:
        for option, given in columns.items():
            if given is not None:
                raise typer.BadParameter(f"{option} needs --input: the flights have their own columns")
    from millrace.deploy.demo.events import EventSource
    from millrace.deploy.demo.run import DemoOptions, run

    options = DemoOptions(
        source=EventSource(
            path=str(input_file.absolute()) if input_file else None,
            topic=topic,
            datacenter_column=datacenter_column,
            producer_column=producer_column,
            time_column=time_column,
        ),
        lose_count=lose,
        duplicate_count=duplicate,
        seed=seed,
        kill=kill,
        keep=keep,
        report=report,
        replay_seconds=seconds,
    )
    raise typer.Exit(run(options))
