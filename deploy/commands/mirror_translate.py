"""`millrace mirror translate`: where a consumer group goes on when it moves from a source to the target."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.broker.wording import count_of
from millrace.deploy.commands.mirror_worker import FileOption, config_file
from millrace.deploy.commands.output import Format, JsonFlag, OutputFormat, chosen, print_json, print_rows
from millrace.deploy.lean_imports import lean

if TYPE_CHECKING:
    from millrace.mirror.offsets.translate import Reply, Row

COLUMNS = ["source", "topic", "partition", "offset", "lag", "to", "target_offset", "target_lag", "is"]


def translate(
    group: Annotated[str, typer.Option("--group", "-g", help="The consumer group on the source.")],
    config: FileOption = None,
    source: Annotated[
        str | None, typer.Option("--source", help="Only what it has committed on this source.")
    ] = None,
    topics: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this source topic; repeatable.")
    ] = None,
    do_apply: Annotated[
        bool,
        typer.Option("--apply", help="Commit the offsets on the target, where the group has no members."),
    ] = False,
    allow_rereads: Annotated[
        bool,
        typer.Option(
            "--allow-rereads",
            help="Where there is no exact offset: the smallest that leaves nothing out; some is read again.",
        ),
    ] = False,
    backwards: Annotated[
        bool, typer.Option("--backwards", help="With --apply: also where the group is further on the target.")
    ] = False,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Show where a group goes on at the target, partition by partition; with --apply, commit it there.

    Ends with 0 when every partition has its place at the target, otherwise with 1. With --apply those that
    have one are committed all the same.
    """
    with lean():
        from millrace.mirror.offsets.translate import Question, run

    question = Question(group, source, tuple(topics or ()), do_apply, allow_rereads, backwards)
    reply = run(config_file(config), question)
    if isinstance(reply, int):
        raise typer.Exit(reply)
    _print(reply, question.group, chosen(output, as_json))
    raise typer.Exit(reply.exit_status)


def _print(reply: Reply, group: str, form: Format) -> None:
    applied = reply.applied
    if form is Format.JSON:
        document: dict[str, Any] = {"group": group, "partitions": [_fields(row) for row in reply.rows]}
        if applied is not None:
            document["committed"] = [
                {"topic": topic, "partition": number, "offset": at.offset}
                for (topic, number), at in sorted(applied.committed.items())
            ]
            document["already_there"] = [
                {"topic": topic, "partition": number, "offset": offset}
                for (topic, number), offset in sorted(applied.ahead.items())
            ]
        print_json(document)
        return
    print_rows([_fields(row) for row in reply.rows], COLUMNS, form)
    for row in reply.rows:
        if row.note:
            sys.stdout.write(f"{row.source}: {row.outcome.value}: {row.note}\n")
    if applied is None:
        sys.stdout.write("nothing was changed: --apply commits these offsets on the target\n")
        return
    sys.stdout.write(
        f"committed for group {group} on the target: {count_of(len(applied.committed), 'partition')}\n"
    )
    for (topic, number), offset in sorted(applied.ahead.items()):
        sys.stdout.write(f"{topic}-{number}: left at {offset}, where the group is already\n")


def _fields(row: Row) -> dict[str, Any]:
    return {
        "source": row.source.source,
        "topic": row.source.topic,
        "partition": row.source.partition,
        "offset": row.committed.offset,
        "lag": row.lag,
        "to": str(row.target),
        "target_topic": row.target.topic,
        "target_partition": row.target.partition,
        "target_offset": row.target_offset,
        "target_lag": row.target_lag,
        "is": row.outcome.value,
        "note": row.note,
    }
