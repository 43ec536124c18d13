"""An idempotent producer that writes numbered records and keeps what it was told of each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tests.cluster.faults.records import TOPICS, ProducerJournal, value_of
from tests.cluster.faults.workers import Worker

BURST = 10
BURST_INTERVAL_S = 0.1
MOST_UNANSWERED = 1_000
DELIVERY_TIMEOUT_MS = 180_000

CLIENT: dict[str, Any] = {
    "socket.timeout.ms": 10_000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.interval.ms": 5_000,
    "log_level": 1,  # that brokers are away now and then is no news here
}
"""Of every client of the run."""

PRODUCER: dict[str, Any] = {
    **CLIENT,
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
    "request.timeout.ms": 10_000,
    "retry.backoff.ms": 50,
}


class IdempotentProducer(Worker):
    """Never sends a number twice: what comes twice was doubled on the way."""

    def __init__(
        self, name: str, topic: str, bootstrap: str, seed: int, settings: Mapping[str, object]
    ) -> None:
        super().__init__(name)
        self.may_resend = settings.get("max.in.flight") != 1
        """Whether librdkafka may have to send under a newer epoch what a broker has already."""
        self.journal = ProducerJournal(name, topic)
        self._draw = random.Random(f"{name} {seed}")
        self._settings = {**PRODUCER, "bootstrap.servers": bootstrap, **settings}
        self._producer = Producer(self._settings)
        self._number = 0

    def step(self) -> None:
        unanswered = len(self._producer)
        if unanswered < MOST_UNANSWERED:
            for _ in range(self._draw.randint(1, 2 * BURST)):
                self._send()
        self._serve(BURST_INTERVAL_S)

    def _send(self) -> None:
        number, self._number = self._number, self._number + 1
        partition = self._draw.randrange(TOPICS[self.journal.topic])
        value = value_of(self.name, number, self._draw)

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self.journal.acknowledged[number] = (message.partition(), message.offset())
            else:
                self.journal.unknown[number] = str(error)

        self.journal.sent[number] = partition
        try:
            self._producer.produce(self.journal.topic, value, partition=partition, on_delivery=delivered)
        except KafkaException as error:
            # A fatal error of the instance: only another one can go on, under a new producer id.
            self.journal.unknown[number] = str(error)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._producer.flush(5)
        self._producer = Producer(self._settings)

    def _serve(self, seconds: float) -> None:
        self._producer.poll(0)
        self.pause(seconds)
        self._producer.poll(0)

    def settle(self) -> bool:
        return self._producer.flush(0.5) == 0

    def close(self) -> None:
        self._producer.purge()
