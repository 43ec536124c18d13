"""Three real brokers and a real ZooKeeper with the ways between them cut at a known moment.

Any two servers can be cut off from each other while clients reach all of them (`faults/proxies.py`). What is
cut at random, and beside other faults, is in `test_fault_rounds.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from millrace.broker.errors import NotLeaderOrFollower, RequestTimedOut
from millrace.broker.protocol.frames import Api
from tests.cluster.faults.cluster import BROKERS, NODES, ZOOKEEPER, Broker, Cluster
from tests.cluster.faults.proxies import ProxyNetwork
from tests.cluster.faults.timeline import Timeline
from tests.cluster.three_brokers import read_all
from tests.raw_client import RawClient, batch_of
from tests.waiting import patience, until

pytestmark = pytest.mark.java
WHOLE_S = 90.0
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(ProxyNetwork(), tmp_path_factory.mktemp("cuts"), Timeline(), small_disk=False)
    try:
        made.start()
        assert made.wait_until_whole(patience(WHOLE_S)) == []
        yield made
        assert made.problems == [] and made.ended_count == 0, "a broker that is cut off goes on"
    finally:
        made.stop()


def told(broker: Broker, *topics: str) -> Any:
    """What this broker says of the cluster."""
    names = [{"name": name} for name in topics]
    with RawClient(int(broker.bootstrap.rpartition(":")[2])) as client:
        return client.ask(Api.METADATA, 12, topics=names, allow_auto_topic_creation=False)


def partition(broker: Broker, topic: str) -> Any:
    return told(broker, topic).topics[0].partitions[0]


def eventually(cluster: Cluster, probe: Any, what: str) -> Any:
    return until(probe, what, within_s=TIMEOUT_S, retry=(OSError, EOFError), logs_of=cluster.brokers.values())


def led(cluster: Cluster, topic: str) -> tuple[Broker, list[Broker]]:
    """The leader, as all say, and the others."""

    def agreed() -> int | None:
        leaders = {int(partition(broker, topic).leader_id) for broker in cluster.brokers.values()}
        return leaders.pop() if len(leaders) == 1 else None

    leader = eventually(cluster, agreed, f"{topic} is led")
    return cluster.brokers[leader], [cluster.brokers[each] for each in BROKERS if each != leader]


def send(cluster: Cluster, topic: str, numbers: range) -> None:
    """Until all are acknowledged by whoever must have them."""
    errors: list[Any] = []
    # What a client asks every five minutes it may go on believing for as long as that.
    often = {"topic.metadata.refresh.interval.ms": 500, "socket.timeout.ms": 3_000, "log_level": 1}
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, **often})
    for number in numbers:
        producer.produce(topic, str(number), on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(patience(TIMEOUT_S)) == 0 and errors == [None] * len(numbers)


def cut_off(cluster: Cluster, node: str, others: list[str], *, heal: bool = False) -> None:
    for other in others:
        if heal:
            cluster.network.heal(node, other)
        else:
            cluster.network.cut(node, other, both_ways=True)


def test_leader_that_is_cut_off_acknowledges_nothing_and_is_succeeded(cluster: Cluster) -> None:
    cluster.create_topics({"isolated": 1})
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    send(cluster, "isolated", range(20))
    leader, others = led(cluster, "isolated")
    away = [node for node in NODES if node != leader.node]
    cut_off(cluster, leader.node, away)
    with RawClient(int(leader.bootstrap.rpartition(":")[2])) as client:
        client.socket.settimeout(patience(TIMEOUT_S))
        answer = client.produce({("isolated", 0): batch_of(b"999")}, acks=-1, timeout_ms=1_000)[0]
    assert answer.error_code in (RequestTimedOut.code, NotLeaderOrFollower.code)
    successor = eventually(
        cluster,
        lambda: next(
            (each for each in others if partition(each, "isolated").leader_id not in (-1, leader.id)), None
        ),
        "another leads",
    )
    assert partition(successor, "isolated").leader_id != leader.id
    send(cluster, "isolated", range(20, 40))
    cut_off(cluster, leader.node, away, heal=True)
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    assert read_all(cluster.bootstrap, "isolated") == list(range(40))


def test_follower_that_its_leader_cannot_reach_leaves_the_in_sync_set_and_comes_back(
    cluster: Cluster,
) -> None:
    """Both keep their sessions: nobody is dead, and only the leader can tell."""
    cluster.create_topics({"followed": 1})
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    leader, (follower, other) = led(cluster, "followed")
    cut_off(cluster, leader.node, [follower.node])
    send(cluster, "followed", range(20))
    eventually(
        cluster,
        lambda: set(partition(other, "followed").isr_nodes) == {leader.id, other.id},
        "the follower is out of sync",
    )
    assert partition(other, "followed").leader_id == leader.id
    send(cluster, "followed", range(20, 40))
    cut_off(cluster, leader.node, [follower.node], heal=True)
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    assert read_all(cluster.bootstrap, "followed") == list(range(40))


def test_leader_without_zookeeper_acknowledges_nothing_that_needs_another_in_sync_set(
    cluster: Cluster,
) -> None:
    """Two of three have it, which is enough by `min.insync.replicas`. But the third may be elected at any
    moment for as long as nobody has written down that it is out of sync."""
    cluster.create_topics({"suspended": 1})
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    send(cluster, "suspended", range(20))
    leader, (follower, _) = led(cluster, "suspended")
    cut_off(cluster, leader.node, [ZOOKEEPER, follower.node])
    with RawClient(int(leader.bootstrap.rpartition(":")[2])) as client:
        client.socket.settimeout(patience(TIMEOUT_S))
        answers = [
            client.produce({("suspended", 0): batch_of(b"999")}, acks=-1, timeout_ms=500)[0].error_code
            for _ in range(3)
        ]
    assert set(answers) <= {RequestTimedOut.code, NotLeaderOrFollower.code}, answers
    send(cluster, "suspended", range(20, 40))  # by whoever leads when the session is over
    cut_off(cluster, leader.node, [ZOOKEEPER, follower.node], heal=True)
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    assert [each for each in read_all(cluster.bootstrap, "suspended") if each != 999] == list(range(40))


def test_controller_that_is_cut_off_from_zookeeper_is_succeeded(cluster: Cluster) -> None:
    cluster.create_topics({"ruled": 1})
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    controller = cluster.brokers[told(cluster.brokers[1]).controller_id]
    others = [broker for broker in cluster.brokers.values() if broker is not controller]
    cut_off(cluster, controller.node, [ZOOKEEPER])
    eventually(
        cluster,
        lambda: all(told(each).controller_id in {other.id for other in others} for each in others),
        "another is in office",
    )
    # What is asked of the new one is done, though one broker knows nothing of it yet.
    admin = AdminClient({"bootstrap.servers": ",".join(each.bootstrap for each in others)})
    admin.delete_topics(["ruled"], operation_timeout=0)["ruled"].result(patience(TIMEOUT_S))
    eventually(
        cluster,
        lambda: all(told(each, "ruled").topics[0].error_code for each in others),
        "the topic is going",
    )
    cut_off(cluster, controller.node, [ZOOKEEPER], heal=True)
    assert cluster.wait_until_whole(patience(WHOLE_S)) == []
    eventually(
        cluster,
        lambda: told(controller, "ruled").topics[0].error_code and told(controller).controller_id > 0,
        "the one that was cut off knows",
    )
