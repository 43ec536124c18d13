"""The same frames through real sockets to a broker process: its end, its log and its memory are watched."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import time
from pathlib import Path

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.server.registry import handlers
from tests.fuzz.frames import TOPICS, Seeds, mutate
from tests.fuzz.in_process import HEALTH_TOPIC, LOOKS, SETTINGS, Findings
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import patience

FRAMES_A_CONNECTION = 40
CONNECTIONS_AT_ONCE = 8
CHECK_EVERY = 2_000


def resident_size(broker: BrokerProcess) -> int:
    assert broker.process is not None
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def fuzz_over_sockets(zookeeper_path: str, folder: Path, seed: int, count: int) -> Findings:
    """`count` frames over sockets; what went wrong."""
    rng, findings = random.Random(seed), Findings()
    broker = BrokerProcess(zookeeper_path, folder, settings=SETTINGS)
    peers: list[socket.socket] = []
    try:
        broker.start()
        topic_ids = []
        with RawClient(broker.port) as client:
            for name in (*TOPICS, HEALTH_TOPIC):
                wanted = {"name": name, "num_partitions": 2, "replication_factor": 1}
                topic_ids.append(
                    client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=20_000).topics[0].topic_id
                )
        seeds = Seeds(handlers(), rng, topic_ids)
        other = seeds.next()
        checked, check_every = 0, min(CHECK_EVERY, count // LOOKS)
        while findings.frames < count and not findings.failures:
            burst = b""
            for _ in range(FRAMES_A_CONNECTION):
                frame = seeds.next()
                burst += mutate(frame, other, rng)
                other = frame
            findings.frames += FRAMES_A_CONNECTION
            peers.append(socket.create_connection(("127.0.0.1", broker.port), timeout=patience(10)))
            peers[-1].setblocking(False)
            with contextlib.suppress(OSError):
                peers[-1].send(burst)
            if len(peers) >= CONNECTIONS_AT_ONCE:
                leaving = peers.pop(rng.randrange(len(peers)))
                with contextlib.suppress(OSError):
                    leaving.recv(1 << 20)
                leaving.close()
            if findings.frames >= checked + check_every:
                checked = findings.frames
                check(broker, findings)
        check(broker, findings)
    finally:
        for peer in peers:
            peer.close()
        broker.kill()
    for line in broker.log.splitlines():
        if "a request failed" in line or "an append failed" in line or "Traceback" in line:
            findings.note(f"the broker's log: {line}")
    return findings


def check(broker: BrokerProcess, findings: Findings) -> None:
    """The process lives, and the next client writes and reads what it wrote."""
    assert broker.process is not None
    if broker.process.poll() is not None:
        findings.note(f"the broker ended with {broker.process.returncode}: {broker.log[-3000:]}")
        return
    value = b"%d" % time.monotonic_ns()
    try:
        with RawClient(broker.port) as client:
            (answer,) = client.produce({(HEALTH_TOPIC, 0): batch_of(value)})
            fetched = client.fetch(PartitionFetch(HEALTH_TOPIC, 0, answer.base_offset, 1 << 20))
        if answer.error_code or value not in bytes(fetched.partitions[0].records):
            findings.note(f"the next client is not served: {answer} {fetched}")
    except (OSError, EOFError) as error:
        findings.note(f"the next client is not served: {error!r}; {broker.log[-2000:]}")
        return
    findings.resident.append((findings.frames, resident_size(broker)))
    print(f"over sockets: {findings.frames:,} frames", file=sys.stderr, flush=True)
