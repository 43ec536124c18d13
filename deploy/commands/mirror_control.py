"""`millrace mirror status|pause|resume|skip|retry|throttle|drain|reload`: sight and control of a running
mirror.

Added to the group of `mirror.py`. Any worker may be asked: what it is told becomes a record on the target and
holds for all. Things are named `SOURCE`, `SOURCE/TOPIC` or `SOURCE/TOPIC:PARTITION[,PARTITION…]`, with `*`
for every source.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from typing import Annotated, Any

import typer

from millrace.broker.errors import FatalError, MillraceError
from millrace.deploy.commands import mirror_view as view
from millrace.deploy.commands.mirror_worker import (
    DRAIN_TIMEOUT_S,
    CallRefused,
    ConfigOption,
    TokenFileOption,
    UrlOption,
    WorkerPort,
    find_worker,
)
from millrace.deploy.commands.output import Format, JsonFlag, OutputFormat, chosen, print_json
from millrace.deploy.commands.values import MOST_INT64, whole_number

WATCH_INTERVAL_S = 2.0
_WHAT = re.compile(r"(?P<source>[^/:]+)(/(?P<topic>[^/:]+)(:(?P<partitions>[0-9]+(,[0-9]+)*))?)?")
_SIZE = re.compile(r"(?P<number>[0-9]{1,19}(\.[0-9]{1,19})?)\s*(?P<unit>[kKmMgGtT]?i?)[bB]?(/s)?")
_SHOWN_SIZE = 80
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Things = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE[/TOPIC[:N,N…]]", help="What: ewr, ewr/flights, ewr/flights:0,3, */flights."
    ),
]
AllFlag = Annotated[bool, typer.Option("--all", help="Everything that the mirror carries.")]


class SomeDidNotAnswer(FatalError):
    """What was shown is not the whole."""

    exit_status = 2


class AllDrained(FatalError):
    """Nothing is carried, although all is as it was told to be."""

    exit_status = 2


def register(app: typer.Typer) -> None:
    """Adds the commands to `millrace mirror`."""
    for name, command in (
        ("status", status),
        ("pause", pause),
        ("resume", resume),
        ("retry", retry),
        ("skip", skip),
        ("throttle", throttle),
        ("drain", drain),
        ("reload", reload),
    ):
        app.command(name)(command)


def status(
    config: ConfigOption = None,
    url: UrlOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, metavar="SECONDS", help="Pause between two looks.")
    ] = WATCH_INTERVAL_S,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Show the whole mirror, worst first: lag, throughput, and what is stopped with what to do about it.

    Ends with 2 when a worker did not answer (what is shown is then not the whole), or all are drained.
    """
    form = chosen(output, as_json)
    worker = find_worker(config, url)
    if not watch:
        document = worker.get("/mirror")
        _show(document, form)
        if lines := view.silent(document):
            raise SomeDidNotAnswer(f"{len(lines)} of {len(document['workers'])} workers did not answer")
        if view.is_drained(document):
            raise AllDrained(view.NOTHING_CARRIED)
        return
    while True:
        _show_again(worker, form)
        time.sleep(interval_s)


def _show(document: dict[str, Any], form: Format) -> None:
    if form is Format.JSON:
        print_json(view.as_json(document))
        return
    for line in _lines(document):
        typer.echo(line)


def _show_again(worker: WorkerPort, form: Format) -> None:
    """One look of `--watch`."""
    size = shutil.get_terminal_size() if sys.stdout.isatty() and form is Format.TABLE else None
    shown = _look(worker, form, size)
    if size is None:
        typer.echo("\n".join(shown) + ("" if form is Format.JSON else "\n"))
    else:
        # Home, then each line over the old one, then away with what is left: nothing flickers.
        body = "".join(_over(line, size.columns) for line in [*shown, time.strftime("%H:%M:%S")])
        typer.echo(f"\x1b[H{body}\x1b[J", nl=False, color=True)
    sys.stdout.flush()


def _look(worker: WorkerPort, form: Format, size: os.terminal_size | None) -> list[str]:
    """Its lines; for a terminal as many as it holds. A worker that is away for a while does not end the
    watching."""
    try:
        document = worker.get("/mirror")
    except MillraceError as error:
        if form is Format.JSON:
            return [json.dumps({"error": str(error)})]
        width = None if size is None else size.columns
        return [_style(line, "red") for line in view.wrapped(str(error), width)]
    if form is Format.JSON:
        return [json.dumps(view.as_json(document))]
    if size is None:
        return _lines(document)
    # One row is the time's, and one the cursor's.
    return view.screen(document, size.columns, size.lines - 2, _style)


def _over(line: str, columns: int) -> str:
    """A line in the place of another. Behind a row that is full there is nothing to take away, and the cursor
    stands on its last character."""
    size = view.length(line)
    return f"{line}\n" if size and size % columns == 0 else f"{line}\x1b[K\n"


def _lines(document: dict[str, Any]) -> list[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return view.lines(document, width, _style)


def _style(text: str, colour: str) -> str:
    """Colours for terminals; `typer.echo` takes them away from files and pipes."""
    return typer.style(text, bold=True) if colour == "bold" else typer.style(text, fg=colour)


def pause(
    what: Things = None,
    everything: AllFlag = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Stop reading; what is under way is still delivered. Holds over restarts, until `resume`."""
    _for_each("/pause", what, everything, find_worker(config, url, token_file))


def resume(
    what: Things = None,
    everything: AllFlag = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Go on: lift pauses, and try stopped partitions again."""
    _for_each("/resume", what, everything, find_worker(config, url, token_file))


def retry(
    what: Things = None,
    everything: AllFlag = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Try again what stopped partitions, after its cause was removed."""
    _for_each("/retry", what, everything, find_worker(config, url, token_file))


def skip(
    what: Annotated[str, typer.Argument(metavar="SOURCE/TOPIC:N", help="The stopped partition.")],
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Let the one gap pass at which a partition is stopped: its records will not be carried.

    The gap's event is written first, so the audit knows of it. Any later gap stops the partition again.
    """
    selections = _selections(what)
    if len(selections) != 1 or "partition" not in selections[0] or "source" not in selections[0]:
        raise typer.BadParameter(f"{what!r}: expected one partition, e.g. ewr/flights:0")
    wanted = selections[0]
    worker = find_worker(config, url, token_file)
    document = worker.get("/mirror")
    for each in view.stopped_partitions(document):
        if all(each[key] == value for key, value in wanted.items()):
            gap = {"from": each["gap"]["from"], "class": each["gap"]["class"]}
            typer.echo(worker.post("/skip", {**wanted, **gap})["done"])
            return
    carried = [
        each["state"]
        for status in view.answered(document)
        for each in status["partitions"]
        if all(each[key] == value for key, value in wanted.items())
    ]
    if not carried and view.is_starting(document):
        raise CallRefused(f"no worker has {what} yet: the mirror is starting; ask again in a moment")
    if view.silent(document):
        raise CallRefused(f"no worker that answers has {what} stopped, and not all answer: see mirror status")
    if not carried:
        raise CallRefused(f"no worker carries {what}: see mirror status")
    raise CallRefused(f"{what} is not stopped at a gap: it is {carried[0]}")


def throttle(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Name of the source cluster.")],
    rate: Annotated[
        str | None, typer.Argument(metavar="RATE", help="Bytes per second: 500k, 10MB, 64MiB.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Lift the limit.")] = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Limit the bytes per second read from a source, over all workers together."""
    if (rate is None) != off:
        raise typer.BadParameter("expected a rate such as 10MB, or --off")
    body = {"source": source, "bytes_per_second": None if rate is None else size_of(rate)}
    typer.echo(find_worker(config, url, token_file).post("/throttle", body)["done"])


def drain(
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Give one worker's partitions to the others, with nothing lost or repeated; then it can be ended."""
    worker = find_worker(config, url, token_file)
    typer.echo(f"{worker.url}: {worker.post('/drain', {}, timeout_s=DRAIN_TIMEOUT_S)['done']}")


def reload(
    only: Annotated[
        bool, typer.Option("--only", help="Only the worker that --config or --url names.")
    ] = False,
    config: ConfigOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Let every worker read its config file again; what needs a restart is refused by name."""
    worker = find_worker(config, url, token_file)
    urls, failed = [worker.url], []
    if not only:
        document = worker.get("/mirror")
        # Not the one that answers in another's place: it would be told twice, and the other not at all.
        urls = [each["url"] for each in document["workers"] if each["status"] is not None]
        failed = [f"not reloaded: {line}" for line in view.silent(document)]
        if document.get("crew_is_old"):
            failed.append(view.OLD_CREW)
    for each in urls:
        try:
            answer = worker.at(each).post("/reload", {}, timeout_s=DRAIN_TIMEOUT_S)
            typer.echo(f"{each}: {answer['done']}")
        except MillraceError as error:
            failed.append(str(error))
    if failed:
        raise CallRefused("; ".join(failed))


def _for_each(path: str, what: list[str] | None, everything: bool, worker: WorkerPort) -> None:
    if everything == bool(what):
        raise typer.BadParameter("expected what, e.g. ewr, ewr/flights or ewr/flights:0, or --all")
    selections: list[dict[str, Any]] = [{"all": True}] if everything else []
    for text in what or ():
        selections += _selections(text)
    for selection in selections:
        typer.echo(worker.post(path, selection)["done"])


def _selections(text: str) -> list[dict[str, Any]]:
    """`ewr/flights:0,3` → one selection for each partition. Raises BadParameter."""
    match = _WHAT.fullmatch(text)
    partitions = (match["partitions"] if match is not None else None) or "0"
    numbers = [whole_number(each) for each in partitions.split(",")]
    if match is None or text == "*" or None in numbers:
        raise typer.BadParameter(
            f"{text[:_SHOWN_SIZE]!r}: expected SOURCE[/TOPIC[:N,N…]], e.g. ewr, ewr/flights or ewr/flights:0 "
            "(or --all)"
        )
    selection: dict[str, Any] = {} if match["source"] == "*" else {"source": match["source"]}
    if match["topic"] is not None:
        selection["topic"] = match["topic"]
    if match["partitions"] is None:
        return [selection]
    return [{**selection, "partition": number} for number in numbers]


def size_of(text: str) -> int:
    """`10MB` → 10,000,000; `64MiB` → 67,108,864. Raises BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match is not None:
        whole, _, decimals = match["number"].partition(".")
        unit = {**_UNITS, **_BINARY_UNITS}.get(match["unit"].lower(), 0)
        size = int(whole + decimals) * unit // 10 ** len(decimals)
    if not 1 <= size <= MOST_INT64:
        raise typer.BadParameter(
            f"{text[:_SHOWN_SIZE]!r}: expected bytes per second, e.g. 500k, 10MB or 64MiB"
        )
    return size
