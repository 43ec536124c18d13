"""`millrace topics reassign`: moves partitions to other brokers; plans, lists, awaits and calls off moves.

Registered by `topics.py`. Plans are made by `coordination/move_plan.py` (as few moves as an even load allows)
or read from a file in the format of Apache Kafka's own tool. A throttle is set before the first byte moves
and taken off when the last move has ended, by this command or by a later one with `--wait`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.wording import count_of
from millrace.deploy.commands.cluster_session import Bootstrap, CommandConfig, with_cluster
from millrace.deploy.commands.output import Format, OutputFormat, print_rows
from millrace.deploy.commands.values import MOST_INT16, MOST_INT32, MOST_INT64

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster
    from millrace.broker.client.metadata import ClusterMetadata
    from millrace.broker.client.reassignments import Moving

Plan = dict[TopicPartition, tuple[int, ...]]

POLL_SECONDS = 0.5
REFUSED_STATUS = 1
_SHOWN_SIZE = 80


def reassign(
    topics: Annotated[
        list[str] | None, typer.Argument(help="Topics to move; with --list, --cancel and --wait: all.")
    ] = None,
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    brokers: Annotated[
        str | None, typer.Option("--brokers", metavar="ID,ID…", help="Brokers that are to keep the topics.")
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            "--replication-factor",
            "-r",
            min=1,
            max=MOST_INT16,
            help="Replicas of each partition, if it changes.",
        ),
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan in the JSON of Kafka's own tool, in place of one.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan (-o json: as a file).")
    ] = False,
    throttle: Annotated[
        int | None,
        typer.Option(
            "--throttle",
            min=1,
            max=MOST_INT64,
            metavar="BYTES/S",
            help="What a broker may fetch of moved data.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the moves have ended; takes the throttle off.")
    ] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Call off the moves that are under way.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the moves that are under way.")] = False,
    output: OutputFormat = Format.TABLE,
) -> None:
    """Move partitions to other brokers."""
    names = topics or []
    _check_options(names, brokers, replication_factor, plan_file, cancel=cancel, listing=listing, wait=wait)
    broker_ids = None if brokers is None else _broker_ids(brokers)
    read = None if plan_file is None else read_plan(plan_file)

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import reassignments

        if listing:
            await _list(cluster, names, output)
        elif cancel:
            await _cancel(cluster, names)
        elif broker_ids is None and read is None:
            await _wait(cluster, names)
        else:
            # In this order: a move that ends in between has come to its target.
            moving = await reassignments.list_reassignments(cluster)
            view = await cluster.metadata(max_age_ms=0)
            plan = (
                read
                if read is not None
                else _plan(cluster, view, moving, names, broker_ids or [], replication_factor)
            )
            await _move(
                cluster, view, moving, plan, throttle=throttle, dry_run=dry_run, wait=wait, output=output
            )

    with_cluster(bootstrap, command, command_config)


def _check_options(
    topics: Sequence[str],
    brokers: str | None,
    replication_factor: int | None,
    plan_file: Path | None,
    *,
    cancel: bool,
    listing: bool,
    wait: bool,
) -> None:
    chosen = [
        name
        for name, given in (
            ("--brokers", brokers is not None),
            ("--plan", plan_file is not None),
            ("--cancel", cancel),
            ("--list", listing),
        )
        if given
    ]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} do not go together")
    if not chosen and not wait:
        raise typer.BadParameter("say where to: --brokers 1,2,3 or --plan FILE (or --list, --cancel, --wait)")
    if brokers is not None and not topics:
        raise typer.BadParameter("name the topics to move to --brokers")
    if plan_file is not None and topics:
        raise typer.BadParameter("--plan names the topics itself")
    if replication_factor is not None and brokers is None:
        raise typer.BadParameter("--replication-factor goes with --brokers")


def _broker_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        ids = []
    if not ids or len(set(ids)) < len(ids):
        raise typer.BadParameter(f"--brokers {text!r}: expected different broker ids, e.g. 1,2,3")
    return ids


def read_plan(path: Path) -> Plan:
    """A plan in the JSON of Kafka's own tool. Raises BadParameter that names the file and what is wrong."""
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
        plan = {
            (str(one["topic"]), _number(one["partition"])): tuple(map(_number, one["replicas"]))
            for one in payload["partitions"]
        }
    except OSError as error:
        raise typer.BadParameter(f"--plan {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise typer.BadParameter(
            f'--plan {path}: expected {{"version":1,"partitions":[{{"topic":"t","partition":0,'
            f'"replicas":[1,2]}}]}}: {error}'
        ) from None
    if len(plan) < len(payload["partitions"]):
        raise typer.BadParameter(f"--plan {path}: a partition stands in it more than once")
    return plan


def _number(value: object) -> int:
    """Of a partition or a broker."""
    if type(value) is not int or not 0 <= value <= MOST_INT32:
        raise ValueError(f"{str(value)[:_SHOWN_SIZE]} is no number from 0 to {MOST_INT32}")
    return value


def _plan(
    cluster: Cluster,
    view: ClusterMetadata,
    moving: Mapping[TopicPartition, Moving],
    topics: Sequence[str],
    brokers: Sequence[int],
    replication_factor: int | None,
) -> Plan:
    from millrace.broker.coordination.move_plan import plan_moves
    from millrace.broker.errors import BrokerNotAvailable, UnknownTopicOrPartition

    for name in topics:
        if name not in view.topics:
            raise UnknownTopicOrPartition(
                f"{cluster}: there is no topic {name}: millrace topics list shows those there are"
            )
    dead = [broker for broker in brokers if broker not in view.brokers]
    if dead:
        raise BrokerNotAvailable(
            f"{cluster}: no broker {', '.join(map(str, dead))} is alive: there are "
            f"{', '.join(map(str, sorted(view.brokers)))}"
        )
    # While a partition moves, metadata shows its target and what leaves: more than its replication factor.
    partitions = {
        (name, number): _aimed_at(moving, (name, number), part.replicas)
        for name in topics
        for number, part in view.topics[name].partitions.items()
    }
    racks = {broker: view.brokers[broker].rack for broker in brokers}
    return plan_moves(partitions, racks, replication_factor)


def _aimed_at(
    moving: Mapping[TopicPartition, Moving], key: TopicPartition, replicas: tuple[int, ...]
) -> tuple[int, ...]:
    """Where a partition is, or is on its way to."""
    move = moving.get(key)
    return replicas if move is None else move.target


async def _move(
    cluster: Cluster,
    view: ClusterMetadata,
    moving: Mapping[TopicPartition, Moving],
    plan: Plan,
    *,
    throttle: int | None,
    dry_run: bool,
    wait: bool,
    output: Format,
) -> None:
    from millrace.broker.client import reassignments

    shown = {
        (name, number): part.replicas
        for name, topic in view.topics.items()
        for number, part in topic.partitions.items()
    }
    now = {key: moving[key].origin if key in moving else replicas for key, replicas in shown.items()}
    moves = {
        key: new for key, new in plan.items() if key not in shown or _aimed_at(moving, key, shown[key]) != new
    }
    if dry_run and output is Format.JSON:
        print(json.dumps(_plan_file(moves), indent=2))
        return
    if not moves:
        typer.echo("every partition is where it should be, or on its way there")
        return
    if dry_run:
        print_rows(_rows(now, moves), ["topic", "partition", "from", "to", "adding", "removing"], output)
        return
    if throttle is not None:
        await _throttle(cluster, {key: (now.get(key, ()), new) for key, new in moves.items()}, throttle)
    refused = await reassignments.alter_reassignments(cluster, moves)
    begun = {key: new for key, new in moves.items() if key not in refused}
    if begun:
        typer.echo(
            f"moving {count_of(len(begun), 'partition')}" + (f" at {throttle} bytes/s" if throttle else "")
        )
    if wait or not begun:
        await _wait(cluster, sorted({topic for topic, _ in moves}), begun)
    elif throttle is not None:
        names = " ".join(sorted({topic for topic, _ in moves}))
        typer.echo(f"the throttle stays until: millrace topics reassign {names} --wait")
    _report_refused(refused)


async def _throttle(
    cluster: Cluster,
    moves: Mapping[TopicPartition, tuple[tuple[int, ...], tuple[int, ...]]],
    bytes_per_second: int,
) -> None:
    """Set it everywhere, or leave it nowhere: no move follows that would take it off in the end."""
    from millrace.broker.client import reassignments
    from millrace.broker.errors import MillraceError

    try:
        await reassignments.set_throttle(cluster, moves, bytes_per_second)
    except MillraceError:
        with suppress(MillraceError):
            moving = await reassignments.list_reassignments(cluster)
            resting = {topic for topic, _ in moves} - {topic for topic, _ in moving}
            await reassignments.remove_throttle(cluster, sorted(resting), rates=not moving)
        raise


async def _wait(
    cluster: Cluster, topics: Sequence[str], begun: Mapping[TopicPartition, Any] | None = None
) -> None:
    """Until no partition of these topics (none named: of any) moves any more."""
    from millrace.broker.client import reassignments

    shown = -1
    touched = set(topics)
    while True:
        moving = await reassignments.list_reassignments(cluster)
        mine = {key for key in moving if not topics or key[0] in touched}
        if not topics:
            touched |= {key[0] for key in mine}
        if not mine:
            break
        if len(mine) != shown:
            shown = len(mine)
            typer.echo(f"{count_of(shown, 'partition')} still moving", err=True)
        await asyncio.sleep(POLL_SECONDS)
    await reassignments.remove_throttle(cluster, sorted(touched), rates=not moving)
    if begun:
        typer.echo(f"moved {count_of(len(begun), 'partition')}")
    elif begun is None:
        typer.echo("nothing is moving")


async def _cancel(cluster: Cluster, topics: Sequence[str]) -> None:
    from millrace.broker.client import reassignments

    moving = await reassignments.list_reassignments(cluster)
    mine = [key for key in moving if not topics or key[0] in topics]
    if not mine:
        typer.echo("nothing is moving")
        return
    refused = await reassignments.alter_reassignments(cluster, dict.fromkeys(mine))
    left = await reassignments.list_reassignments(cluster)
    await reassignments.remove_throttle(cluster, sorted({key[0] for key in mine}), rates=not left)
    typer.echo(f"called off {count_of(len(mine) - len(refused), 'partition')}")
    _report_refused(refused)


async def _list(cluster: Cluster, topics: Sequence[str], output: Format) -> None:
    from millrace.broker.client import reassignments

    moving = await reassignments.list_reassignments(cluster)
    rows = [
        {
            "topic": topic,
            "partition": number,
            "replicas": list(move.replicas),
            "adding": list(move.adding),
            "removing": list(move.removing),
        }
        for (topic, number), move in sorted(moving.items())
        if not topics or topic in topics
    ]
    print_rows(rows, ["topic", "partition", "replicas", "adding", "removing"], output)


def _rows(now: Mapping[TopicPartition, tuple[int, ...]], moves: Plan) -> list[dict[str, Any]]:
    return [
        {
            "topic": topic,
            "partition": number,
            "from": list(now.get((topic, number), ())),
            "to": list(new),
            "adding": [broker for broker in new if broker not in now.get((topic, number), ())],
            "removing": [broker for broker in now.get((topic, number), ()) if broker not in new],
        }
        for (topic, number), new in sorted(moves.items())
    ]


def _plan_file(plan: Plan) -> dict[str, Any]:
    return {
        "version": 1,
        "partitions": [
            {"topic": topic, "partition": number, "replicas": list(replicas)}
            for (topic, number), replicas in sorted(plan.items())
        ],
    }


def _report_refused(refused: Mapping[TopicPartition, Exception]) -> None:
    for error in refused.values():
        print(f"millrace: {error}", file=sys.stderr)
    if refused:
        raise typer.Exit(REFUSED_STATUS)
