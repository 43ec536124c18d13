"""Which offsets `format("millrace")` reads, as the cluster has them when Spark plans the read.

Called by `spark_source`; the rules are in `offset_limits`. What is not asked for is not looked at: times, and
the names of all topics, cost a request each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from millrace.audit.scanning.range_reader import connect
from millrace.audit.spark.kafka_options import SourceOptions, Subscription
from millrace.audit.spark.offset_limits import Limit, bounds_of
from millrace.audit.spark.partition_sizes import bytes_per_offset
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.client import offsets
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.topic_partition import TopicPartition


async def pin_ranges(source: SourceOptions) -> list[OffsetRange]:
    """A range for each partition that is read, empty ones too.

    Raises ConfigError for topics, partitions and offsets that are not there; ClusterUnreachable.
    """
    ((name, bootstrap),) = source.read.bootstraps.items()
    async with connect(name, bootstrap, source.read.securities) as cluster:
        wanted = source.subscription
        metadata = await cluster.metadata(None if wanted.pattern else list(wanted.topics))
        keys = partitions_of(wanted, metadata, name)
        starts = await cluster.list_offsets(dict.fromkeys(keys, offsets.EARLIEST))
        ends = await cluster.list_offsets(
            dict.fromkeys(keys, offsets.LATEST), read_committed=source.read.read_committed
        )
        bounds = bounds_of(
            {key: (starts[key].offset, ends[key].offset) for key in keys},
            source.start,
            source.end,
            await _offsets_at(cluster, source.start, keys),
            await _offsets_at(cluster, source.end, keys),
            source.read.fail_on_loss,
        )
        densities = await bytes_per_offset(cluster, bounds)
    return [
        OffsetRange(
            cluster=name,
            tier=source.tier,
            topic=topic,
            topic_here=topic,
            partition=number,
            first_offset=bounds[topic, number][0],
            end_offset=bounds[topic, number][1],
            topic_id=str(metadata.topics[topic].topic_id),
            bytes_per_offset=densities.get((topic, number), 0.0),
        )
        for topic, number in keys
    ]


async def _offsets_at(
    cluster: Cluster, limit: Limit, keys: Sequence[TopicPartition]
) -> Mapping[TopicPartition, int]:
    times = limit.asked_times(keys)
    found = await cluster.list_offsets(times) if times else {}
    return {key: listed.offset for key, listed in found.items()}


def partitions_of(wanted: Subscription, metadata: ClusterMetadata, cluster: str) -> list[TopicPartition]:
    """The partitions that are read, in order. Raises ConfigError for one that was named and is not there."""
    if wanted.pattern:
        named = re.compile(wanted.pattern)
        topics = sorted(
            name for name, topic in metadata.topics.items() if named.search(name) and not topic.internal
        )
        return [key for topic in topics for key in metadata.partitions(topic)]
    for topic in wanted.topics:
        if topic not in metadata.topics:
            raise ConfigError(f"option {wanted.option}", topic, f"a topic that cluster {cluster} has")
    there = dict.fromkeys(key for topic in wanted.topics for key in metadata.partitions(topic))
    for topic, number in wanted.partitions:
        if (topic, number) not in there:
            highest = len(metadata.partitions(topic)) - 1
            raise ConfigError(
                f"option {wanted.option}", f"{topic}-{number}", f"a partition of it, 0 to {highest}"
            )
    return list(wanted.partitions or there)
