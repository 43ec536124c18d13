"""A client with no opinions: one blocking socket, any request of any version, the answer as it comes.

For tests that must see exactly what a broker says. Entities are `kio`'s, built from plain values by the
same rules as the broker's answers: fields that were not given are zero, empty or null.
"""

from __future__ import annotations

import socket
import struct
from collections import defaultdict
from types import TracebackType
from typing import Any, Self

from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.frames import Api, decode_response, encode_request
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.server.answers import build_entity, request_type, response_type
from tests.waiting import patience

TIMEOUT_S = 60.0


def batch_of(*values: bytes | None, timestamp_ms: int = 1_700_000_000_000, **options: Any) -> bytearray:
    """A record batch with these values; `options` go to `build_batch`."""
    records = [
        Record(key=None, value=value, headers=(), timestamp_ms=timestamp_ms + number, offset=number)
        for number, value in enumerate(values)
    ]
    return build_batch(records, **options)


class RawClient:
    """`ask` sends one request and reads its answer; `send` and `receive` do the halves."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=patience(TIMEOUT_S))
        self._correlation_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        """Send a request of this version; its response as a `kio` entity."""
        self._correlation_id += 1
        request = build_entity(request_type(api_key, version), fields)
        self.send(encode_request(request, self._correlation_id, "raw"))
        return decode_response(response_type(api_key, version), self.receive())

    def produce(
        self,
        batches: dict[tuple[str, int], Any],
        *,
        version: int = 9,
        acks: int = 1,
        transactional_id: str | None = None,
        timeout_ms: int = 30_000,
    ) -> list[hot_produce.PartitionAnswer]:
        """Produce; with acks=0 nothing is read."""
        self.send(
            b"".join(
                hot_produce.encode_request(
                    version,
                    1,
                    "raw",
                    batches,
                    acks=acks,
                    transactional_id=transactional_id,
                    timeout_ms=timeout_ms,
                )
            )
        )
        return [] if acks == 0 else hot_produce.decode_response(self.receive(), version)[0]

    def fetch(
        self,
        *partitions: hot_fetch.PartitionFetch,
        version: int = 12,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 50 << 20,
        read_committed: bool = False,
        session_id: int = 0,
        session_epoch: int = -1,
    ) -> hot_fetch.FetchResponse:
        request = hot_fetch.FetchRequest(
            max_wait_ms, min_bytes, max_bytes, read_committed, partitions, session_id, session_epoch
        )
        self.send(hot_fetch.encode_request(version, 1, "raw", request))
        return hot_fetch.decode_response(self.receive(), version)

    def send(self, data: bytes | bytearray) -> None:
        self.socket.sendall(data)

    def receive(self) -> memoryview:
        """One frame, without its size. Raises EOFError when the broker closes."""
        (size,) = struct.unpack(">i", self._read(4))
        return memoryview(self._read(size))

    def is_closed(self) -> bool:
        """Wait until the broker closes; False when it sends something instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if count == 0:
                raise EOFError("the broker closed the connection")
            view = view[count:]
        return data


def is_served(port: int, topic: str, partitions: int) -> bool:
    """Whether the topic has so many partitions, each with a leader that says so itself. The metadata name a
    leader before it knows its office, and until then it refuses (NOT_LEADER_OR_FOLLOWER); other clients ask
    again without a word."""
    led: dict[int, list[int]] = defaultdict(list)
    with RawClient(port) as client:
        known = client.ask(Api.METADATA, 9, topics=[{"name": topic}])
    for partition in known.topics[0].partitions:
        led[partition.leader_id].append(partition.partition_index)
    ports = {broker.node_id: broker.port for broker in known.brokers}
    return len(known.topics[0].partitions) == partitions and all(
        leader in ports and _answers_as_leader(ports[leader], topic, numbers)
        for leader, numbers in led.items()
    )


def _answers_as_leader(port: int, topic: str, partitions: list[int]) -> bool:
    asked = [{"partition_index": n, "timestamp": -1, "current_leader_epoch": -1} for n in partitions]
    topics = [{"name": topic, "partitions": asked}]
    with RawClient(port) as client:
        answer = client.ask(Api.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
    return all(partition.error_code == 0 for partition in answer.topics[0].partitions)
