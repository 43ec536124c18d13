"""`millrace topics`: list, create, describe and delete topics of any Kafka-protocol cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.deploy.commands.output import Format, OutputFormat, print_rows
from millrace.deploy.commands.values import addresses, key_value_pairs

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster

app = typer.Typer(help="List, create, describe and delete topics.", no_args_is_help=True)

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap", "-b", envvar="MILLRACE_BOOTSTRAP", help="host:port[,host:port…] of the cluster."
    ),
]


@app.command("list")
def list_topics(
    bootstrap: Bootstrap = "127.0.0.1:9092",
    internal: Annotated[bool, typer.Option("--internal", help="Show internal topics too.")] = False,
    output: OutputFormat = Format.TABLE,
) -> None:
    """List topics with their partitions and replicas."""

    async def command(cluster: Cluster) -> None:
        metadata = await cluster.metadata()
        rows = [
            {
                "name": name,
                "partitions": len(topic.partitions),
                "replicas": max((len(part.replicas) for part in topic.partitions.values()), default=0),
                "topic_id": str(topic.topic_id),
                "internal": topic.internal,
            }
            for name, topic in sorted(metadata.topics.items())
            if internal or not topic.internal
        ]
        print_rows(rows, ["name", "partitions", "replicas"], output)

    _with_cluster(bootstrap, command)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    partitions: Annotated[int, typer.Option("--partitions", "-p", min=1, help="Number of partitions.")] = 1,
    replicas: Annotated[int, typer.Option("--replicas", "-r", min=1, help="Replicas of each partition.")] = 1,
    configs: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Topic config, e.g. retention.ms=-1."),
    ] = None,
) -> None:
    """Create a topic."""
    values = key_value_pairs(configs or [], option="--set")

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin

        await admin.create_topic(cluster, name, partitions, replicas, values)
        typer.echo(f"created {name} with {partitions} partition{'s' if partitions > 1 else ''}")

    _with_cluster(bootstrap, command)


@app.command("describe")
def describe(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    output: OutputFormat = Format.TABLE,
) -> None:
    """Show a topic's partitions with their leader, replicas and offsets, and its configs."""

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin
        from millrace.broker.errors import UnknownTopicOrPartition

        topic = (await cluster.metadata([name])).topics.get(name)
        if topic is None or not topic.partitions:
            raise UnknownTopicOrPartition(
                f"there is no topic {name}: millrace topics list shows those there are"
            )
        keys = [(name, partition) for partition in sorted(topic.partitions)]
        first = await cluster.list_offsets(dict.fromkeys(keys, -2))
        last = await cluster.list_offsets(dict.fromkeys(keys, -1))
        configs = await admin.describe_configs(cluster, name)
        rows = [
            {
                "partition": partition,
                "leader": part.leader,
                "replicas": list(part.replicas),
                "isr": list(part.isr),
                "first_offset": first[name, partition][0],
                "end_offset": last[name, partition][0],
            }
            for partition, part in sorted(topic.partitions.items())
        ]
        _print_description(name, str(topic.topic_id), rows, configs, output)

    _with_cluster(bootstrap, command)


@app.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    bootstrap: Bootstrap = "127.0.0.1:9092",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a topic and all its records."""
    if not yes:
        typer.confirm(f"Delete topic {name} and all its records?", abort=True)

    async def command(cluster: Cluster) -> None:
        from millrace.broker.client import admin

        await admin.delete_topic(cluster, name)
        typer.echo(f"deleted {name}")

    _with_cluster(bootstrap, command)


def _with_cluster(bootstrap: str, command: Callable[[Cluster], Awaitable[None]]) -> None:
    """Runs `command` with a connection to the cluster; its errors name the cluster and the topic."""
    servers = addresses(bootstrap, option="--bootstrap")
    from millrace.broker.client.cluster import Cluster

    async def session() -> None:
        async with Cluster(bootstrap, servers, client_id="millrace-cli") as cluster:
            await command(cluster)

    asyncio.run(session())


def _print_description(
    name: str, topic_id: str, partitions: list[dict[str, Any]], configs: dict[str, str | None], output: Format
) -> None:
    if output is Format.JSON:
        import json

        description = {"name": name, "topic_id": topic_id, "partitions": partitions, "configs": configs}
        print(json.dumps(description, indent=2))
        return
    typer.echo(f"{name}  (id {topic_id})")
    for key, value in sorted(configs.items()):
        typer.echo(f"  {key} = {'' if value is None else value}")
    print_rows(partitions, ["partition", "leader", "replicas", "isr", "first_offset", "end_offset"])
