"""`millrace audit`: the job, once or again and again, and what a person asks or tells about it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from millrace.deploy.commands.group import command_group
from millrace.deploy.commands.output import Format, JsonFlag, OutputFormat, chosen, print_json, say

if TYPE_CHECKING:
    from millrace.audit.config import AuditConfig

app = command_group("Prove per producer and window that nothing was lost.")

ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="The audit's file.")]
DEFAULT_CONFIG = Path("audit.yaml")

Master = Annotated[
    str | None,
    typer.Option(
        help="Spark master to run on. [default: what spark-submit was told, or local[*]]",
        show_default=False,
    ),
]

Since = Annotated[
    str,
    typer.Option(
        help="The verdict's horizon: a finding that was told for so long, of a window that is over for so "
        "long, stays in the report and decides no more; `forever` lets all decide."
    ),
]
DEFAULT_SINCE = "30d"

JOB_FAILED_STATUS = 3
_PYTHON = "spark.pyspark.python"


@app.command("run")
def run(
    config: ConfigPath = DEFAULT_CONFIG,
    master: Master = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict only.")] = False,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", help="Backfill: compute the windows from this time on anew from the clusters."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="End of the backfill's time range. [default: now]")
    ] = None,
    since: Since = DEFAULT_SINCE,
) -> None:
    """Audit once: count what arrived since the last run, reconcile, write the report.

    With --from, the windows that a time range touches are computed anew from what the clusters still hold;
    the state stays as it is, and the report lies in a folder of its own, named by the windows.

    Exit status: 0 all proven, waived or older than --since, 1 a loss or a duplicate, 2 something unknown, 3
    the job failed.
    """
    from millrace.broker.errors import ConfigError, MillraceError

    signal.signal(signal.SIGTERM, _end)
    try:
        from millrace.audit.config import load_config
        from millrace.audit.job import run as run_job
        from millrace.audit.report.console import console_lines
        from millrace.audit.runs.backfill import report_folder

        loaded = load_config(config)
        only = _time_range(from_, until)
        horizon_ms = _horizon_ms(since)
        _choose_java()
        result = run_job(
            loaded,
            master,
            progress=lambda step: None if quiet else say(step),
            only=only,
            horizon_ms=horizon_ms,
        )
    except ConfigError as error:
        _fail(*(str(each) for each in error.each()))
    except MillraceError as error:
        _fail(str(error))
    except Exception:
        # Any other end would be status 1, which says that a record is lost.
        traceback.print_exc()
        raise typer.Exit(JOB_FAILED_STATUS) from None
    if result.summary is None:
        _fail(result.problem)
    page = f"{report_folder(loaded, only)}/index.html"
    told = console_lines(result.summary, page, str(config), result.exit_status, result.cost)
    for line in itertools.islice(told, 1 if quiet else None):
        say(line)
    if result.problem:
        say(f"millrace: {' '.join(result.problem.split())}", err=True)
    raise typer.Exit(result.exit_status)


@app.command("watch")
def watch(
    config: ConfigPath = DEFAULT_CONFIG,
    every: Annotated[str, typer.Option(help="How often a run begins, such as 10m.")] = "10m",
    runs: Annotated[int | None, typer.Option(min=1, help="End after so many runs.")] = None,
    limit: Annotated[
        str, typer.Option(help="How long one run may take; one that takes longer is ended and has failed.")
    ] = "24h",
    master: Master = None,
    since: Since = DEFAULT_SINCE,
) -> None:
    """Audit again and again; a run that fails is told, and the next one goes on.

    SIGTERM and Ctrl-C end it: the run under way is given up and nothing of it is kept. Exit status: that of
    the last finished run, as for `audit run`.
    """
    from millrace.audit.config import load_config, parse_duration_ms
    from millrace.audit.watch import Watch, timed
    from millrace.broker.errors import ConfigError

    with _failing():
        loaded = load_config(config)
        every_ms = parse_duration_ms("--every", every)
        limit_ms = parse_duration_ms("--limit", limit)
        _horizon_ms(since)
        if not isinstance(loaded.report, Path):
            expected = "a folder of this machine, for what audit watch tells between runs"
            raise ConfigError(loaded.where("report"), loaded.report, expected)
    command = [sys.executable, "-m", "millrace.deploy.cli", "audit", "run", "--quiet"]
    watching = Watch(
        [*command, "--config", str(config), *(["--master", master] if master else []), "--since", since],
        every_ms,
        loaded.report,
        runs=runs,
        limit_ms=limit_ms,
        say=lambda line: typer.echo(timed(f"millrace: {line}"), err=True),
        relay=lambda line: typer.echo(timed(line)),
    )

    def stop(signum: int, frame: FrameType | None) -> None:
        watching.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    raise typer.Exit(watching.run())


@app.command("package")
def package(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The archive; its program for spark-submit goes beside it.")
    ] = Path("millrace-audit.tar.gz"),
    python: Annotated[
        str | None,
        typer.Option(help="Where Python is on the machines that it is for. [default: as on this one]"),
    ] = None,
) -> None:
    """Pack this environment for a Spark cluster's executors, and the program for spark-submit.

    The archive has millrace and the libraries that it needs, but for PySpark, which the cluster has. Its
    machines need Python of the same minor version.
    """
    from millrace.audit.spark.environment import FOLDER, write_environment
    from millrace.deploy import spark_submit

    with _failing():
        try:
            libraries = write_environment(output, python)
            program = output.with_name("millrace-audit.py")
            program.write_bytes(Path(spark_submit.__file__).read_bytes())
        except OSError as problem:
            _fail(f"{problem.filename or output}: {problem.strerror or problem}")
    size = output.stat().st_size
    typer.echo(f"{output}: millrace and {len(libraries)} libraries, {size / 1e6:.0f} MB")
    typer.echo(f"{program}: what spark-submit runs")
    typer.echo("in audit.yaml, for millrace audit run --master …:")
    typer.echo(f"  spark: {{spark.archives: {output.absolute()}#{FOLDER}, {_PYTHON}: ./{FOLDER}/bin/python}}")
    typer.echo("or through spark-submit:")
    typer.echo(
        f"  spark-submit --master … --archives {output}#{FOLDER} --conf {_PYTHON}=./{FOLDER}/bin/python "
        f"--conf spark.pyspark.driver.python={sys.executable} {program} run --config audit.yaml"
    )
    typer.echo("and where YARN runs the driver, too (a finding ends with 1, which YARN would try again):")
    typer.echo(
        f"  spark-submit --master yarn --deploy-mode cluster --archives {output}#{FOLDER} "
        f"--conf {_PYTHON}=./{FOLDER}/bin/python --conf spark.yarn.maxAppAttempts=1 {program} run "
        "--config …"
    )


@app.command("status")
def status(
    config: ConfigPath = DEFAULT_CONFIG,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Show where the audit stands: watermarks, verdicts, waivers and the state's size."""
    from millrace.audit.config import load_config
    from millrace.audit.status import lines, read_status

    form = chosen(output, as_json)
    with _failing():
        loaded = load_config(config)
        _choose_java_for(loaded)
        told = read_status(loaded)
    if form is Format.JSON:
        print_json(told)
        return
    for line in lines(told):
        typer.echo(line)


@app.command("waive")
def waive(
    config: ConfigPath = DEFAULT_CONFIG,
    topic: Annotated[str | None, typer.Argument(help="Topic of the window.")] = None,
    window: Annotated[
        str | None,
        typer.Argument(help="Start of the window, or the id of a stream whose own row is waived."),
    ] = None,
    *,
    untrusted: Annotated[
        str | None,
        typer.Option(
            help="Instead of a window: words from the names of what could not be trusted, such as "
            "'header of an unknown version, in ewr'; all that has them is waived."
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="The reason; somebody will ask for it.")],
    who: Annotated[str | None, typer.Option(help="Who decides it. [default: user@host]")] = None,
) -> None:
    """Go on without the proof of a window: the watermark may pass it, and it no longer decides the status.

    The waiver is for the verdict of the last run. When late data makes that worse, it no longer stands. With
    --untrusted it is for what the last report could not trust, and no longer stands when more of it comes.
    Where the watermark still cannot pass, what holds it is told, by the last run's report and state.
    """
    from millrace.audit.config import load_config
    from millrace.audit.explain import parse_window
    from millrace.audit.keeping.state import StateFolder
    from millrace.audit.keeping.waivers import give_waiver, here, is_stream, newest_waiver
    from millrace.audit.reconciliation.verdict_rows import iso_time
    from millrace.audit.runs.watermark_holds import still_held

    if (topic is None or window is None) == (untrusted is None) or (topic and untrusted is not None):
        raise typer.BadParameter("either a topic and a window, or --untrusted")
    with _failing():
        loaded = load_config(config)
        _choose_java_for(loaded)
        at_ms = time.time_ns() // 1_000_000
        if topic is None or window is None:
            _accept(loaded, untrusted or "", who or here(), why, at_ms)
            return
        target = window if is_stream(window) else parse_window(window)
        state = StateFolder.open(loaded.state, loaded.spark)
        before = newest_waiver(state, topic, target)
        given = give_waiver(state, topic, target, who or here(), why, at_ms)
        typer.echo(f"waived: {topic} {window}, {given.verdict}, by {given.who}: {given.why}")
        if before is not None:
            typer.echo(f"replaces the waiver of {before.who} at {iso_time(before.at_ms)}: {before.why}")
        for line in still_held(loaded, state, (topic, target)):
            typer.echo(line)


def _accept(config: AuditConfig, named: str, who: str, why: str, at_ms: int) -> None:
    from millrace.audit.keeping.state import StateFolder
    from millrace.audit.keeping.untrusted_waivers import accept, told_untrusted
    from millrace.audit.report.folder import read_told
    from millrace.audit.report.place import report_at
    from millrace.audit.report.text import sentence_text
    from millrace.audit.runs.watermark_holds import still_held_topics

    state = StateFolder.open(config.state, config.spark)
    with report_at(config.report, config.spark).reading(("summary.json",)) as folder:
        told = read_told(folder, "summary.json").get("untrusted", ())
    untrusted = told_untrusted(state.latest(), {each["what"]: each["count"] for each in told})
    given = accept(state, named, untrusted, who, why, at_ms)
    for what, count in sorted(given.covers.items()):
        typer.echo(f"waived: {sentence_text(what)} ({count:,}), by {given.who}: {given.why}")
    for line in still_held_topics(config, state, given.covers):
        typer.echo(line)


@app.command("explain")
def explain(
    topic: Annotated[str, typer.Argument(help="Topic whose window is asked for.")],
    window: Annotated[
        str, typer.Argument(help="A time in the window, e.g. 2013-01-01T00:00:00Z, or a stream's id.")
    ],
    config: ConfigPath = DEFAULT_CONFIG,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
    everything: Annotated[bool, typer.Option("--all", help="Show proven streams, too.")] = False,
) -> None:
    """Show the sets behind one window's verdict, the tier that lost records, and what to do.

    A stream's id (16 digits, as the report shows it) asks for what no window can be named for: a lost tail,
    a hole in the reports, a producer that fell silent.
    """
    from millrace.audit.config import load_config
    from millrace.audit.explain import explain as find
    from millrace.audit.explain import lines

    form = chosen(output, as_json)
    with _failing():
        loaded = load_config(config)
        _choose_java_for(loaded)
        told = find(loaded, topic, window)
    if form is Format.JSON:
        print_json(told)
        return
    for line in lines(told, everything):
        typer.echo(line)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """What cannot be done ends with the status of a job that failed, as in `run`: 2 would say that something
    is unknown."""
    from millrace.broker.errors import ConfigError, MillraceError

    try:
        yield
    except ConfigError as error:
        _fail(*(str(each) for each in error.each()))
    except MillraceError as error:
        _fail(str(error))
    except BrokenPipeError:  # nobody reads what it told
        raise
    except OSError as error:
        from millrace.audit.report.failure import system_sentence

        _fail(system_sentence(error))


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM: the job leaves the state as it was."""
    raise SystemExit(128 + signum)


def _horizon_ms(since: str) -> int | None:
    from millrace.audit.config import parse_duration_ms

    return None if since == "forever" else parse_duration_ms("--since", since)


def _time_range(from_: str | None, until: str | None) -> tuple[int, int] | None:
    from millrace.audit.explain import parse_time
    from millrace.broker.errors import ConfigError

    if from_ is None:
        if until is not None:
            raise ConfigError("--until", until, "--from beside it: a backfill has a beginning")
        return None
    from_ms = parse_time("--from", from_)
    until_ms = time.time_ns() // 1_000_000 if until is None else parse_time("--until", until)
    if until_ms <= from_ms:
        if until is None:
            raise ConfigError("--from", from_, "a time in the past, or --until beside it")
        raise ConfigError("--until", until, f"a time after --from {from_}")
    return from_ms, until_ms


def _choose_java() -> None:
    """Spark looks at JAVA_HOME only, and would take a Java that is too old."""
    from millrace.deploy.java import find_java, java_home

    os.environ["JAVA_HOME"] = str(java_home(find_java()))


def _choose_java_for(config: AuditConfig) -> None:
    """A state or report at a URI is reached through a JVM."""
    if isinstance(config.state, str) or isinstance(config.report, str):
        _choose_java()


def _fail(*reasons: str) -> NoReturn:
    for reason in reasons:
        say(f"millrace: {' '.join(reason.split())}", err=True)
    raise typer.Exit(JOB_FAILED_STATUS)
