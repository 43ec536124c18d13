"""The gaps of one worker: what its config says of each, and the record by which others hear of it.

Called by `pipeline`. What a gap's event says is `gaps`' rule; it goes to the audit's topic on the target.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.system_topics import AUDIT_TOPIC, AUDIT_TOPIC_SETTINGS
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES, NewFailures, SystemRecords
from millrace.mirror.gaps.gaps import Gap, GapClass, GapPolicy, gap_event

if TYPE_CHECKING:
    from millrace.mirror.control.metrics import MirrorMetrics

log = structlog.get_logger("millrace.mirror.delivery.gap_records")

ASK_PAUSE_S = 0.2


class GapRecords:
    """See the module's text. `config` may be another while the worker runs."""

    def __init__(
        self, config: MirrorConfig, target: Cluster, system: SystemRecords, metrics: MirrorMetrics
    ) -> None:
        self.config = config
        self._target = target
        self._system = system
        self._metrics = metrics

    def policy(self, gap_class: GapClass) -> GapPolicy:
        return self.config.gaps.policy(gap_class)

    async def record(self, gap: Gap) -> None:
        """Returns when the gap's event is durable on the target, however long that takes."""
        key, value = gap_event(self.config.name, gap, await self._target_id())
        self._metrics.count_gap(key, gap.partition.source, gap.gap_class.value)
        await self._system.write(
            AUDIT_TOPIC,
            [(key, value)],
            partition_of=key,
            configs=AUDIT_TOPIC_SETTINGS,
            waiting=lambda: (gap.partition,),
        )

    async def _target_id(self) -> str:
        """The target's cluster id, "" where it has none. Asks until it is told."""
        failures = NewFailures()
        while True:
            try:
                return (await self._target.metadata([])).cluster_id or ""
            except CLUSTER_FAILURES as error:
                if failures.is_news(error):
                    log.warning("cannot ask the target for its id yet", error=str(error))
                await asyncio.sleep(ASK_PAUSE_S)
