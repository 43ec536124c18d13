"""Members of a group that read committed data, commit what they have read, and keep all of it."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tests.cluster.faults.producers import CLIENT
from tests.cluster.faults.records import READERS, TOPICS, GroupJournal
from tests.cluster.faults.workers import Worker

COMMIT_INTERVAL_S = 0.5
MOST_AT_ONCE = 1_000


class GroupReader(Worker):
    """One member. All members of a group share a journal."""

    def __init__(self, name: str, journal: GroupJournal, bootstrap: str, settings: dict[str, Any]) -> None:
        super().__init__(name)
        self._journal = journal
        self._consumer = Consumer(
            {
                **CLIENT,
                "bootstrap.servers": bootstrap,
                "group.id": READERS,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "session.timeout.ms": 8_000,
                "heartbeat.interval.ms": 1_000,
                "fetch.wait.max.ms": 200,
                "on_commit": self._on_commit,
                **settings,
            }
        )
        self._consumer.subscribe(list(TOPICS))
        self._next_commit = 0.0

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            if error is None and each.error is None and each.offset >= 0:
                self._journal.acknowledged(each.topic, each.partition, each.offset)

    def step(self) -> None:
        for message in self._consumer.consume(MOST_AT_ONCE, 0.2):
            if message.error() is None:
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                self._journal.saw(topic, partition, offset, message.value())
        if time.monotonic() >= self._next_commit:
            self._next_commit = time.monotonic() + COMMIT_INTERVAL_S
            try:
                self._consumer.commit(asynchronous=True)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._NO_OFFSET:
                    raise

    def settle(self) -> bool:
        """A reader has nothing under way that anybody waits for; as a rule it is never halted."""
        return True

    def close(self) -> None:
        self._consumer.close()
