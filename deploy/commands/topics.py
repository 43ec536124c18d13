"""`millrace topics`: list, create, describe, configure, move and delete the topics of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.broker.wording import count_of
from millrace.deploy.commands.cluster_session import Bootstrap, CommandConfig, confirm, with_cluster
from millrace.deploy.commands.group import command_group
from millrace.deploy.commands.output import Format, JsonFlag, OutputFormat, chosen, print_json, print_rows
from millrace.deploy.commands.topics_reassign import reassign
from millrace.deploy.commands.values import MOST_INT16, MOST_INT32, key_value_pairs

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster
    from millrace.broker.client.metadata import PartitionMetadata, TopicMetadata

app = command_group("List, create, describe, configure, move and delete topics.")

app.command("reassign")(reassign)

_DEFAULT = -1
"""For a number that the cluster's own setting decides."""


@app.command("list")
def list_topics(
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    internal: Annotated[bool, typer.Option("--internal", help="Show internal topics too.")] = False,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """List topics with their partitions and replicas, and what is wrong with them."""
    form = chosen(output, as_json)

    async def command(cluster: Cluster) -> None:
        metadata = await cluster.metadata()
        rows = [
            {
                "name": name,
                "partitions": len(topic.partitions),
                "replicas": max((len(part.replicas) for part in topic.partitions.values()), default=0),
                "topic_id": str(topic.topic_id),
                "internal": topic.internal,
                "problems": _problems(topic.partitions.values()),
            }
            for name, topic in sorted(metadata.topics.items())
            if internal or not topic.internal
        ]
        print_rows(rows, ["name", "partitions", "replicas", "problems"], form)

    with_cluster(bootstrap, command, command_config)


def _problems(partitions: Iterable[PartitionMetadata]) -> str | None:
    """What an operator should look at, in a few words; None when all is well."""
    each = list(partitions)
    counts = {
        "without leader": sum(part.leader < 0 for part in each),
        "under-replicated": sum(set(part.isr) < set(part.replicas) for part in each),
        "with offline replicas": sum(bool(part.offline) for part in each),
    }
    return ", ".join(f"{count} {words}" for words, count in counts.items() if count) or None


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            max=MOST_INT32,
            help="Number of partitions; by default the cluster's.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            "--replication-factor",
            "-r",
            min=1,
            max=MOST_INT16,
            help="Replicas of each partition; by default the cluster's.",
        ),
    ] = None,
    configs: Annotated[
        list[str] | None,
        typer.Option("--set", "--config", metavar="KEY=VALUE", help="Topic config, e.g. retention.ms=-1."),
    ] = None,
) -> None:
    """Create a topic."""
    values = key_value_pairs(configs or [], option="--set")

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin

        await admin.create_topic(cluster, name, partitions or _DEFAULT, replicas or _DEFAULT, values)
        parts = (await cluster.metadata([name])).topics[name].partitions
        replica_count = max(len(part.replicas) for part in parts.values())
        typer.echo(
            f"created {name} with {count_of(len(parts), 'partition')} of {count_of(replica_count, 'replica')}"
        )

    with_cluster(bootstrap, command, command_config)


@app.command("describe")
def describe(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="Show the settings that have their default too.")
    ] = False,
    output: OutputFormat = Format.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Show a topic's partitions with leader, replicas and offsets, and its settings."""
    form = chosen(output, as_json)

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin

        topic = await _topic(cluster, name)
        led = [(name, number) for number, part in sorted(topic.partitions.items()) if part.leader >= 0]
        first = await cluster.list_offsets(dict.fromkeys(led, -2))
        end = await cluster.list_offsets(dict.fromkeys(led, -1))
        configs = await admin.describe_configs(cluster, name)
        changed = await admin.describe_configs(cluster, name, only_set=True)
        rows = [
            {
                "partition": number,
                "leader": part.leader if part.leader >= 0 else None,
                "replicas": list(part.replicas),
                "isr": list(part.isr),
                "offline": list(part.offline),
                "first_offset": first[name, number].offset if (name, number) in first else None,
                "end_offset": end[name, number].offset if (name, number) in end else None,
            }
            for number, part in sorted(topic.partitions.items())
        ]
        if form is Format.JSON:
            print_json(
                {
                    "name": name,
                    "topic_id": str(topic.topic_id),
                    "problems": _problems(topic.partitions.values()),
                    "partitions": rows,
                    "configs": configs,
                    "changed_configs": sorted(changed),
                }
            )
        else:
            _print_description(topic, rows, configs if all_configs else changed)

    with_cluster(bootstrap, command, command_config)


async def _topic(cluster: Cluster, name: str) -> TopicMetadata:
    """The topic as it is now. Raises UnknownTopicOrPartition."""
    from millrace.broker.errors import UnknownTopicOrPartition

    topic = (await cluster.metadata([name], max_age_ms=0)).topics.get(name)
    if topic is None or not topic.partitions:
        raise UnknownTopicOrPartition(f"there is no topic {name}: millrace topics list shows those there are")
    return topic


@app.command("configure")
def configure(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")
    ] = None,
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            min=1,
            max=MOST_INT32,
            help="Widen the topic to so many; keys then go to other partitions than before.",
        ),
    ] = None,
    delete: Annotated[
        list[str] | None,
        typer.Option("--delete", metavar="KEY", help="Give a setting back to its default; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the cluster check the change, and change nothing.")
    ] = False,
) -> None:
    """Change settings of a topic, or widen it, while it is in use; settings not named stay."""
    changes: dict[str, str | None] = dict(key_value_pairs(settings or [], option="setting"))
    for key in delete or []:
        if "=" in key:
            raise typer.BadParameter(f"--delete {key!r}: expected the name of a setting alone")
        if key in changes:
            raise typer.BadParameter(f"{key} is both set and deleted")
        changes[key] = None
    if not changes and partitions is None:
        raise typer.BadParameter("nothing to change: expected KEY=VALUE, --delete KEY or --partitions N")

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin
        from millrace.broker.errors import InvalidConfig

        if changes:
            before = await admin.describe_configs(cluster, name)
            were_set = await admin.describe_configs(cluster, name, only_set=True)
            for key in delete or []:
                if key not in before:  # servers take it, and do nothing
                    raise InvalidConfig(
                        f"topic {name}: there is no setting {key}: see describe --all-configs"
                    )
            await admin.alter_configs(cluster, name, changes, validate_only=dry_run)
            for key, value in changes.items():
                if value is None and key not in were_set:
                    typer.echo(f"{key}: was not set")
                else:
                    after = "its default" if value is None else value
                    typer.echo(f"{key}: {before.get(key) or '-'} -> {after}")
        if partitions is not None:
            width = len((await _topic(cluster, name)).partitions)
            await admin.create_partitions(cluster, name, partitions, validate_only=dry_run)
            typer.echo(f"partitions: {width} -> {partitions}")
        if dry_run:
            typer.echo("dry run: the cluster would take this; nothing was changed")

    with_cluster(bootstrap, command, command_config)


@app.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    command_config: CommandConfig = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a topic and all its records."""
    if not yes:
        confirm(f"Delete topic {name} and all its records?")

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin

        await admin.delete_topic(cluster, name)
        typer.echo(f"deleted {name}")

    with_cluster(bootstrap, command, command_config)


def _print_description(
    topic: TopicMetadata, partitions: list[dict[str, Any]], configs: dict[str, str | None]
) -> None:
    typer.echo(f"{topic.name}  (id {topic.topic_id})")
    problems = _problems(topic.partitions.values())
    if problems:
        typer.echo(f"  problems: {problems}")
    for key, value in sorted(configs.items()):
        typer.echo(f"  {key} = {'' if value is None else value}")
    if not configs:
        typer.echo("  every setting has its default (--all-configs shows them)")
    columns = ["partition", "leader", "replicas", "isr", "offline", "first_offset", "end_offset"]
    print_rows(partitions, columns)
