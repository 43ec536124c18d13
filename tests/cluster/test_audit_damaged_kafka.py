"""What a real Apache Kafka answers where a length on its disk has one wrong bit, which no checksum covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer

from millrace.audit.scanning import range_reader
from millrace.audit.spark.task_plan import OffsetRange
from tests.peers.kafka import KafkaPeer
from tests.waiting import patience

pytestmark = [pytest.mark.java, pytest.mark.kafka]
COUNT, DAMAGED = 40, 20
LENGTH = slice(8, 12)  # of a batch, behind its base offset


def written(peer: KafkaPeer, topic: str) -> Path:
    """A log of batches of one record each, a few to an entry of its index."""
    producer = Producer({"bootstrap.servers": peer.bootstrap, "acks": "all", "linger.ms": 0})
    for number in range(COUNT):
        producer.produce(topic, b"x" * 3000, partition=0)
        assert producer.flush(patience(60)) == 0, number
    (log,) = (peer.directory / "data" / f"{topic}-0").glob("*.log")
    return log


def flip(log: Path, bit: int) -> None:
    """One bit in the highest byte of the length of batch DAMAGED."""
    content, start = log.read_bytes(), 0
    for _ in range(DAMAGED):
        start += LENGTH.stop + int.from_bytes(content[start:][LENGTH], "big")
    with log.open("r+b") as file:
        file.seek(start + LENGTH.start)
        file.write(bytes([content[start + LENGTH.start] ^ bit]))


@pytest.mark.parametrize(
    ("bit", "what"),
    [
        (0x80, range_reader.REFUSED),  # negative: it answers CORRUPT_MESSAGE
        (0x01, range_reader.UNSENT),  # longer than the file: it answers with no error, and no records
    ],
    ids=["negative", "longer-than-the-file"],
)
def test_a_wrong_length_on_its_disk_is_damage_and_what_is_behind_it_is_read(kafka_peer, bit, what):
    topic = f"damaged-length-{bit}"
    flip(written(kafka_peer, topic), bit)
    distrusted: list[str] = []
    unread: list[tuple[int, int, str]] = []
    range_ = OffsetRange("ewr", "source", topic, topic, 0, 0, COUNT)
    with range_reader.RangeReader({"ewr": [kafka_peer.bootstrap]}, 1 << 20) as reader:
        read = reader.read(range_, distrusted.append, lambda *hole: unread.append(hole))
        seen = {int(offset) for batches in read for offset in batches.index[:, range_reader.B_BASE_OFFSET]}
    ((first, end, cause),) = unread
    assert (first, cause, distrusted) == (DAMAGED, range_reader.DAMAGED, [what])
    assert end < DAMAGED + 5, "an index of Kafka's has an entry for every 4 KB"
    assert seen == set(range(COUNT)) - set(range(first, end))
