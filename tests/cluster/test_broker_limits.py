"""Connections, memory and byte rates: what one client may cost, and what it may not cost the others."""

from __future__ import annotations

import os
import re
import socket
import struct
import time

import pytest

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.hot_fetch import decode_response as decode_fetch_response
from millrace.broker.protocol.hot_fetch import encode_request as encode_fetch_request
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import until

pytestmark = pytest.mark.java

MIB = 1 << 20
BATCH_SIZE = 100_000


def create(client: RawClient, name: str) -> None:
    wanted = {"name": name, "num_partitions": 1, "replication_factor": 1}
    answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
    assert answer.topics[0].error_code == 0, answer


def fill(client: RawClient, topic: str, batches: int) -> None:
    batch = batch_of(os.urandom(BATCH_SIZE))
    for _ in range(batches):
        assert client.produce({(topic, 0): batch})[0].error_code == 0


def is_served(port: int) -> bool:
    try:
        with RawClient(port) as client:
            client.socket.settimeout(10.0)
            return bool(client.ask(Api.API_VERSIONS, 0).error_code == 0)
    except (OSError, EOFError):
        return False


@pytest.mark.parametrize("setting", ["max_connections", "max_connections_per_ip"])
def test_connections_are_counted(broker_factory: BrokerFactory, setting: str) -> None:
    broker = broker_factory(**{setting: 5})
    # What the start's own question held is forgotten when its end has been seen.
    until(lambda: is_served(broker.port), "the broker serves")
    peers: list[RawClient] = []
    try:

        def fifth_is_served() -> bool:
            while len(peers) < 5:
                peer = RawClient(broker.port)
                try:
                    assert peer.ask(Api.API_VERSIONS, 0).error_code == 0
                except (EOFError, ConnectionError):
                    peer.socket.close()
                    return False
                peers.append(peer)
            return True

        until(fifth_is_served, "five connections")
        for _ in range(3):
            with RawClient(broker.port) as sixth:
                assert sixth.is_closed()
        assert broker.log.count(f"connection refused: {setting.replace('_', '.')} is reached") == 1
        assert all(peer.ask(Api.API_VERSIONS, 0).error_code == 0 for peer in peers)
        peers.pop().socket.close()
        until(lambda: is_served(broker.port), "a place is free again")
    finally:
        for peer in peers:
            peer.socket.close()


def stalled_reader(port: int, requests: bytes) -> socket.socket:
    """A peer with a small window that asks and does not read."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(("127.0.0.1", port))
    peer.sendall(requests)
    return peer


def test_many_readers_of_the_same_data_cost_no_copies_of_it(broker_factory: BrokerFactory) -> None:
    """What is read is in the system's page cache once, however many groups read it."""
    readers, batches = 16, 400
    broker = broker_factory()
    with RawClient(broker.port) as client:
        create(client, "shared")
        fill(client, "shared", batches)
    peers = [RawClient(broker.port) for _ in range(readers)]
    try:
        with broker.most_memory(readers * 1.5 + 20):  # an answer each under way; their own copies: 640 MiB
            offset = 0
            while offset < batches:
                asked = FetchRequest(0, 1, MIB, False, [PartitionFetch("shared", 0, offset, MIB)])
                for peer in peers:
                    peer.send(encode_fetch_request(12, 1, "raw", asked))
                given = [decode_fetch_response(peer.receive(), 12).partitions[0].records for peer in peers]
                assert len(set(map(bytes, given))) == 1
                offset += len(given[0]) // BATCH_SIZE
    finally:
        for peer in peers:
            peer.socket.close()


def test_many_stalled_readers_are_bounded_together(broker_factory: BrokerFactory) -> None:
    bound_mib, readers = 32, 150
    broker = broker_factory(
        queued_max_response_bytes=bound_mib * MIB, metrics_listen=f"127.0.0.1:{free_port()}"
    )
    with RawClient(broker.port) as client:
        create(client, "large")
        fill(client, "large", 160)
        client.fetch(PartitionFetch("large", 0, 0, 8 * MIB))
        before = broker.resident_mib()
        asked = FetchRequest(0, 1, 50 * MIB, False, [PartitionFetch("large", 0, 0, 8 * MIB)])
        requests = encode_fetch_request(12, 1, "raw", asked) * 20
        peers = [stalled_reader(broker.port, requests) for _ in range(readers)]
        try:
            until(lambda: slow_readers(broker) == readers, f"{readers} readers are stalled")
            # Without a bound each holds an answer of 8 MB at least: 1,200 MB.
            deadline = time.monotonic() + 3
            most = 0.0
            while time.monotonic() < deadline:
                # One that waited for the others would wait for as long as they do not read.
                given = client.fetch(PartitionFetch("large", 0, 80, MIB), max_bytes=MIB)
                assert len(given.partitions[0].records) >= BATCH_SIZE
                most = max(most, broker.resident_mib() - before)
            print(f"{readers} stalled readers: {most:.0f} MiB")
            # How much of each answer the kernel's socket takes depends on what it remembers of the route.
            assert most < bound_mib + readers * 1.0 + 20
            assert slow_readers(broker) == readers
        finally:
            for peer in peers:
                peer.close()
        until(
            lambda: "millrace_broker_unread_answer_bytes 0.0" in broker.metrics(), "nothing is held any more"
        )
        # With nobody stalled a fetch is given an eighth of the bound again.
        assert (
            len(client.fetch(PartitionFetch("large", 0, 0, 8 * MIB)).partitions[0].records)
            > bound_mib * MIB // 8 - 2 * BATCH_SIZE
        )
        until(lambda: broker.resident_mib() < before + 40, "memory goes back")


def slow_readers(broker: BrokerProcess) -> int:
    return int(float(re.findall(r"^millrace_broker_slow_readers (\S+)", broker.metrics(), re.M)[0]))


def test_half_requests_fill_their_share_of_memory_and_small_ones_pass(broker_factory: BrokerFactory) -> None:
    broker = broker_factory(queued_max_request_bytes=16 * MIB, message_max_bytes=8 * MIB)
    with RawClient(broker.port) as client:
        create(client, "t")
        fill(client, "t", 1)
        before = broker.resident_mib()
        peers = []
        try:
            for _ in range(40):
                peer = socket.create_connection(("127.0.0.1", broker.port))
                peer.setblocking(False)
                peers.append(peer)
                rest = memoryview(struct.pack(">i", 6 * MIB) + bytes(4 * MIB))
                deadline = time.monotonic() + 0.2
                while rest and time.monotonic() < deadline:
                    try:
                        rest = rest[peer.send(rest) :]
                    except BlockingIOError:
                        time.sleep(0.001)
            assert broker.resident_mib() - before < 16 + 8 + 10
            fill(client, "t", 20)  # or the answer does not come
        finally:
            for peer in peers:
                peer.close()
        # Room again for a large one.
        assert client.produce({("t", 0): batch_of(os.urandom(7_000_000))})[0].error_code == 0


def test_fetch_that_waits_holds_no_records(broker_factory: BrokerFactory) -> None:
    """`min_bytes` beyond what is there: what has been read is let go of while the request waits."""
    broker = broker_factory()
    with RawClient(broker.port) as client:
        create(client, "t")
        fill(client, "t", 40)
        client.fetch(PartitionFetch("t", 0, 0, 8 * MIB))
        before = broker.resident_mib()
        asked = FetchRequest(60_000, 5 * MIB, 50 * MIB, False, [PartitionFetch("t", 0, 0, 8 * MIB)])
        peers = [
            stalled_reader(broker.port, encode_fetch_request(12, 1, "raw", asked) * 8) for _ in range(20)
        ]
        try:
            time.sleep(1.0)  # 160 requests have read 4 MB each by now
            assert client.ask(Api.API_VERSIONS, 0).error_code == 0
            assert broker.resident_mib() - before < 60
        finally:
            for peer in peers:
                peer.close()
        # And still gets all of it when its time is up.
        given = client.fetch(
            PartitionFetch("t", 0, 0, 8 * MIB), max_wait_ms=300, min_bytes=5 * MIB, max_bytes=50 * MIB
        )
        assert len(given.partitions[0].records) > 40 * BATCH_SIZE
