"""What operators want of a running worker, made true. What they see of it is `status`'s.

Made by `worker`, called by `control` (HTTP) and `daemon` (SIGHUP). Wishes come from the control topic
(`wish_reader`) and are made true here by looking, not by remembering: what is paused, how fast a source may
be read and which gaps may pass is compared with what is, at every change and once a second. So it does not
matter whether the wish or the partition came first.

Also here, because it is taken in the same turn: the rates of the last moments.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.mirror.checks.check import StartRefused
from millrace.mirror.checks.findings import second_names
from millrace.mirror.config import MirrorConfig, SourceConfig
from millrace.mirror.control.throughput import Throughput
from millrace.mirror.control.wish_reader import WishReader, WriteRecords
from millrace.mirror.control.wishes import Scope, Wishes, skipped_record
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.gaps.gaps import Gap
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.reload import ReloadPlan, plan_reload
from millrace.mirror.sharing.peers import Crew
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.own_topics import WISHES
from millrace.mirror.topics.routes import SourcePartition

if TYPE_CHECKING:
    from millrace.mirror.worker import Worker

log = structlog.get_logger("millrace.mirror.control.operators")

TICK_S = 1.0
# How long a reload waits for a cluster to say which one it is.
ASKED_FOR_S = 5.0
Connect = Callable[[SourceConfig], Cluster]


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
            WISHES.of(config.name),
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
        changed. `connect` gives the cluster of a source that is new.

        Raises StartRefused where a new source is a cluster that the mirror has under another name, as a start
        would."""
        async with self._reloading:
            worker = self._worker
            plan = plan_reload(worker.config, config)
            if plan.refused:
                log.warning("not reloaded: a restart is needed", fields=",".join(plan.refused))
                return plan
            if not plan.changed:
                log.info("reloaded: nothing has changed")
                return plan
            added = [source for source in config.sources if source.cluster in plan.added_sources]
            clusters = {source.cluster: connect(source) for source in added}
            try:
                await self._refuse_second_names(config, clusters)
            except BaseException:
                for cluster in clusters.values():
                    await cluster.close()
                raise
            worker.take_config(config)
            for name in plan.removed_sources:
                await worker.remove_source(name)
            for source in added:
                worker.readers.add(source, clusters[source.cluster])
            self._set_rates(self.wishes)
            if any(path.startswith("sources[") and ".security" not in path for path in plan.changed):
                worker.rejoin()
            log.info("reloaded", fields=",".join(plan.changed))
            return plan

    async def _refuse_second_names(self, config: MirrorConfig, added: Mapping[str, Cluster]) -> None:
        """Before anything of them is carried. A cluster that does not answer in time is taken: the guard of
        routes looks again when it does."""
        if not added:
            return
        worker = self._worker
        stay = {name: each.cluster for name, each in worker.readers.items() if config.source(name)}
        clusters = {config.target.cluster: worker.target, **stay, **added}
        ids = await asyncio.gather(*(_cluster_id(cluster) for cluster in clusters.values()))
        for finding in second_names(config, dict(zip(clusters, ids, strict=True))):
            if finding.where in added:
                raise StartRefused(finding.sentence)


async def _cluster_id(cluster: Cluster) -> str | None:
    try:
        async with asyncio.timeout(ASKED_FOR_S):
            return (await cluster.metadata([])).cluster_id
    except CLUSTER_FAILURES as error:
        log.warning("not known whether it has another name here", cluster=cluster.name, error=str(error))
        return None
