"""What the tests of the old model's consumer share: topics and messages, and a look into ZooKeeper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from millrace.broker.coordination.zookeeper_consumer import Message, MessageStream, ZookeeperConsumer
from millrace.broker.errors import NotLeaderOrFollower
from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import until

DEADLINE_S = 120.0
GROUP = "billing"
FAST: dict[str, Any] = {
    "auto_offset_reset": "smallest",
    "auto_commit_interval_ms": 100,
    "consumer_timeout_ms": 60_000,
    "zookeeper_session_timeout_ms": 4_000,
    "rebalance_backoff_ms": 1_500,
}


def eventually(probe: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `probe`."""
    return until(probe, what, within_s=deadline_s)


def create(broker: BrokerProcess, topic: str, partitions: int, **configs: str) -> None:
    with RawClient(broker.port) as client:
        wanted = {
            "name": topic,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
    assert answer.topics[0].error_code == 0, answer


def fill(broker: BrokerProcess, topic: str, partition: int, *values: str, **options: Any) -> None:
    """Produces one batch, as soon as the broker leads the partition."""
    batch = batch_of(*(value.encode() for value in values), **options)
    with RawClient(broker.port) as client:

        def answered() -> Any:
            (answer,) = client.produce({(topic, partition): batch})
            return None if answer.error_code == NotLeaderOrFollower.code else answer

        answer = eventually(answered, f"broker {broker.port} leads {topic}-{partition}")
    assert answer.error_code == 0, answer


def numbered(count: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


def take(stream: MessageStream, count: int) -> list[Message]:
    return [next(stream) for _ in range(count)]


def stream_of(consumer: ZookeeperConsumer, topic: str = "orders") -> MessageStream:
    return consumer.create_message_streams({topic: 1})[topic][0]


@contextmanager
def looking_into(zookeeper_path: str) -> Iterator[KazooClient]:
    """ZooKeeper as another tool sees it."""
    client = KazooClient(zookeeper_path)
    client.start(20)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def committed(peek: KazooClient, topic: str = "orders", partition: int = 0) -> int | None:
    try:
        return int(peek.get(f"/consumers/{GROUP}/offsets/{topic}/{partition}")[0])
    except NoNodeError:
        return None


def owners(peek: KazooClient, topic: str = "orders") -> dict[int, str]:
    found = {}
    for name in peek.get_children(f"/consumers/{GROUP}/owners/{topic}"):
        try:
            found[int(name)] = peek.get(f"/consumers/{GROUP}/owners/{topic}/{name}")[0].decode()
        except NoNodeError:
            continue
    return found


def end_session_of(consumer: ZookeeperConsumer) -> None:
    """What an expiry does: the server ends the session without asking its holder."""
    session = consumer._connector._session
    twin = KazooClient(session._servers, client_id=session._kazoo.client_id)
    twin.start(20)
    twin.stop()
    twin.close()
