"""Watches the aggregate as a consumer would: when did each record become readable there?

A thread with its own event loop, started by the demo before the replay. It fetches every partition of the
audited topic at its end with a long poll, and of every fourth batch notes the records' identities with the
time of their arrival. After the replay those times meet the times at which the replay processes sent the same
records: the difference is the latency from send to readable, on one machine's clock. The acknowledgement by
the source divides it: what comes before is the producer's queue and the source's answer, what comes after the
mirror and the aggregate.

A broker that goes away and comes back (`--kill`) is waited for; records that were read already are not read
again, so a pause shows as the latency it was.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

import numpy as np
from numpy.typing import NDArray

from millrace.audit.contract.header import HEADER_KEY, InvalidIdentity, decode_identity
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.errors import LeaderNotAvailable, MillraceError, error_for_code
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.records import read_records
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.deploy.demo.replay import SentTimes

BATCH_STRIDE = 4
FETCH_WAIT_MS = 250
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Span:
    """How long something took, over all records that were looked at."""

    mean_ms: float
    p99_ms: float

    @classmethod
    def of(cls, values_ms: NDArray[np.float64]) -> Span:
        return cls(float(values_ms.mean()), float(np.percentile(values_ms, 99)))


@dataclass(frozen=True, slots=True)
class Latency:
    """From send to readable in the aggregate, over `count` sampled records; to the source's acknowledgement,
    and from there on."""

    count: int
    whole: Span
    to_source: Span
    to_aggregate: Span

    @classmethod
    def of(cls, times_ms: list[tuple[float, float, float]]) -> Latency | None:
        """Of (sent, acknowledged, readable); a record may be readable before its answer has arrived."""
        if not times_ms:
            return None
        sent, acknowledged, readable = np.array(times_ms).T
        carried = np.maximum(readable - acknowledged, 0.0)
        return cls(len(sent), Span.of(readable - sent), Span.of(acknowledged - sent), Span.of(carried))


class TailReader:
    """Reads `topic` of the aggregate to its growing end until stopped."""

    def __init__(self, bootstrap: str, topic: str):
        self._bootstrap = bootstrap
        self._topic = topic
        self._stop = threading.Event()
        self._arrivals: dict[tuple[str, int], float] = {}
        self._thread = threading.Thread(target=self._run, name="tail-reader", daemon=True)
        self.problem: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    def latency(self, sent: Iterable[SentTimes]) -> Latency | None:
        """Call after `stop`. Records whose times are not known (another run's) do not count."""
        by_producer = list(sent)
        known = []
        for (producer, sequence), arrived_ms in self._arrivals.items():
            times = next((at for times in by_producer if (at := times.at(producer, sequence))), None)
            if times is not None and not isnan(times[1]):
                known.append((*times, arrived_ms))
        return Latency.of(known)

    def _run(self) -> None:
        try:
            asyncio.run(self._read_until_stopped())
        except MillraceError as error:
            self.problem = str(error)

    async def _read_until_stopped(self) -> None:
        async with Cluster("aggregate", [self._bootstrap], client_id="demo-tail") as cluster:
            partitions = await self._partitions(cluster)
            await asyncio.gather(*(self._follow(cluster, number) for _, number in partitions))

    async def _partitions(self, cluster: Cluster) -> list[TopicPartition]:
        """The topic's partitions, once the mirror has created it in the aggregate."""
        while not self._stop.is_set():
            partitions = (await cluster.metadata([self._topic], max_age_ms=0)).partitions(self._topic)
            if partitions:
                return partitions
            await asyncio.sleep(RETRY_S)
        return []

    async def _follow(self, cluster: Cluster, partition: int) -> None:
        offset, batch_number = 0, 0
        while not self._stop.is_set():
            try:
                records = await self._fetch(cluster, partition, offset)
            except MillraceError:
                # Its broker is away, or does not lead the partition yet: look again who does.
                cluster.invalidate()
                await asyncio.sleep(RETRY_S)
                continue
            arrived_ms = time.time() * 1000.0
            for position, header in iterate_batches(records):
                if header.next_offset <= offset:
                    continue
                offset = header.next_offset
                batch_number += 1
                if batch_number % BATCH_STRIDE == 0:
                    self._note(records[position : position + header.size], arrived_ms)

    async def _fetch(self, cluster: Cluster, partition: int, offset: int) -> memoryview:
        """What lies at `offset` or comes there within the long poll; raises MillraceError."""
        key = (self._topic, partition)
        node_id = (await cluster.metadata([self._topic])).leader(*key)
        if node_id is None:
            raise LeaderNotAvailable(f"partition {partition} of {self._topic} has no leader")
        # A connection for each partition: one's long poll must not hold up another's records.
        purpose = f"tail-{partition}"
        (answer,) = await fetch(
            cluster, node_id, {key: FetchPosition(offset)}, max_wait_ms=FETCH_WAIT_MS, purpose=purpose
        )
        if answer.error_code:
            raise error_for_code(answer.error_code)
        return answer.records

    def _note(self, batch: memoryview, arrived_ms: float) -> None:
        for record in read_records(batch):
            for name, value in record.headers:
                if name == HEADER_KEY:
                    try:
                        identity = decode_identity(value)
                    except InvalidIdentity:
                        break
                    self._arrivals.setdefault((identity.producer, identity.sequence), arrived_ms)
                    break
