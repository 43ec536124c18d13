"""The end of a partition as confluent-kafka tells it, also right after the topic was made.

A metadata response may name a leader that has not taken the partition over yet, in Apache Kafka as in
Millrace; clients that read or write try again, librdkafka's question for the watermarks does not.
"""

from __future__ import annotations

import time

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tests.waiting import Deadline

SETTLING = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
RETRY_S = 0.05


def end_offset(consumer: Consumer, topic: str, partition: int, timeout_s: float) -> int:
    """The high watermark, or the last stable offset for a consumer that reads committed records only.

    Raises DeadlinePassed once `timeout_s` is over, and what confluent-kafka does at once for an error that
    does not pass.
    """
    deadline = Deadline(f"the end of {topic}-{partition}", within_s=timeout_s)
    while True:
        try:
            left_s = max(deadline.left_s, RETRY_S)
            return int(consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=left_s)[1])
        except KafkaException as error:
            if error.args[0].code() not in SETTLING:
                raise
            deadline.check(error)
        time.sleep(RETRY_S)
