"""Settings of topics on a real broker: they are there as soon as the topic is, and while they cannot be read
nothing is deleted by others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import Session
from millrace.broker.errors import NotLeaderOrFollower, UnknownTopicOrPartition
from millrace.broker.protocol.frames import Api
from millrace.broker.server.topic_settings import DELETE, DYNAMIC_TOPIC_CONFIG, SET
from millrace.broker.storage.log_config import UNREADABLE
from tests.cluster.one_broker import create
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java

DEADLINE_S = 60.0
TOPICS = 60


def policies(client: RawClient, topics: list[str]) -> dict[str, str | None]:
    """The `cleanup.policy` of each topic; None while it is not known."""
    answer = client.ask(
        Api.DESCRIBE_CONFIGS,
        4,
        resources=[
            {"resource_type": 2, "resource_name": topic, "configuration_keys": ["cleanup.policy"]}
            for topic in topics
        ],
    )
    assert {result.error_code for result in answer.results} <= {0, UnknownTopicOrPartition.code}
    return {
        result.resource_name: result.configs[0].value if result.configs else None for result in answer.results
    }


def test_whoever_describes_new_topics_at_once_never_sees_the_defaults(broker: BrokerProcess) -> None:
    """Two connections: one has topics made and waits for none, the other describes them all the while."""
    names = [f"compact-{number}" for number in range(TOPICS)]
    new = [
        {
            "name": name,
            "num_partitions": 1,
            "replication_factor": 1,
            "configs": [{"name": "cleanup.policy", "value": "compact"}],
        }
        for name in names
    ]
    seen: set[str | None] = set()
    with RawClient(broker.port) as creator, RawClient(broker.port) as onlooker:
        creator.ask(Api.CREATE_TOPICS, 7, topics=new, timeout=0)
        deadline = time.monotonic() + DEADLINE_S
        while set(shown := policies(onlooker, names).values()) != {"compact"}:
            seen |= set(shown)
            assert time.monotonic() < deadline, f"not all topics are there: {shown}"
    assert seen <= {None, "compact"}


def start_of(client: RawClient, topic: str) -> int:
    """The first offset that is left; -1 while the broker does not serve the partition."""
    answer = client.ask(
        Api.LIST_OFFSETS,
        4,
        replica_id=-1,
        topics=[{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -2}]}],
    )
    partition = answer.topics[0].partitions[0]
    assert partition.error_code in (0, NotLeaderOrFollower.code, UnknownTopicOrPartition.code)
    return int(partition.offset)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


SPOILT = {
    "unreadable": b"{not json",
    "unusable": b'{"version":1,"config":{"retention.ms":"for ever"}}',
}


def test_while_settings_cannot_be_understood_nothing_is_deleted_and_they_can_be_mended(
    broker_factory: BrokerFactory,
) -> None:
    broker = broker_factory(log_retention_check_interval_ms=50)
    old = batch_of(b"of long ago", timestamp_ms=1)
    with RawClient(broker.port) as client:
        kept = {why: create(client, retention_ms="-1", segment_ms="1") for why in SPOILT}
        for topic in (*kept.values(), *kept.values()):
            client.produce({(topic, 0): old})
    broker.stop()
    rewrite_settings(broker, {topic: SPOILT[why] for why, topic in kept.items()})
    broker.start()
    with RawClient(broker.port) as client:
        # Retention looks at all logs in a round: one that takes this one's records has seen the others.
        control = create(client, segment_ms="1")
        for rounds in (1, 2):
            client.produce({(control, 0): old})
            until(lambda rounds=rounds: start_of(client, control) >= rounds, "retention does not run")
        for why, topic in kept.items():
            assert start_of(client, topic) == 0
            name = UNREADABLE if why == "unreadable" else "retention.ms"
            assert name in settings_of(client, topic)
            assert name in alter(client, topic, {"segment.bytes": "100000"}), "others mend nothing"
            assert alter(client, topic, {name: None, "retention.bytes": "-1"}) == ""
            assert name not in settings_of(client, topic)
    assert "a topic's settings cannot be used: nothing of it is deleted" in broker.log


def settings_of(client: RawClient, topic: str) -> dict[str, str | None]:
    """Those that were set for the topic itself."""
    resource = {"resource_type": 2, "resource_name": topic, "configuration_keys": None}
    (result,) = client.ask(Api.DESCRIBE_CONFIGS, 4, resources=[resource]).results
    assert result.error_code == 0
    return {each.name: each.value for each in result.configs if each.config_source == DYNAMIC_TOPIC_CONFIG}


def alter(client: RawClient, topic: str, changes: dict[str, str | None]) -> str:
    """Set these, delete those that are None; why not, or nothing."""
    configs = [
        {"name": name, "config_operation": DELETE if value is None else SET, "value": value}
        for name, value in changes.items()
    ]
    resource = {"resource_type": 2, "resource_name": topic, "configs": configs}
    answer = client.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=False)
    (result,) = answer.responses
    assert (result.error_code == 0) == (not result.error_message)
    return result.error_message or ""


def rewrite_settings(broker: BrokerProcess, written: dict[str, bytes]) -> dict[str, bytes]:
    """What an operator may do to the znodes; what stood there before."""

    async def rewrite() -> dict[str, bytes]:
        session = Session(broker.zookeeper, session_timeout_ms=10_000, connection_timeout_ms=30_000)
        await session.start()
        before = {}
        try:
            for topic, data in written.items():
                path = paths.topic_config_path(topic)
                before[topic] = (await session.get(path)).data
                await session.set(path, data)
        finally:
            await session.stop()
        return before

    return asyncio.run(rewrite())
