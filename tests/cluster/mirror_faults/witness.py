"""Who reads the aggregate meanwhile: a client of another make, read committed, record by record, to its end.

Every record must be one that the load made, byte for byte; what it is goes to `checks.Seen`. Gap events are
read from the audit topic by `gap_events`, anew each time, and by `has_begun_with_all` the mirror's positions.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import traceback
from collections import Counter

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from millrace.audit.contract.header import HEADER_KEY
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import TopicRecord, read_topic_to_end
from millrace.broker.errors import MillraceError, UnknownTopicOrPartition
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.mirror.delivery.checkpoints import decode_key
from millrace.mirror.topics.own_topics import POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster.faults.producers import CLIENT
from tests.cluster.mirror_faults.checks import Seen
from tests.cluster.mirror_faults.plan import SOURCES, TARGET
from tests.cluster.mirror_faults.records import ALL_TOPICS, AUDITED, Gap, Stream, identity_of, record_of
from tests.waiting import Deadline, patience

MOST_AT_ONCE = 5_000
MOST_PROBLEMS = 10
READ_TIMEOUT_S = 60.0
QUIET_S = 1.5


class Witness:
    """`seen` by stream; `problems` are records that nobody wrote as they are."""

    def __init__(self, bootstrap: str) -> None:
        self.seen: dict[Stream, Seen] = {}
        self.problems: list[str] = []
        self.failure: str | None = None
        self.record_count = 0
        self.lock = threading.Lock()
        """Held while records are taken: who judges holds it too."""
        self._bootstrap = bootstrap
        self._heard_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)

    def start(self) -> None:
        """Once the mirror has created the topics."""
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(patience(30))

    def wait_until_quiet(self) -> None:
        """Until nothing has come for a while. For when nobody writes any more."""
        deadline = Deadline("nothing comes any more", within_s=READ_TIMEOUT_S)
        while not deadline.has_passed and time.monotonic() < self._heard_at + QUIET_S:
            time.sleep(0.05)

    def topics_exist(self) -> bool:
        admin = AdminClient({**CLIENT, "bootstrap.servers": self._bootstrap})
        try:
            known = admin.list_topics(timeout=5).topics
        except KafkaException:
            return False
        return all(
            name in known and len(known[name].partitions) == count for name, count in ALL_TOPICS.items()
        )

    def _run(self) -> None:
        try:
            self._read()
        except Exception:
            self.failure = traceback.format_exc()

    def _read(self) -> None:
        consumer = Consumer(
            {
                **CLIENT,
                "bootstrap.servers": self._bootstrap,
                "group.id": f"witness-{time.monotonic_ns()}",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 100,
            }
        )
        consumer.assign(
            [
                TopicPartition(topic, number, 0)
                for topic, count in ALL_TOPICS.items()
                for number in range(count)
            ]
        )
        try:
            while not self._stop.is_set():
                messages = consumer.consume(MOST_AT_ONCE, 0.2)
                with self.lock:
                    for message in messages:
                        self._take(message)
        finally:
            consumer.close()

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if not error.retriable() and error.code() >= 0:
                self._problem(f"{message.topic()}-{message.partition()}: {error}")
            return
        self.record_count += 1
        self._heard_at = time.monotonic()
        where = f"{message.topic()}-{message.partition()}@{message.offset()}"
        try:
            stream, number = identity_of(message.key())
        except ValueError:
            self._problem(f"a record that nobody wrote at {where}: {message.key()!r}")
            return
        wanted = record_of(stream, number)
        headers = tuple(message.headers() or ())
        if stream.topic == AUDITED:
            # The audited producer's, which the audit looks into.
            own = [value for key, value in headers if key == HEADER_KEY]
            headers = tuple(each for each in headers if each[0] != HEADER_KEY)
            if len(own) != 1:
                self._problem(f"{stream}/{number} at {where} has {len(own)} headers {HEADER_KEY}")
        found = (message.value(), headers, message.timestamp()[1])
        if found != (wanted.value, wanted.headers, wanted.timestamp_ms):
            self._problem(f"{stream}/{number} at {where} is not as it was written")
        if (stream.topic, stream.partition) != (message.topic(), message.partition()):
            self._problem(f"{stream}/{number} is at {where}")
        self.seen.setdefault(stream, Seen()).add(number, where)

    def _problem(self, text: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)


def read_again_at(bootstrap: str, stream: Stream) -> Counter[int]:
    """Which numbers the log of a stream at its source holds again, and how often, by now; empty once its
    topic is gone.

    Apache Kafka 4.1.1 was seen to take a producer's last batch twice (the same first sequence, the same
    bytes) when SIGKILL came between it and the answer: what it knew of the producer came from a snapshot.
    """
    consumer = Consumer(
        {
            **CLIENT,
            "bootstrap.servers": bootstrap,
            "group.id": f"witness-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
        }
    )
    seen = Seen()
    try:
        consumer.assign([TopicPartition(stream.topic, stream.partition, 0)])
        deadline = Deadline(f"{stream} is read", within_s=READ_TIMEOUT_S)
        while not deadline.has_passed:
            for message in consumer.consume(MOST_AT_ONCE, 0.2):
                error = message.error()
                if error is None:
                    found, number = identity_of(message.key())
                    if found == stream:
                        seen.add(number, message.offset())
                elif error.code() == KafkaError._PARTITION_EOF:
                    return seen.again
                elif error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                    return Counter()
        raise TimeoutError(f"{stream} was not read to its end at its source")
    finally:
        consumer.close()


def gap_events(bootstrap: str) -> list[Gap]:
    """What the mirror has written down up to now, also what compaction might take later."""
    found = []
    for record in asyncio.run(_records(bootstrap, AUDIT_TOPIC)):
        if (record.key or b"").startswith(b"gap/"):
            event = json.loads(record.value or b"{}")
            where = event["source"], event["topic"], event["partition"]
            offsets, told = (event["from"], event["to"]), (event["class"], event["at_ms"])
            found.append(Gap(*where, *offsets, *told, event.get("open", False)))
    return found


def has_begun_with_all(bootstrap: str, mirror: str) -> bool:
    """Whether the mirror has put down where it is in every partition. A topic that is deleted before that is
    one that it has never seen."""
    found = {decode_key(record.key) for record in asyncio.run(_records(bootstrap, POSITIONS.of(mirror)))}
    return found >= {
        SourcePartition(source, topic, number)
        for source in SOURCES
        for topic, count in ALL_TOPICS.items()
        for number in range(count)
    }


async def _records(bootstrap: str, topic: str) -> list[TopicRecord]:
    """Of one of the target's topics; none while it is not there."""
    deadline = Deadline(f"{topic} is read", within_s=READ_TIMEOUT_S)
    while True:
        try:
            async with Cluster(TARGET, [bootstrap], request_timeout_ms=5_000) as cluster:
                return [record async for record in read_topic_to_end(cluster, topic)]
        except UnknownTopicOrPartition:
            return []
        except (MillraceError, OSError, TimeoutError):
            if deadline.has_passed:
                raise
            await asyncio.sleep(0.2)
