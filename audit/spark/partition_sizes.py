"""How many bytes an offset of a partition takes, so that tasks can be planned even.

Called while ranges are pinned (`capture`, `pinning.pin_ranges`). Estimates only: nothing but the
evenness of tasks depends on them, so whatever goes wrong here leaves a partition out and fails nothing.

DescribeLogDirs (KIP-113) gives every partition's size in one request a broker. It needs the right to describe
the cluster, which an auditor may not have; then the largest partitions are probed by one small fetch each, in
the middle, whose batches tell what their records take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.errors import MillraceError
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

TIME_LIMIT_S = 5.0  # of each of the two ways: a plan is not worth more waiting
PROBED_PARTITIONS = 64
PROBE_BYTES = 64 << 10
PROBES_AT_ONCE = 8
_VERSIONS = (1, 4)
_BATCH_HEADER_SIZE = 61

Bounds = Mapping[TopicPartition, tuple[int, int]]


async def bytes_per_offset(cluster: Cluster, bounds: Bounds) -> dict[TopicPartition, float]:
    """For each partition, given its log's (start offset, end offset), about how many bytes an offset takes.

    Partitions of which nothing is known are left out, as are empty ones.
    """
    bounds = {key: (start, end) for key, (start, end) in bounds.items() if end > start}
    if not bounds:
        return {}
    sizes = await _in_time(_log_sizes(cluster, list(bounds)))
    found = {
        key: size / (bounds[key][1] - bounds[key][0])
        for key, size in sizes.items()
        if key in bounds and size > 0
    }
    missing = sorted(bounds.keys() - found.keys(), key=lambda key: bounds[key][0] - bounds[key][1])
    if missing:
        found |= await _in_time(
            _probe_all(cluster, {key: bounds[key] for key in missing[:PROBED_PARTITIONS]})
        )
    return found


async def _in_time(work: Coroutine[Any, Any, dict[TopicPartition, float]]) -> dict[TopicPartition, float]:
    """What `work` finds, or nothing where it is refused or takes too long."""
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            return await work
    except (MillraceError, TimeoutError):
        return {}


async def _log_sizes(cluster: Cluster, keys: Sequence[TopicPartition]) -> dict[TopicPartition, float]:
    """Bytes of each partition's log, as its leader has it. Raises the first broker's error."""
    view = await cluster.metadata(sorted({topic for topic, _ in keys}))
    groups = view.by_leader(keys)
    asked = [
        _log_sizes_at(cluster, node_id, wanted) for node_id, wanted in groups.items() if node_id is not None
    ]
    return {key: size for sizes in await asyncio.gather(*asked) for key, size in sizes.items()}


async def _log_sizes_at(
    cluster: Cluster, node_id: int, keys: Sequence[TopicPartition]
) -> dict[TopicPartition, float]:
    schema = request_schema(
        Api.DESCRIBE_LOG_DIRS, await cluster.api_version(Api.DESCRIBE_LOG_DIRS, *_VERSIONS, node_id)
    )
    by_topic: dict[str, list[int]] = {}
    for topic, partition in keys:
        by_topic.setdefault(topic, []).append(partition)
    request = schema.DescribeLogDirsRequest(
        topics=tuple(
            schema.DescribableLogDirTopic(topic=topic, partitions=tuple(partitions))
            for topic, partitions in by_topic.items()
        )
    )
    answer = await cluster.request(request, node_id=node_id)
    return {
        (str(topic.name), int(each.partition_index)): float(each.partition_size)
        for folder in answer.results
        if not folder.error_code
        for topic in folder.topics
        for each in topic.partitions
        if not each.is_future_key
    }


async def _probe_all(cluster: Cluster, bounds: Bounds) -> dict[TopicPartition, float]:
    turns = asyncio.Semaphore(PROBES_AT_ONCE)
    found: dict[TopicPartition, float] = {}

    async def probe(key: TopicPartition, middle: int) -> None:
        async with turns:
            try:
                found[key] = await _probe(cluster, key, middle)
            except (MillraceError, ValueError):
                return

    await asyncio.gather(*(probe(key, (start + end) // 2) for key, (start, end) in bounds.items()))
    return found


async def _probe(cluster: Cluster, key: TopicPartition, offset: int) -> float:
    """Bytes an offset in the batches at `offset`. Raises KafkaError, ValueError where there are none."""
    leader = (await cluster.metadata([key[0]])).leader(*key)
    if leader is None:
        raise ValueError("no leader")
    answers = await fetch(
        cluster,
        leader,
        {key: FetchPosition(offset)},
        max_wait_ms=0,
        max_bytes=PROBE_BYTES,
        partition_max_bytes=PROBE_BYTES,
        purpose="probe",
    )
    return density(answers[0].records)


def density(records: memoryview) -> float:
    """Bytes an offset of the batches at the head of a fetch's answer, of which the last may be cut. Raises
    ValueError where there is not even one header."""
    position = size = offsets = 0
    while position + _BATCH_HEADER_SIZE <= len(records):
        length = int.from_bytes(records[position + 8 : position + 12], "big", signed=True)
        last_delta = int.from_bytes(records[position + 23 : position + 27], "big", signed=True)
        if length < _BATCH_HEADER_SIZE - 12 or last_delta < 0 or records[position + 16] != 2:
            break
        size += 12 + length
        offsets += last_delta + 1
        position += 12 + length
    if not offsets:
        raise ValueError("no batches")
    return size / offsets
