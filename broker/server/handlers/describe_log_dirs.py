"""DescribeLogDirs, versions 1 to 4: the size of every partition on this broker, and the room on its disks."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import RequestContext

API = Api.DESCRIBE_LOG_DIRS
VERSIONS = range(1, 5)


async def handle(request: Any, context: RequestContext) -> Any:
    wanted: set[TopicPartition] | None = None
    if request.topics is not None:
        wanted = {(topic.topic, number) for topic in request.topics for number in topic.partitions}
    sizes: dict[Path, dict[str, list[dict[str, int]]]] = {
        directory: defaultdict(list) for directory in context.broker.config.data
    }
    for topic, partition, directory, size in context.broker.replica_manager.sizes():
        if wanted is None or (topic, partition) in wanted:
            entry = {"partition_index": partition, "partition_size": size, "offset_lag": 0}
            sizes.setdefault(directory, defaultdict(list))[topic].append(entry)
    failed = context.broker.replica_manager.failed_folders
    results = [
        await _directory(directory, topics, directory in failed) for directory, topics in sizes.items()
    ]
    return answer(API, context.head.version, error_code=NO_ERROR, results=results)


async def _directory(
    directory: Path, topics: dict[str, list[dict[str, int]]], has_failed: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "error_code": NO_ERROR,
        "log_dir": str(directory.absolute()),
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
    }
    if has_failed:
        return result | {"error_code": KafkaStorageError.code}
    try:
        room = await asyncio.to_thread(os.statvfs, directory)
    except OSError:
        return result | {"error_code": KafkaStorageError.code}
    return result | {
        "total_bytes": room.f_frsize * room.f_blocks,
        "usable_bytes": room.f_frsize * room.f_bavail,
    }
