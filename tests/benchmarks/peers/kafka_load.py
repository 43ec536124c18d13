"""Loads for anything that speaks Kafka's protocol, the same bytes to each: sockets, confluent-kafka, Java.

The raw loads send prepared requests and count the bytes of the answers, so that their own cost is next to
nothing and the server is what is measured. Every batch has the same size, which is how a consumer knows how
many records an answer holds without looking at each. The other two are what people use.
"""

from __future__ import annotations

import re
import selectors
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.compression import CODEC_IDS
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.records import Record, build_batch

RECORD_SIZE = 200
STARTED_MS = time.time_ns() // 1_000_000
"""What records bear: of today, as what is no replay. Retention and the lanes of a mirror go by it."""
PRODUCE_VERSION = 9
FETCH_VERSION = 12
MIB = 1 << 20
BYTES_AHEAD = MIB
"""How much a raw producer has under way; the answers to it fit any socket buffer."""
CLIENT_TIMEOUT_S = 900.0
NEW_TOPIC_S = 20.0
NOT_YET = (3, 5, 6)
"""Unknown topic, no leader, not the leader: what a server may say of a topic that was just made."""


def batch_of(record_count: int, codec: str = "none") -> bytes:
    """A batch of records with values of 200 bytes; the values differ, as compressors would notice."""
    rows = [
        Record(None, number.to_bytes(8, "big") * (RECORD_SIZE // 8), timestamp_ms=STARTED_MS)
        for number in range(record_count)
    ]
    return bytes(build_batch(rows, compression=CODEC_IDS[codec]))


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """Raises ConnectionError when the server closes first."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the server closed the connection")
        view = view[received:]
    return data


def receive_frame(connection: socket.socket) -> bytearray:
    (size,) = struct.unpack(">i", receive_exactly(connection, 4))
    return receive_exactly(connection, size)


class _ProducerConnection:
    """Sends one request again and again, a burst ahead of the answers."""

    def __init__(self, port: int, topic: str, partitions: Sequence[int], batch: bytes, acks: int) -> None:
        batches = {(topic, partition): batch for partition in partitions}
        encoded = hot_produce.encode_request(PRODUCE_VERSION, 1, "bench", batches, acks=acks)
        self._request = b"".join(encoded)
        self.burst_count = max(1, min(500, BYTES_AHEAD // len(self._request)))
        self._burst = self._request * self.burst_count
        self._socket = connect(port)
        self._answered = acks != 0
        self._scratch = bytearray(MIB)
        self._answer_size = 0
        if self._answered:
            self._answer_size = self._first_answer_size()
        else:
            self._socket.sendall(self._request)

    def _first_answer_size(self) -> int:
        """How many bytes the answer to a request has; all are alike. A new topic may need a moment."""
        deadline = time.monotonic() + NEW_TOPIC_S
        while True:
            self._socket.sendall(self._request)
            frame = receive_frame(self._socket)
            answers, _ = hot_produce.decode_response(memoryview(frame), PRODUCE_VERSION)
            code = next((answer.error_code for answer in answers if answer.error_code), 0)
            if not code:
                return 4 + len(frame)
            if code not in NOT_YET or time.monotonic() > deadline:
                raise RuntimeError(f"produce was refused with code {code}")
            time.sleep(0.05)

    def send(self) -> None:
        self._socket.sendall(self._burst)

    def take_answers(self) -> None:
        left = self._answer_size * self.burst_count
        while left:
            received = self._socket.recv_into(self._scratch, min(left, len(self._scratch)))
            if not received:
                raise ConnectionError("the server closed the connection")
            left -= received

    def close(self) -> None:
        self._socket.close()


def raw_produce(
    port: int,
    topic: str,
    batch: bytes,
    records: int,
    *,
    acks: int,
    partitions: int = 1,
    connections: int = 1,
    first_partition: int = 0,
    is_across: bool = False,
) -> tuple[int, float]:
    """(records, seconds) of at least `records` in prepared batches, round robin over the connections.

    `is_across`: each request has a batch for every partition, for where the load is what is measured later:
    of tiny batches a server takes many times as many a second.

    With acks=0 the end is when the log's end offset has come as far (nothing else tells).
    """
    per_batch = parse_header(batch).record_count
    if not acks:
        # Who asks for no answer does not hear that a new topic has no leader yet.
        for number in range(partitions):
            _ProducerConnection(port, topic, [first_partition + number], batch, 1).close()
    everywhere = range(first_partition, first_partition + partitions)
    senders = [
        _ProducerConnection(
            port, topic, everywhere if is_across else [everywhere[number % partitions]], batch, acks
        )
        for number in range(connections)
    ]
    per_request = per_batch * (partitions if is_across else 1)
    warm_up = connections * per_request + partitions * per_batch
    first = 0 if acks else _total_end(port, topic, partitions, at_least=warm_up)
    turns = max(1, -(-records // (per_request * senders[0].burst_count * connections)))
    begun = time.perf_counter()
    for sender in senders:
        sender.send()
    for _ in range(turns - 1):
        for sender in senders:
            sender.send()
            sender.take_answers()
    for sender in senders:
        sender.take_answers()
    sent = turns * connections * senders[0].burst_count * per_request
    if not acks:
        _total_end(port, topic, partitions, at_least=first + sent)
    seconds = time.perf_counter() - begun
    for sender in senders:
        sender.close()
    return sent, seconds


def _total_end(port: int, topic: str, partitions: int, at_least: int) -> int:
    """The sum of the partitions' ends, once it is `at_least`; a fetch at offset 0 tells each."""
    connection = connect(port)
    deadline = time.monotonic() + CLIENT_TIMEOUT_S
    try:
        while True:
            asked = [PartitionFetch(topic, number, 0, 1) for number in range(partitions)]
            connection.sendall(
                hot_fetch.encode_request(FETCH_VERSION, 1, "bench", FetchRequest(0, 0, 1, False, asked))
            )
            response = hot_fetch.decode_response(memoryview(receive_frame(connection)), FETCH_VERSION)
            total = sum(max(part.high_watermark, 0) for part in response.partitions)
            if total >= at_least:
                return total
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} holds {total} records of {at_least}")
            time.sleep(0.002)
    finally:
        connection.close()


class _Reader:
    """One consumer: a connection with one fetch under way, over one partition."""

    def __init__(
        self,
        port: int,
        topic: str,
        partition: int,
        end: int,
        per_batch: int,
        batch_size: int,
        fetch_bytes: int,
        offset: int = 0,
    ) -> None:
        self.socket = connect(port)
        self.left = end
        self._topic, self._partition = topic, partition
        self._per_batch, self._batch_size, self._fetch_bytes = per_batch, batch_size, fetch_bytes
        self._offset = offset

    def ask(self) -> None:
        asked = [PartitionFetch(self._topic, self._partition, self._offset, self._fetch_bytes)]
        request = FetchRequest(500, 1, self._fetch_bytes, False, asked)
        self.socket.sendall(hot_fetch.encode_request(FETCH_VERSION, 1, "bench", request))

    def take(self) -> None:
        frame = receive_frame(self.socket)
        part = hot_fetch.decode_response(memoryview(frame), FETCH_VERSION).partitions[0]
        if part.error_code:
            raise RuntimeError(f"fetch was refused with code {part.error_code}")
        count = len(part.records) // self._batch_size * self._per_batch
        self._offset += count
        self.left -= count


def raw_consume(
    port: int,
    topic: str,
    batch: bytes,
    records: int,
    *,
    fetch_bytes: int = 200_000,
    readers: int = 1,
    partitions: int = 1,
    offset: int = 0,
) -> tuple[int, float]:
    """(records, seconds) of `readers` who each read `records` of a partition from `offset` on."""
    per_batch = parse_header(batch).record_count
    all_readers = [
        _Reader(port, topic, number % partitions, records, per_batch, len(batch), fetch_bytes, offset)
        for number in range(readers)
    ]
    selector = selectors.DefaultSelector()
    begun = time.perf_counter()
    for reader in all_readers:
        reader.ask()
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    while selector.get_map():
        for key, _ in selector.select():
            reader = key.data
            reader.take()
            if reader.left > 0:
                reader.ask()
            else:
                selector.unregister(reader.socket)
    seconds = time.perf_counter() - begun
    for reader in all_readers:
        reader.socket.close()
    return records * readers, seconds


def raw_latency(
    port: int, topic: str, batch: bytes, requests: int, per_second: float, *, acks: int = 1
) -> tuple[list[float], list[float]]:
    """Milliseconds from sending a batch to its answer, and to its arrival at a consumer that waits for it.

    Batches leave at a fixed rate, whatever the answers do (no coordinated omission).
    """
    per_batch = parse_header(batch).record_count
    request = b"".join(
        hot_produce.encode_request(PRODUCE_VERSION, 1, "bench", {(topic, 0): batch}, acks=acks)
    )
    end = _total_end(port, topic, 1, at_least=0)
    producer, consumer = connect(port), connect(port)
    offset = first = end

    def ask() -> None:
        asked = [PartitionFetch(topic, 0, offset, MIB)]
        consumer.sendall(
            hot_fetch.encode_request(FETCH_VERSION, 1, "bench", FetchRequest(500, 1, MIB, False, asked))
        )

    sent: list[float] = []
    acknowledged: list[float] = []
    seen: list[float] = []
    selector = selectors.DefaultSelector()
    selector.register(producer, selectors.EVENT_READ)
    selector.register(consumer, selectors.EVENT_READ)
    ask()
    begun = time.perf_counter() + 0.05
    while len(acknowledged) < requests or len(seen) < requests:
        due = begun + len(sent) / per_second
        now = time.perf_counter()
        if len(sent) < requests and now >= due:
            producer.sendall(request)
            sent.append(due)
            continue
        wait = due - now if len(sent) < requests else 1.0
        for key, _ in selector.select(wait):
            if key.fileobj is producer:
                receive_frame(producer)
                now = time.perf_counter()
                acknowledged.append((now - sent[len(acknowledged)]) * 1e3)
                continue
            frame = receive_frame(consumer)
            now = time.perf_counter()
            part = hot_fetch.decode_response(memoryview(frame), FETCH_VERSION).partitions[0]
            offset += len(part.records) // len(batch) * per_batch
            while len(seen) < (offset - first) // per_batch:
                seen.append((now - sent[len(seen)]) * 1e3)
            if len(seen) < requests:
                ask()
    producer.close()
    consumer.close()
    return acknowledged, seen


# -- clients that people use ------------------------------------------------------------------------


def confluent_produce(
    port: int, topic: str, records: int, *, acks: int, batch_records: int | None
) -> tuple[int, float]:
    """(records, seconds) through confluent-kafka; `batch_records` None leaves its defaults.

    With acks=0 the end is when the log's end offset has come as far (nothing else tells).
    """
    from confluent_kafka import Producer

    if not acks:
        # Who asks for no answer does not hear that a new topic has no leader yet.
        _ProducerConnection(port, topic, [0], batch_of(1), 1).close()
    settings: dict[str, object] = {
        "bootstrap.servers": f"127.0.0.1:{port}",
        "acks": acks,
        "queue.buffering.max.messages": 200_000,
        "enable.idempotence": False,
    }
    if batch_records is not None:
        settings |= {"batch.num.messages": batch_records, "linger.ms": 0 if batch_records == 1 else 20}
    producer = Producer(settings)
    value = b"x" * RECORD_SIZE
    produce, poll = producer.produce, producer.poll
    begun = time.perf_counter()
    for number in range(records):
        while True:
            try:
                produce(topic, value)
                break
            except BufferError:
                poll(0.01)
        if not number & 0x3FF:
            poll(0)
    left = producer.flush(CLIENT_TIMEOUT_S)
    if left:
        raise RuntimeError(f"{left} records were not delivered")
    if not acks:
        _total_end(port, topic, 1, at_least=records + 1)
    return records, time.perf_counter() - begun


def confluent_consume(address: str, topic: str, records: int) -> tuple[int, float]:
    """(records, seconds) of one consumer with batches of 1,000 and fetches of 200 KB."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": f"bench-{time.time_ns()}",
            "enable.auto.commit": False,
            "fetch.message.max.bytes": 200_000,
            "queued.max.messages.kbytes": 65_536,
            # By default it asks for nothing for a second once 100,000 records wait: the faster the server,
            # the slower the reading.
            "fetch.queue.backoff.ms": 1,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    seen = 0
    begun = time.perf_counter()
    while seen < records:
        seen += len(consumer.consume(1_000, 5.0))
    seconds = time.perf_counter() - begun
    consumer.close()
    return seen, seconds


class JavaTools:
    """Apache Kafka's own performance tools, from the jars of the server that is compared with."""

    def __init__(self, libs: Path) -> None:
        self._command = ["java", "-Xms256M", "-Xmx512M", "-cp", f"{libs}/*"]

    def produce(
        self, address: str, topic: str, records: int, *, acks: int, batch_bytes: int | None
    ) -> tuple[int, float]:
        """(records, seconds) as the tool says; `batch_bytes` None leaves the client's defaults."""
        props = [f"bootstrap.servers={address}", f"acks={acks}", "enable.idempotence=false"]
        if batch_bytes is not None:
            props += [f"batch.size={batch_bytes}", f"linger.ms={0 if batch_bytes < RECORD_SIZE else 20}"]
        output = self._run(
            "org.apache.kafka.tools.ProducerPerformance",
            *("--topic", topic, "--num-records", str(records), "--record-size", str(RECORD_SIZE)),
            *("--throughput", "-1", "--producer-props", *props),
        )
        rates = re.findall(r"(\d+) records sent, ([\d.]+) records/sec", output)
        if not rates:
            raise RuntimeError(f"ProducerPerformance said: {output[-500:]}")
        return records, records / float(rates[-1][1])

    def consume(self, address: str, topic: str, records: int) -> tuple[int, float]:
        """(records, seconds of fetching) with fetches of 200 KB a partition."""
        output = self._run(
            "org.apache.kafka.tools.ConsumerPerformance",
            *("--bootstrap-server", address, "--topic", topic, "--messages", str(records)),
            *("--fetch-size", "200000"),
        )
        heading, *rows = [line for line in output.splitlines() if line.count(",") >= 8]
        named = dict(zip(_csv(heading), _csv(rows[-1]), strict=True))
        count = int(named["data.consumed.in.nMsg"])
        return count, int(named["fetch.time.ms"]) / 1e3

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed: {(done.stdout + done.stderr)[-1000:]}")
        return done.stdout


def _csv(line: str) -> Sequence[str]:
    return [part.strip() for part in line.split(",")]
