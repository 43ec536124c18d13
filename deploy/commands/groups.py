"""`millrace groups`: list, describe, reset and delete consumer groups of any Kafka-protocol cluster.

The habits are those of kafka-consumer-groups.sh and rpk: lag by partition with who reads it, a reset that
only shows what it would do until `--execute`, and nothing is changed while a group has members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.broker.wording import count_of
from millrace.deploy.commands.cluster_session import Bootstrap, CommandConfig, confirm, with_cluster
from millrace.deploy.commands.group import command_group
from millrace.deploy.commands.output import Format, JsonFlag, OutputFormat, chosen, print_json, print_rows
from millrace.deploy.commands.values import whole_number

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster
    from millrace.broker.client.groups import Group
    from millrace.broker.client.offset_reset import NewOffset, Target
    from millrace.broker.protocol.topic_partition import TopicPartition

app = command_group("List, describe, reset and delete consumer groups.")

GroupName = Annotated[str, typer.Argument(help="Name of the group.")]

_SHOWN_SIZE = 80
"""Characters of a refused value."""


@app.command("list")
def list_groups(
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    states: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only groups in this state, e.g. Stable or Empty."),
    ] = None,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """List groups with their state and the broker that coordinates them."""
    form = chosen(output, as_json)
    wanted = [_state(word) for word in states or ()]

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import groups
        from millrace.broker.errors import BrokerNotAvailable

        listed = await groups.list_groups(cluster, wanted)
        rows = [
            {
                "group": each.group_id,
                "state": each.state or None,
                "type": each.kind or None,
                "protocol": each.protocol_type or None,
                "coordinator": each.coordinator,
            }
            for each in listed.groups
        ]
        print_rows(rows, ["group", "state", "type", "protocol", "coordinator"], form)
        if listed.unreachable:
            reasons = "; ".join(f"broker {node}: {reason}" for node, reason in listed.unreachable.items())
            raise BrokerNotAvailable(f"the list is not complete: {reasons}")

    with_cluster(bootstrap, command, command_config)


def _state(word: str) -> str:
    """As servers write it. Raises BadParameter."""
    from millrace.broker.client.groups import STATES
    from millrace.broker.expectations import one_of

    for state in STATES:
        if state.lower() == word.lower():
            return state
    raise typer.BadParameter(f"--state {_shortened(word)!r}: expected {one_of(STATES, word)}")


@app.command("describe")
def describe(
    name: GroupName,
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Show how far a group has read each partition, how far behind it is, and who reads it."""
    form = chosen(output, as_json)

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import group_offsets, groups

        group = await groups.describe_group(cluster, name)
        committed = await group_offsets.fetch_offsets(cluster, name)
        if not group.exists and not committed:
            raise _no_such_group(name)
        held = groups.holders(group.members)
        ends = await _ends(cluster, {*committed, *held})
        rows = []
        for topic, number in sorted({*committed, *held}):
            member, end = held.get((topic, number)), ends.get((topic, number))
            offset = committed[topic, number].offset if (topic, number) in committed else None
            rows.append(
                {
                    "topic": topic,
                    "partition": number,
                    "committed": offset,
                    "end": end,
                    "lag": max(end - offset, 0) if end is not None and offset is not None else None,
                    "member": member.member_id if member else None,
                    "instance": member.instance_id if member else None,
                    "host": member.host if member else None,
                    "client_id": member.client_id if member else None,
                }
            )
        _print_group(group, rows, form)

    with_cluster(bootstrap, command, command_config)


def _print_group(group: Group, rows: list[dict[str, Any]], form: Format) -> None:
    lag = sum(row["lag"] or 0 for row in rows)
    idle = [member for member in group.members if not member.assigned]
    if form is Format.JSON:
        print_json(
            {
                "group": group.group_id,
                "state": group.state,
                "type": group.kind,
                "protocol": group.protocol_type,
                "assignor": group.assignor,
                "coordinator": group.coordinator,
                "lag": lag,
                "members": [
                    {
                        "member": member.member_id,
                        "instance": member.instance_id,
                        "client_id": member.client_id,
                        "host": member.host,
                        "partitions": len(member.assigned),
                    }
                    for member in group.members
                ],
                "partitions": rows,
            }
        )
        return
    assignor = f", assignor {group.assignor}" if group.assignor else ""
    typer.echo(
        f"{group.group_id}  {group.state}, {count_of(len(group.members), 'member')}{assignor}, "
        f"coordinator {group.coordinator}, total lag {lag}"
    )
    for member in idle:
        typer.echo(f"  idle: {member.member_id} at {member.host} ({member.client_id})")
    if any(row["end"] is None for row in rows):
        typer.echo("  no end is known of partitions whose topic is gone or which have no leader")
    columns = ["topic", "partition", "committed", "end", "lag", "member", "host", "client_id"]
    if rows:
        print_rows(rows, columns)
    else:
        typer.echo("  nothing is committed and nobody reads")


@app.command("reset")
def reset(
    name: GroupName,
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="TOPIC[:N,N…]", help="Only this topic, or these partitions of it; repeatable."
        ),
    ] = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first offset.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the end.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_timestamp: Annotated[
        str | None,
        typer.Option(
            "--to-timestamp",
            "--to-datetime",
            metavar="TIME",
            help="To the first record at or after a time: 2026-11-21T08:00 (UTC unless it says otherwise), "
            "or milliseconds since 1970.",
        ),
    ] = None,
    shift_by: Annotated[
        int | None, typer.Option("--shift-by", metavar="N", help="N records on, or back where N is negative.")
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it. Without this, only show.")] = False,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Set a group's offsets; without --execute only show what they would become.

    All topics that the group has offsets in, or those named. The group must have no members.
    """
    form = chosen(output, as_json)
    targets = _targets(to_earliest, to_latest, to_offset, to_timestamp, shift_by)
    if len(targets) != 1:
        raise typer.BadParameter(
            "expected one of --to-earliest, --to-latest, --to-offset, --to-timestamp, --shift-by"
        )
    target = targets[0]
    wanted = _partitions_by_topic(topics or [], option="--topic")

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import group_offsets, groups
        from millrace.broker.client.group_offsets import CommittedOffset
        from millrace.broker.errors import RebalanceInProgress, UnknownMemberId

        group = await groups.describe_group(cluster, name)
        _check_no_members(group, "reset")
        committed = await group_offsets.fetch_offsets(cluster, name)
        if not wanted and not committed:
            if not group.exists:
                raise _no_such_group(name)
            raise _refusal(f"group {name} has no offsets: name the topics to set them for with --topic")
        partitions = await _selected(cluster, wanted, committed)
        offsets = {key: each.offset for key, each in committed.items()}
        plan = await _plan(cluster, target, partitions, offsets)
        setting = {
            key: CommittedOffset(each.offset)
            for key, each in plan.items()
            if each.offset is not None and each.offset != offsets.get(key)
        }
        if execute:
            try:
                await group_offsets.commit_offsets(cluster, name, setting)
            except (UnknownMemberId, RebalanceInProgress):
                raise _refusal(
                    f"group {name} got a member just now: stop its consumers first; nothing was changed"
                ) from None
        _print_plan(name, plan, offsets, form, done=execute, changes=len(setting))

    with_cluster(bootstrap, command, command_config)


def _targets(
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_timestamp: str | None,
    shift_by: int | None,
) -> list[Target]:
    from millrace.broker.client.offset_reset import Target, TargetKind

    targets = []
    if to_earliest:
        targets.append(Target(TargetKind.EARLIEST))
    if to_latest:
        targets.append(Target(TargetKind.LATEST))
    if to_offset is not None:
        targets.append(Target(TargetKind.OFFSET, to_offset))
    if to_timestamp is not None:
        targets.append(Target(TargetKind.TIMESTAMP, _milliseconds(to_timestamp)))
    if shift_by is not None:
        targets.append(Target(TargetKind.SHIFT, shift_by))
    return targets


def _milliseconds(text: str) -> int:
    """A time as people write it, in ms since 1970. Raises BadParameter."""
    from millrace.broker.times import time_ms

    try:
        return time_ms(text)
    except ValueError as problem:
        raise typer.BadParameter(f"--to-timestamp {_shortened(text)!r}: expected {problem}") from None


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_SIZE else f"{text[:_SHOWN_SIZE]}…"


def _partitions_by_topic(words: Sequence[str], *, option: str) -> dict[str, set[int] | None]:
    """`["a", "b:0,2"]` → `{"a": None, "b": {0, 2}}`; None is all partitions. Raises BadParameter."""
    wanted: dict[str, set[int] | None] = {}
    for word in words:
        topic, colon, numbers = word.partition(":")
        chosen = [whole_number(each) for each in numbers.split(",")] if colon else []
        if not topic or None in chosen:
            raise typer.BadParameter(
                f"{option} {_shortened(word)!r}: expected a topic, or partitions of it as orders:0,2"
            )
        known = wanted.get(topic, set())
        if not colon or known is None:
            wanted[topic] = None
        else:
            wanted[topic] = known | {number for number in chosen if number is not None}
    return wanted


async def _selected(
    cluster: Cluster, wanted: dict[str, set[int] | None], committed: Collection[TopicPartition]
) -> list[TopicPartition]:
    """The partitions that were named, or all with an offset. Raises UnknownTopicOrPartition."""
    from millrace.broker.errors import UnknownTopicOrPartition

    view = await cluster.metadata(sorted(wanted) or sorted({topic for topic, _ in committed}), max_age_ms=0)
    if not wanted:
        return sorted(key for key in committed if key in view.partitions(key[0]))
    selected: list[TopicPartition] = []
    for topic, numbers in wanted.items():
        there = view.partitions(topic)
        if not there:
            raise UnknownTopicOrPartition(f"there is no topic {topic}: see millrace topics list")
        missing = sorted((numbers or set()) - {number for _, number in there})
        if missing:
            raise UnknownTopicOrPartition(
                f"topic {topic} has partitions 0 to {len(there) - 1}, not {', '.join(map(str, missing))}"
            )
        selected += [key for key in there if numbers is None or key[1] in numbers]
    return sorted(selected)


async def _plan(
    cluster: Cluster,
    target: Target,
    partitions: Iterable[TopicPartition],
    committed: dict[TopicPartition, int],
) -> dict[TopicPartition, NewOffset]:
    from millrace.broker.client.offset_reset import TargetKind, new_offset

    keys = list(partitions)
    first = await cluster.list_offsets(dict.fromkeys(keys, -2))
    end = await cluster.list_offsets(dict.fromkeys(keys, -1))
    at_time: dict[TopicPartition, int | None] = {}
    if target.kind is TargetKind.TIMESTAMP:
        found = await cluster.list_offsets(dict.fromkeys(keys, target.value))
        at_time = {key: each.offset if each.offset >= 0 else None for key, each in found.items()}
    return {
        key: new_offset(
            target,
            first=first[key].offset,
            end=end[key].offset,
            committed=committed.get(key),
            at_time=at_time.get(key),
        )
        for key in keys
    }


def _print_plan(
    name: str,
    plan: dict[TopicPartition, NewOffset],
    committed: dict[TopicPartition, int],
    form: Format,
    *,
    done: bool,
    changes: int,
) -> None:
    rows = [
        {
            "topic": topic,
            "partition": number,
            "committed": committed.get((topic, number)),
            "new": each.offset,
            "note": each.note or None,
        }
        for (topic, number), each in plan.items()
    ]
    if form is Format.JSON:
        print_json({"group": name, "executed": done, "partitions": rows})
        return
    print_rows(rows, ["topic", "partition", "committed", "new", "note"])
    if done:
        typer.echo(f"{count_of(changes, 'offset')} of group {name} set")
    else:
        typer.echo(f"dry run: {count_of(changes, 'offset')} would change; add --execute to set them")


@app.command("delete")
def delete(
    names: Annotated[list[str], typer.Argument(help="Names of the groups.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Keep the group; forget its offsets in --topic only.")
    ] = False,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC[:N,N…]",
            help="With --offsets: this topic, or these partitions of it; repeatable.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete groups with all their offsets, or with --offsets only those of a topic."""
    if offsets != bool(topics):
        raise typer.BadParameter(
            "expected --offsets and --topic TOPIC together, or neither to delete the whole group"
        )
    wanted = _partitions_by_topic(topics or [], option="--topic")
    if not yes:
        what = f"the offsets in {', '.join(topics or ())} of" if wanted else "all offsets of"
        confirm(f"Delete {what} {', '.join(names)}?")

    async def command(cluster: Cluster) -> None:
        for name in names:
            if wanted:
                await _delete_offsets(cluster, name, wanted)
            else:
                await _delete_group(cluster, name)

    with_cluster(bootstrap, command, command_config)


async def _delete_group(cluster: Cluster, name: str) -> None:
    from millrace.broker.client import groups
    from millrace.broker.errors import GroupIdNotFound, NonEmptyGroup

    try:
        await groups.delete_group(cluster, name)
    except GroupIdNotFound:
        raise _no_such_group(name) from None
    except NonEmptyGroup:
        _check_no_members(await groups.describe_group(cluster, name), "deleted")
        raise
    typer.echo(f"deleted group {name}")


async def _delete_offsets(cluster: Cluster, name: str, wanted: dict[str, set[int] | None]) -> None:
    from millrace.broker.client import group_offsets, groups
    from millrace.broker.errors import GroupIdNotFound, GroupSubscribedToTopic

    committed = await group_offsets.fetch_offsets(cluster, name)
    going, missing = _chosen_offsets(wanted, committed)
    if missing:
        if not committed and not (await groups.describe_group(cluster, name)).exists:
            raise _no_such_group(name)
        raise _refusal(f"group {name} has no offsets in {', '.join(missing)}; none of it was deleted")
    try:
        outcome = await groups.delete_offsets(cluster, name, going)
    except GroupIdNotFound:
        raise _no_such_group(name) from None
    refused = {key: error for key, error in outcome.items() if error is not None}
    read = {key[0] for key, error in refused.items() if isinstance(error, GroupSubscribedToTopic)}
    if len(refused) < len(going):
        typer.echo(f"deleted {count_of(len(going) - len(refused), 'offset')} of group {name}")
    if read:
        raise _refusal(f"members of group {name} read {', '.join(sorted(read))} now: stop them first")
    if refused:
        raise next(iter(refused.values()))


def _chosen_offsets(
    wanted: dict[str, set[int] | None], committed: Collection[TopicPartition]
) -> tuple[list[TopicPartition], list[str]]:
    """The partitions that are meant, and the words for what has no offset: `typo`, `orders:7,9`."""
    going: list[TopicPartition] = []
    missing: list[str] = []
    for topic, numbers in sorted(wanted.items()):
        there = {number for name, number in committed if name == topic}
        going += [(topic, number) for number in sorted(there if numbers is None else there & numbers)]
        if numbers is None and not there:
            missing.append(topic)
        elif numbers is not None and numbers - there:
            missing.append(f"{topic}:{','.join(map(str, sorted(numbers - there)))}")
    return going, missing


def _check_no_members(group: Group, what: str) -> None:
    """Raises NonEmptyGroup: one line that says who must be stopped."""
    from millrace.broker.client.groups import DEAD, EMPTY
    from millrace.broker.errors import NonEmptyGroup

    if group.state in (EMPTY, DEAD):
        return
    who = [f"{member.client_id} at {member.host.lstrip('/')}" for member in group.members[:3]]
    more = len(group.members) - len(who)
    listed = ", ".join(who) + (f" and {more} more" if more > 0 else "")
    raise NonEmptyGroup(
        f"group {group.group_id} cannot be {what}: it is {group.state} with "
        f"{count_of(len(group.members), 'member')} ({listed}); stop them first"
    )


def _no_such_group(name: str) -> Exception:
    from millrace.broker.errors import GroupIdNotFound

    return GroupIdNotFound(f"there is no group {name}: millrace groups list shows those there are")


def _refusal(message: str) -> Exception:
    from millrace.broker.errors import InvalidRequest

    return InvalidRequest(message)


async def _ends(cluster: Cluster, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The end offset of each partition that exists and has a leader."""
    view = await cluster.metadata(sorted({topic for topic, _ in keys}), max_age_ms=0)
    led = [key for key in keys if view.leader(*key) is not None]
    return {key: each.offset for key, each in (await cluster.list_offsets(dict.fromkeys(led, -1))).items()}
