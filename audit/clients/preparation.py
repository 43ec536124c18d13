"""What becomes of a record before the client gets it: encoded, given a partition, its content digested.

Called by `producer`. `Preparation` only when the application has set one of these:

    partitioner(key, count)                 chooses 0..count-1 for a record with a key but no partition; `key`
                                            is what the application gave, before it was encoded
    encoder(value)                          bytes of a value (Kafka 0.7's Encoder)
    key.serializer, value.serializer        (object, SerializationContext) as in confluent-kafka

The number of partitions comes from the cluster, once before the first record of a topic (which waits for it),
then again at every interval in the reporting thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.error import KeySerializationError, ValueSerializationError
from confluent_kafka.serialization import MessageField, SerializationContext

from millrace.audit.clients.producer_config import PreparationConfig
from millrace.audit.contract.content_digest import record_digest
from millrace.audit.contract.header import HEADER_KEY

_GIVEN = (bytes, str, type(None))  # as a tuple: a union is looked through at three times the cost
METADATA_TIMEOUT_S = 10.0
METADATA_INTERVAL_S = 60.0
METADATA_RETRY_S = 0.1


class Preparation:
    """Encodes records and chooses partitions. Safe to call from any thread."""

    def __init__(self, config: PreparationConfig):
        self._config = config
        self._counts: dict[str, tuple[int, float]] = {}

    def prepare(
        self, client: Producer, topic: str, value: Any, key: Any, partition: int, headers: Any
    ) -> tuple[Any, Any, int]:
        """(value, key, partition) as the client takes them.

        Raises KeySerializationError and ValueSerializationError; ValueError for a partition that does not
        exist; KafkaException when the cluster does not tell how many there are.
        """
        config = self._config
        if config.partitioner is not None and partition < 0 and key is not None:
            count = self._count(client, topic)
            partition = config.partitioner(key, count)
            if type(partition) is not int or not 0 <= partition < count:
                raise ValueError(f"the partitioner chose {partition!r} of {count} partitions of {topic}")
        if config.key_serializer is not None:
            try:
                key = config.key_serializer(key, SerializationContext(topic, MessageField.KEY, headers))
            except Exception as error:
                raise KeySerializationError(error) from error
        try:
            if config.encoder is not None and value is not None:
                value = config.encoder(value)
            if config.value_serializer is not None:
                context = SerializationContext(topic, MessageField.VALUE, headers)
                value = config.value_serializer(value, context)
        except Exception as error:
            raise ValueSerializationError(error) from error
        return value, key, partition

    def refresh(self, client: Producer) -> None:
        """Look again at topics whose number of partitions is older than the interval. Never raises."""
        stale = time.monotonic() - METADATA_INTERVAL_S
        for topic, (_, at) in list(self._counts.items()):
            if at < stale:
                try:
                    self._learn(client, topic, METADATA_TIMEOUT_S)
                except KafkaException:
                    return

    def _count(self, client: Producer, topic: str) -> int:
        known = self._counts.get(topic)
        if known is not None:
            return known[0]
        deadline = time.monotonic() + METADATA_TIMEOUT_S
        while True:
            count = self._learn(client, topic, max(deadline - time.monotonic(), 0.1))
            if count:
                return count
            if time.monotonic() >= deadline:
                reason = f"the cluster does not tell how many partitions {topic} has"
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, reason))
            time.sleep(METADATA_RETRY_S)  # a topic that is being made has no partitions yet

    def _learn(self, client: Producer, topic: str, timeout_s: float) -> int:
        metadata = client.list_topics(topic, timeout=timeout_s).topics.get(topic)
        count = 0 if metadata is None or metadata.error is not None else len(metadata.partitions)
        if count:
            self._counts[topic] = (count, time.monotonic())
        return count


def check_messages(messages: Any, *, encoded: bool) -> None:
    """What `produce_batch` refuses before it sends any, as confluent-kafka does: raises TypeError.

    `encoded`: keys and values must be what the client takes.
    """
    if not isinstance(messages, list):
        raise TypeError("messages must be a list")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TypeError(f"Message at index {number} must be a dict")
        for name in ("value", "key") if encoded else ():
            if not isinstance(message.get(name), _GIVEN):
                raise TypeError(f"Message {name} at index {number} must be bytes or str")


def error_of(error: BufferError | KafkaException) -> KafkaError:
    """What stands in `_error` of a message that was not taken."""
    return KafkaError(KafkaError._QUEUE_FULL) if isinstance(error, BufferError) else error.args[0]


def without_identity(headers: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The application's headers, without an identity that a record brought along from where it was read."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [pair for pair in pairs if pair[0] != HEADER_KEY]


def digest_of(sequence: int, key: Any, value: Any, headers: Any) -> int:
    """The content digest of a record as the application gave it; text is written in UTF-8."""
    pairs = () if headers is None else without_identity(headers)
    wire_headers = [(name, _wire_bytes(content)) for name, content in pairs]
    return record_digest(sequence, _wire_bytes(key), _wire_bytes(value), wire_headers)


def _wire_bytes(content: Any) -> Any:
    return content.encode() if isinstance(content, str) else content
