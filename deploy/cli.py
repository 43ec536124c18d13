"""The `millrace` program: puts the command groups together and turns every expected failure into one line.

Start-up stays below a few tenths of a second because command modules import only typer; servers, Spark and
numba are imported inside the command that needs them. Exit statuses are listed in README.md: 64 is a wrong
command line (2 means "unknown" for `audit` and `demo`, so the customary 2 would be ambiguous), 70 a defect
of this program, 130 an interrupt, 141 that nobody reads the output any more (as of a program that SIGPIPE
ends: 0 would say that all is well, and 1 is a loss to some commands).
"""

from __future__ import annotations

import io
import sys
import traceback

import typer
from typer.exceptions import TyperException

from millrace.deploy.commands import audit, broker, demo, groups, local, log, mirror, topics, zookeeper
from millrace.deploy.commands.group import command_group
from millrace.deploy.commands.output import silence
from millrace.deploy.commands.usage import usage_message

USAGE_ERROR_STATUS = 64
DEFECT_STATUS = 70
INTERRUPTED_STATUS = 130
READER_GONE_STATUS = 141

app = command_group(
    "Moves record batches between Kafka-protocol datacenters "
    "and proves, record by record, that nothing was lost.",
    name="millrace",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.add_typer(broker.app, name="broker")
app.add_typer(topics.app, name="topics")
app.add_typer(groups.app, name="groups")
app.add_typer(log.app, name="log")
app.add_typer(mirror.app, name="mirror")
app.add_typer(audit.app, name="audit")
app.add_typer(zookeeper.app, name="zookeeper")
app.add_typer(local.app, name="local")
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"millrace {version('millrace')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options of the program itself."""


def main(arguments: list[str] | None = None) -> None:
    """Console entry point: runs one command and leaves with its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that a terminal cannot show ends no command
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status; expected failures become one line on standard error, and
    several mistakes in a config file a line each. What it printed has been written then, or Python would end
    with a status of its own."""
    status = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        gone = _reader_gone()
        return status or gone
    except OSError as problem:
        silence(sys.stdout)
        _complain(f"standard output: {problem.strerror}")
        return status or DEFECT_STATUS
    return status


def _run(arguments: list[str] | None) -> int:
    from millrace.broker.errors import MillraceError

    try:
        result = app(args=arguments, prog_name="millrace", standalone_mode=False)
    except MillraceError as error:
        for line in error.lines():
            _complain(line)
        return int(getattr(error, "exit_status", 1))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED_STATUS
    except TyperException as error:
        return _usage_failure(error)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer has made a 1 of it
            return _reader_gone()
        raise
    except Exception:
        # A defect of ours: all of it is shown, and the status is not 1, which means a loss to some commands.
        traceback.print_exc()
        return DEFECT_STATUS
    return result if isinstance(result, int) else 0


def _reader_gone() -> int:
    """The reader of our output (head, less) went away: Python must not complain at exit."""
    silence(sys.stdout)
    return READER_GONE_STATUS


def _usage_failure(error: Exception) -> int:
    """One line for a wrong command line; bare `millrace` and bare groups have printed their help already."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message() if hasattr(error, "format_message") else str(error))
        return USAGE_ERROR_STATUS
    context = getattr(error, "ctx", None)
    hint = f" (see: {context.command_path} --help)" if context is not None else ""
    _complain(f"{usage_message(error).rstrip('.')}{hint}")
    return USAGE_ERROR_STATUS


def _complain(message: str) -> None:
    print(f"millrace: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
