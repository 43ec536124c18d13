"""What the handlers of the group APIs read from a request in the same way."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.context import RequestContext

_MILLISECOND = datetime.timedelta(milliseconds=1)


def milliseconds(duration: datetime.timedelta) -> int:
    return duration // _MILLISECOND


def instance_id_of(request: Any) -> str | None:
    """A static member's instance id; versions before KIP-345 have none."""
    instance_id: str | None = getattr(request, "group_instance_id", None)
    return instance_id


def client_host(context: RequestContext) -> str:
    """The peer's address as Apache Kafka shows it to tools, with a slash before it."""
    return f"/{context.client_address}"


def partition_exists(context: RequestContext, topic: str, partition: int) -> bool:
    return context.broker.metadata_cache.partition(topic, partition) is not None


def errors_by_topic(errors: Mapping[TopicPartition, ErrorCode]) -> list[dict[str, Any]]:
    """An error for each partition, in the shape that the answers to commits have."""
    topics: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for (topic, partition), error in errors.items():
        topics[topic].append({"partition_index": partition, "error_code": error})
    return [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()]
