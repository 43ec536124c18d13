"""`millrace audit`: the reconciliation job and the explanation of one window."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(help="Prove per producer and window that nothing was lost.", no_args_is_help=True)

ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="audit.yaml")]

JOB_FAILED_STATUS = 3


@app.command("run")
def run(
    config: ConfigPath,
    master: Annotated[str, typer.Option(help="Spark master to run on.")] = "local[*]",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict only.")] = False,
) -> None:
    """Audit once: count what arrived since the last run, reconcile, write the report.

    Exit status: 0 all proven, 1 a loss or a duplicate, 2 something unknown, 3 the job itself failed.
    """
    from millrace.broker.errors import MillraceError

    try:
        from millrace.audit.config import load_config
        from millrace.audit.job import run as run_job
        from millrace.deploy.java import find_java, java_home

        loaded = load_config(config)
        # Spark looks at JAVA_HOME only, and would take a Java that is too old.
        os.environ["JAVA_HOME"] = str(java_home(find_java()))
        result = run_job(loaded, master, progress=lambda step: None if quiet else typer.echo(step))
    except MillraceError as error:
        _fail(str(error))
    except Exception:
        # Any other end would be status 1, which says that a record is lost.
        traceback.print_exc()
        raise typer.Exit(JOB_FAILED_STATUS) from None
    if result.summary is None:
        _fail(result.problem)
    typer.echo(f"{result.summary['verdict']}   {result.summary['sentence']}")
    if not quiet:
        typer.echo(f"report: {loaded.report / 'index.html'}")
    raise typer.Exit(result.exit_status)


@app.command("explain")
def explain(
    topic: Annotated[str, typer.Argument(help="Topic whose window is asked for.")],
    window: Annotated[str, typer.Argument(help="Start of the window, e.g. 2013-01-01T00:00:00Z.")],
    config: ConfigPath,
) -> None:
    """Show the sets behind one window's verdict and the tier that lost records."""
    from millrace.audit.config import load_config
    from millrace.audit.explain import run as run_explain

    for line in run_explain(load_config(config), topic, window):
        typer.echo(line)


def _fail(reason: str) -> NoReturn:
    typer.echo(f"millrace: {' '.join(reason.split())}", err=True)
    raise typer.Exit(JOB_FAILED_STATUS)
