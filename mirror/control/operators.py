"""What operators want of a running worker, and what they see of it.

Made by `worker`, called by `control` (HTTP) and `daemon` (SIGHUP). Wishes come from the control topic
(`wish_reader`) and are made true here by looking, not by remembering: what is paused, how fast a source may
be read and which gaps may pass is compared with what is, at every change and once a second. So it does not
matter whether the wish or the partition came first.

Also here, because it is for operators alone: the status document and the rates of the last moments.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.mirror.config import MirrorConfig, SourceConfig
from millrace.mirror.control.sight import left_out_rows
from millrace.mirror.control.throughput import Throughput
from millrace.mirror.control.wish_reader import WishReader, WriteRecords
from millrace.mirror.control.wishes import Scope, Wishes, control_topic, skipped_record
from millrace.mirror.gaps.advice import what_to_do
from millrace.mirror.gaps.gaps import Gap, GapClass
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.reload import ReloadPlan, plan_reload
from millrace.mirror.sharing.peers import Crew
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition

if TYPE_CHECKING:
    from millrace.mirror.worker import Worker

log = structlog.get_logger("millrace.mirror.control.operators")

TICK_S = 1.0
Connect = Callable[[SourceConfig], Cluster]
GaugeRow = tuple[str, str, dict[str, str], float]


@cache
def _version() -> str:
    return version("millrace")


class Operators:
    """See the module's text. `run` goes on until it is cancelled."""

    def __init__(self, worker: Worker, write: WriteRecords) -> None:
        self._worker = worker
        self.url = ""
        self.crew = Crew()
        self.throughput = Throughput()
        self.is_draining = False
        self._passing: dict[SourcePartition, Gap] = {}
        self._reloading = asyncio.Lock()
        config = worker.config
        self.reader = WishReader(
            worker.target,
            control_topic(config.name),
            config.target.replication_factor,
            write,
            self._changed,
            self._retry,
        )

    @property
    def wishes(self) -> Wishes:
        return self.reader.wishes

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reader.run())
            tasks.create_task(self._tick())

    async def ready(self) -> None:
        """Returns when it is known what is wished: no partition may begin before."""
        await self.reader.ready()

    def take_crew(self, crew: Crew) -> None:
        """The group has shared out its work anew."""
        self.crew = crew
        self._set_rates(self.wishes)

    def began(self, pipeline: PartitionPipeline) -> None:
        """A partition was assigned; it does not fetch yet."""
        if self.wishes.is_paused(pipeline.partition):
            pipeline.pause()

    # --- wishes made true ------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            worker = self._worker
            self.throughput.sample(worker.metrics.totals(), steady_ms())
            self._let_gaps_pass(self.wishes)
            await self._forget_skips()

    def _changed(self, wishes: Wishes) -> None:
        for pipeline in list(self._worker.owned.values()):
            if wishes.is_paused(pipeline.partition):
                pipeline.pause()
            else:
                pipeline.unpause()
        self._set_rates(wishes)
        self._let_gaps_pass(wishes)

    def _set_rates(self, wishes: Wishes) -> None:
        owned = Counter(partition.source for partition in self._worker.owned)
        for name, reader in self._worker.readers.items():
            rate = wishes.rate_of(name)
            reader.set_rate(None if rate is None else self.crew.share_of_rate(name, owned[name], rate))

    def _let_gaps_pass(self, wishes: Wishes) -> None:
        for partition in wishes.skipped_partitions:
            pipeline = self._worker.owned.get(partition)
            if pipeline is None or pipeline.state is not State.STOPPED or pipeline.gap is None:
                continue
            if wishes.skips(pipeline.gap) and (passing := pipeline.skip_gap()) is not None:
                self._passing[partition] = passing

    async def _forget_skips(self) -> None:
        """Takes wishes away whose gap lies behind the written position. A gap of another log may lie behind a
        smaller one: there only the worker that let it pass can tell."""
        for partition, first in self.wishes.skipped_partitions.items():
            pipeline = self._worker.owned.get(partition)
            if pipeline is None or pipeline.gap is not None:
                continue
            if pipeline.state not in (State.RUNNING, State.PAUSED):
                continue
            is_written = pipeline.position_to_write(self._worker.now_ms()) is None
            is_passed = partition in self._passing or pipeline.progress.position > first
            if is_written and is_passed:
                try:
                    async with asyncio.timeout(TICK_S):
                        await self.reader.write([skipped_record(partition)])
                except TimeoutError:
                    return  # the target is away; there is a next time
                self._passing.pop(partition, None)

    def _retry(self, scope: Scope) -> None:
        for partition, pipeline in list(self._worker.owned.items()):
            if scope.covers(partition) and pipeline.state is State.STOPPED:
                pipeline.retry()

    # --- reload ----------------------------------------------------------------------------------

    async def reload(self, config: MirrorConfig, connect: Connect) -> ReloadPlan:
        """Makes a config that was read again the one in force. While anything of it is refused, nothing is
        changed. `connect` gives the cluster of a source that is new."""
        async with self._reloading:
            worker = self._worker
            plan = plan_reload(worker.config, config)
            if plan.refused:
                log.warning("not reloaded: a restart is needed", fields=",".join(plan.refused))
                return plan
            if not plan.changed:
                log.info("reloaded: nothing has changed")
                return plan
            worker.take_config(config)
            for name in plan.removed_sources:
                await worker.remove_source(name)
            for name in plan.added_sources:
                source = config.source(name)
                if source is not None:
                    worker.readers.add(source, connect(source))
            self._set_rates(self.wishes)
            if any(path.startswith("sources[") and ".security" not in path for path in plan.changed):
                worker.rejoin()
            log.info("reloaded", fields=",".join(plan.changed))
            return plan

    # --- sight -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The document of /status."""
        worker = self._worker
        document = worker.status()
        for source in document["sources"]:
            source["throttle_bytes_per_second"] = self.wishes.rate_of(source["cluster"])
        for partition in document["partitions"]:
            if "gap" in partition:
                partition["gap"]["todo"] = what_to_do(GapClass(partition["gap"]["class"]))
        return {
            **document,
            "url": self.url,
            "at_ms": worker.now_ms(),
            "draining": self.is_draining,
            "paused": [str(scope) for scope in self.wishes.paused_scopes],
            "topics": self._rates(),
            "internal_topics": left_out_rows(worker.readers.values()),
        }

    def _rates(self) -> list[dict[str, Any]]:
        rows = []
        for (source, topic), (records, size) in sorted(self._worker.metrics.totals().items()):
            rate = self.throughput.rate(source, topic)
            rows.append(
                {
                    "source": source,
                    "topic": topic,
                    "records": records,
                    "bytes": size,
                    "records_per_second": rate.records_per_second,
                    "bytes_per_second": rate.bytes_per_second,
                }
            )
        return rows

    def gauges(self) -> list[GaugeRow]:
        worker = self._worker
        rows: list[GaugeRow] = [
            (
                "millrace_mirror_info",
                "Always 1; the labels say which mirror this worker is of",
                {
                    "mirror": worker.config.name,
                    "target": worker.target.name,
                    "delivery": worker.config.delivery,
                    "version": _version(),
                },
                1.0,
            ),
            (
                "millrace_mirror_ready",
                "Whether the worker has its share and carries all of it",
                {},
                float(worker.is_ready()),
            ),
            (
                "millrace_mirror_workers",
                "Workers of the mirror as of the last rebalance",
                {},
                float(len(self.crew.workers)),
            ),
            (
                "millrace_mirror_in_flight_bytes",
                "Memory of fetched batches that are on their way, with the whole answers that they keep",
                {},
                float(worker.held_size),
            ),
            (
                "millrace_mirror_in_flight_limit_bytes",
                "The most memory that fetched batches may take",
                {},
                float(worker.config.in_flight_bytes),
            ),
        ]
        paused = Counter(partition.source for partition in worker.owned if self.wishes.is_paused(partition))
        for name in worker.readers:
            source = {"source": name}
            rows.append(
                (
                    "millrace_mirror_paused_partitions",
                    "Partitions that an operator paused",
                    source,
                    float(paused[name]),
                )
            )
            rate = self.wishes.rate_of(name)
            if rate is not None:
                rows.append(
                    (
                        "millrace_mirror_throttle_bytes_per_second",
                        "The limit of a source, over all workers together; absent without one",
                        source,
                        rate,
                    )
                )
        return rows
