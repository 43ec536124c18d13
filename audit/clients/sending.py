"""Synchronous sending, as in the producer of Kafka 0.7: `send` returns where records stand, or raises.

Called by `producer`. The caller's thread serves delivery reports while it waits, and the queue is sent
without lingering. A record counts as it would through `produce`; `send` says what the cluster answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException

from millrace.audit.clients.delivery_reports import ToldAlways

WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class ProducerData:
    """Values for a topic under one key, as in Kafka 0.7: `data` is one value or a list of them."""

    topic: str
    data: Any
    key: Any = None
    partition: int = -1
    timestamp: int = 0
    headers: Any = None

    @property
    def values(self) -> Sequence[Any]:
        return self.data if isinstance(self.data, list | tuple) else (self.data,)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a record stands. `timestamp_ms` is what the cluster has set or taken."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class NotDelivered(KafkaException):
    """Some records of a `send` were not acknowledged; `args[0]` is the first one's KafkaError.

    `standings` has an entry for every record in the order given: where it stands, or its KafkaError. A record
    with an error may exist nevertheless (a timeout): the audit counts it as ambiguous.
    """

    def __init__(self, standings: list[Standing | KafkaError]):
        self.standings = standings
        self.errors = [entry for entry in standings if isinstance(entry, KafkaError)]
        super().__init__(self.errors[0])

    def __str__(self) -> str:
        return f"{len(self.errors)} of {len(self.standings)} records not acknowledged: {self.errors[0].str()}"


class _Client(Protocol):
    @property
    def produce(self) -> Callable[..., None]: ...
    def poll(self, timeout: float) -> int: ...
    def flush(self, timeout: float) -> int: ...


def send_all(client: _Client, data: Iterable[ProducerData], timeout_s: float) -> list[Standing]:
    """Send and wait for every answer; negative `timeout_s` waits as long as the client's own timeouts.

    Raises NotDelivered; what `produce` raises for a record comes out at once, after which the records before
    it may be delivered.
    """
    deadline = None if timeout_s < 0 else time.monotonic() + timeout_s
    answers: dict[int, Standing | KafkaError] = {}
    count = 0
    for item in data:
        for value in item.values:
            _enqueue(client, item, value, _Noting(answers, count), deadline)
            count += 1
    while len(answers) < count:
        left_s = WAIT_S if deadline is None else min(WAIT_S, deadline - time.monotonic())
        if left_s <= 0:
            break
        client.flush(left_s)
    late = KafkaError(KafkaError._TIMED_OUT, "no answer within the timeout of send")
    standings = [answers.get(number, late) for number in range(count)]
    if any(isinstance(entry, KafkaError) for entry in standings):
        raise NotDelivered(standings)
    return [entry for entry in standings if isinstance(entry, Standing)]


def queue_all(client: _Client, data: Iterable[ProducerData]) -> None:
    """Asynchronous `send`: queue everything, and serve the delivery reports that are there."""
    for item in data:
        for value in item.values:
            details = {"timestamp": item.timestamp, "headers": item.headers}
            client.produce(item.topic, value, item.key, item.partition, **details)
    client.poll(0)


def _enqueue(client: _Client, item: ProducerData, value: Any, noting: Any, deadline: float | None) -> None:
    """`produce`, waiting for room in the queue."""
    while True:
        try:
            client.produce(
                item.topic,
                value=value,
                key=item.key,
                partition=item.partition,
                on_delivery=noting,
                timestamp=item.timestamp,
                headers=item.headers,
            )
            return
        except BufferError:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            client.poll(WAIT_S)


class _Noting(ToldAlways):
    """Keeps a record's answer under its number."""

    __slots__ = ("_answers", "_number")

    def __init__(self, answers: dict[int, Standing | KafkaError], number: int):
        self._answers = answers
        self._number = number

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._answers[self._number] = error
        else:
            self._answers[self._number] = Standing(
                message.topic(), message.partition(), _offset(message), message.timestamp()[1]
            )


def _offset(message: Any) -> int:
    offset = message.offset()
    return -1 if offset is None else int(offset)
