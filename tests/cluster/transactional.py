"""What the tests of transactions share: producers, readers, and a raw producer that does as it is told."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.errors import ErrorCode

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient, batch_of, is_served
from tests.servers import BrokerProcess
from tests.waiting import Deadline, patience, until

TIMEOUT_S = 90.0
SHOWN = "what was committed is shown"
"""A commit is answered before its markers are written: whoever reads at once may not see it yet."""


def transactional(broker: BrokerProcess, transactional_id: str, **settings: object) -> Producer:
    return Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 60_000,  # it must outlast an election on a busy machine
            **{key.replace("_", "."): value for key, value in settings.items()},
        }
    )


def create_topic(broker: BrokerProcess, name: str, partitions: int = 1, **options: object) -> None:
    """A new topic; the leaders of all its partitions know their office when this returns."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    topic = NewTopic(name, partitions, **{"replication_factor": 1, **options})
    admin.create_topics([topic])[name].result(patience(TIMEOUT_S))

    def is_led() -> bool:
        return is_served(broker.port, name, partitions)

    until(is_led, f"{name} is led", within_s=TIMEOUT_S, logs_of=[broker])


def wait_for_brokers(*brokers: BrokerProcess) -> None:
    """Until each of them knows all of them: brokers hear of each other by watches."""
    ids = {broker.id for broker in brokers}

    def know_each_other() -> bool:
        for broker in brokers:
            with RawClient(broker.port) as client:
                if {known.node_id for known in client.ask(Api.METADATA, 9, topics=[]).brokers} != ids:
                    return False
        return True

    until(know_each_other, f"brokers {ids} know each other", within_s=TIMEOUT_S, logs_of=brokers)


def read(
    broker: BrokerProcess,
    topic: str,
    count: int,
    *,
    isolation: str = "read_committed",
    partitions: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> list[bytes]:
    """The first `count` values; fewer when the topic's end is reached on all partitions before."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": f"reader-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
            "fetch.wait.max.ms": 20,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    values: list[bytes] = []
    ended: set[int] = set()
    deadline = Deadline(f"{count} records of {topic}, or its end", within_s=timeout_s, logs_of=[broker])
    try:
        while len(values) < count and len(ended) < partitions:
            deadline.check(values)
            message = consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is None:
                values.append(message.value())
            elif message.error().code() == -191:  # the partition's end
                ended.add(message.partition())
        return values
    finally:
        consumer.close()


class RawProducer:
    """A transactional producer that does exactly as it is told; versions are those of TV1 clients."""

    def __init__(self, port: int, transactional_id: str, coordinator_port: int | None = None) -> None:
        self.leader = RawClient(port)
        self.coordinator = RawClient(coordinator_port or port)
        self.transactional_id = transactional_id
        self.producer_id, self.epoch = -1, -1
        self.sequences: dict[tuple[str, int], int] = {}

    def begin(self, version: int = 4, timeout_ms: int = 60_000, **former: int) -> ErrorCode:
        """InitProducerId, repeated while an older transaction is being ended."""

        def begun() -> Any:
            answer = self.coordinator.ask(
                Api.INIT_PRODUCER_ID,
                version,
                transactional_id=self.transactional_id,
                transaction_timeout=timeout_ms,
                **{"producer_id": -1, "producer_epoch": -1, **former},
            )
            return None if answer.error_code in RETRIED else answer

        answer = until(
            begun, f"the end of an older transaction of {self.transactional_id}", within_s=TIMEOUT_S
        )
        if answer.error_code is ErrorCode.none:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.sequences.clear()
        return answer.error_code

    def add(self, topic: str, *partitions: int, version: int = 3) -> ErrorCode:
        answer = self.coordinator.ask(
            Api.ADD_PARTITIONS_TO_TXN,
            version,
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[{"name": topic, "partitions": partitions}],
        )
        return answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code

    def add_until_accepted(self, topic: str, *partitions: int) -> None:
        until(lambda: self.add(topic, *partitions) is ErrorCode.none)

    def produce(self, topic: str, partition: int, *values: bytes, version: int = 9, **options) -> ErrorCode:
        key = (topic, partition)
        sequence = options.pop("sequence", self.sequences.get(key, 0))
        batch = batch_of(
            *values,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        named = options.pop("transactional_id", self.transactional_id)
        (answer,) = self.leader.produce({key: batch}, version=version, acks=-1, transactional_id=named)
        if answer.error_code == 0:
            self.sequences[key] = sequence + len(values)
        return ErrorCode(answer.error_code)

    def end(self, committed: bool = True, version: int = 3) -> ErrorCode:
        answer = self.coordinator.ask(
            Api.END_TXN,
            version,
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=committed,
        )
        return answer.error_code

    def end_everywhere(self, committed: bool = True) -> None:
        """Until the markers are there: then the same request says that it was done."""
        until(lambda: self.end(committed) is ErrorCode.none)
        until(lambda: self.state() in ("CompleteCommit", "CompleteAbort"))

    def state(self) -> str:
        answer = self.coordinator.ask(
            Api.LIST_TRANSACTIONS, 1, producer_id_filters=[self.producer_id], duration_filter=-1
        )
        if answer.error_code is ErrorCode.coordinator_load_in_progress:
            return "loading"  # another partition of the log may still be read
        assert answer.error_code is ErrorCode.none
        return next((each.transaction_state for each in answer.transaction_states), "")


RETRIED = {
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
    ErrorCode.coordinator_not_available,
}


def coordinator_of(port: int, transactional_id: str) -> int:
    """Makes the transactions topic on first use; the coordinator's port."""
    with RawClient(port) as client:

        def port_of_it() -> int | None:
            answer = client.ask(
                Api.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=[transactional_id]
            ).coordinators[0]
            return int(answer.port) if answer.error_code is ErrorCode.none else None

        return until(port_of_it, f"a coordinator of {transactional_id}", within_s=TIMEOUT_S)


class KnownId(NamedTuple):
    """What its coordinator says of a transactional id. `state` in Kafka's words."""

    producer_id: int
    state: str


async def known_ids(cluster: Cluster, prefix: str) -> dict[str, KnownId]:
    """The transactional ids that begin so, as all brokers list their own."""
    request = request_schema(Api.LIST_TRANSACTIONS, 0).ListTransactionsRequest(
        state_filters=(), producer_id_filters=()
    )
    found: dict[str, KnownId] = {}
    for node_id in (await cluster.metadata([], max_age_ms=0)).brokers:
        answer = await cluster.request(request, node_id=node_id)
        assert answer.error_code is ErrorCode.none
        found |= {
            str(each.transactional_id): KnownId(int(each.producer_id), str(each.transaction_state))
            for each in answer.transaction_states
            if each.transactional_id.startswith(prefix)
        }
    return found


async def told_timeout_ms(cluster: Cluster, transactional_id: str) -> int:
    """How long a transaction of this id may stay open, as its coordinator was told. It has had one: of an id
    without, the time of its beginning cannot be read."""
    request = request_schema(Api.DESCRIBE_TRANSACTIONS, 0).DescribeTransactionsRequest(
        transactional_ids=(transactional_id,)
    )
    coordinator = await cluster.coordinator(transactional_id, "transaction")
    (told,) = (await cluster.request(request, node_id=coordinator)).transaction_states
    assert told.error_code is ErrorCode.none
    return int(told.transaction_timeout.total_seconds() * 1000)
