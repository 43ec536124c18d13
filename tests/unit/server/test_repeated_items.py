"""What stands in a request more than once, and could mean either: nothing is done about it."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.server.answers import build_entity, request_type
from millrace.broker.server.handlers import create_partitions, delete_records
from millrace.broker.telemetry.metrics import BrokerMetrics


def asked(handler: ModuleType, services: dict[str, Any], topics: list[dict[str, Any]]) -> Any:
    api, version = handler.API, handler.VERSIONS[-1]
    request = build_entity(request_type(api, version), {"topics": topics})
    context: Any = SimpleNamespace(
        head=SimpleNamespace(api_key=int(api), version=version),
        broker=SimpleNamespace(metrics=BrokerMetrics(), **services),
    )
    return asyncio.run(handler.handle(request, context))


def test_a_topic_that_is_to_be_widened_twice_stays_as_it_is() -> None:
    widened: list[tuple[str, int]] = []

    async def create(name: str, count: int, *_: Any, **__: Any) -> None:
        widened.append((name, count))

    controller = SimpleNamespace(create_partitions=create)
    wanted = [("t", 3), ("u", 4), ("t", 5)]
    topics = [{"name": name, "count": count, "assignments": None} for name, count in wanted]
    answer = asked(create_partitions, {"controller": controller}, topics)
    assert [(each.name, each.error_code) for each in answer.results] == [
        ("t", ErrorCode.invalid_request),
        ("u", ErrorCode.none),
    ]
    assert widened == [("u", 4)]


def test_records_of_a_partition_that_is_named_twice_stay() -> None:
    deleted: list[tuple[str, int, int]] = []

    async def delete(topic: str, partition: int, offset: int, _timeout_ms: float) -> int:
        deleted.append((topic, partition, offset))
        return offset

    wanted = [("t", [(0, 5), (1, 6)]), ("u", [(0, 7)]), ("t", [(0, 8)])]
    topics = [
        {"name": topic, "partitions": [{"partition_index": index, "offset": at} for index, at in partitions]}
        for topic, partitions in wanted
    ]
    answer = asked(delete_records, {"replica_manager": SimpleNamespace(delete_records=delete)}, topics)
    assert [
        [(each.partition_index, each.low_watermark, each.error_code) for each in topic.partitions]
        for topic in answer.topics
    ] == [
        [(0, -1, ErrorCode.invalid_request), (1, 6, ErrorCode.none)],
        [(0, 7, ErrorCode.none)],
        [(0, -1, ErrorCode.invalid_request)],
    ]
    assert deleted == [("t", 1, 6), ("u", 0, 7)]
