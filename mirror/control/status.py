"""What a worker tells people and machines of itself: whether it is ready, what is in its way, the document of
/status, gauges. It only looks.

Made by `worker`, of whose parts it asks; called by `control` (HTTP) and `metrics`. Rows and gauges of single
parts are `sight`'s.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from millrace.mirror.control.sight import (
    GaugeRow,
    left_out_rows,
    partition_status,
    source_gauges,
    throttle_gauges,
    trouble_gauges,
    troubles_of,
)
from millrace.mirror.pipeline import State
from millrace.mirror.troubles import LASTING_AFTER_MS, Trouble

if TYPE_CHECKING:
    from millrace.mirror.worker import Worker

MOST_TROUBLES_TOLD = 5  # by /readyz, which is read by people in a hurry


@cache
def _version() -> str:
    return version("millrace")


class WorkerStatus:
    """See the module's text."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def is_ready(self) -> bool:
        worker = self._worker
        return (
            worker.is_assigned
            and self._is_connected
            and not any(pipeline.state is State.STARTING for pipeline in worker.owned.values())
            and not self._lasting_troubles()
        )

    def target_away(self) -> list[str]:
        """That the target does not answer, where that is known, and why."""
        target = self._worker.target
        if self._is_connected or self._is_target_unknown or not target.trouble:
            return []
        return [f"target {target.name} does not answer: {target.trouble}"]

    def waits_for(self) -> list[str]:
        """Why there is no share, or a part of it that is not carried, where that lasts."""
        worker = self._worker
        wishes = "" if worker.operators.reader.is_ready else "the wishes of operators have not been read yet"
        waits = [text for text in (worker.member.trouble, wishes, worker.keeper.trouble) if text]
        lasting, now_ms = self._lasting_troubles(), worker.now_ms()
        waits += [each.describe(now_ms) for each in lasting[:MOST_TROUBLES_TOLD]]
        if (more := len(lasting) - MOST_TROUBLES_TOLD) > 0:
            waits.append(f"and {more} more, see /status")
        return waits

    def troubles(self) -> list[Trouble]:
        """What is tried without end now: fetches that the source refuses, batches that the target refuses,
        transactions of ours that are not committed, records of ours (positions, gaps) that are not taken,
        topics that the target does not take or that cannot be let in, what waits behind a transaction that
        nobody ends. The oldest first."""
        worker = self._worker
        refused = {target: failure for sink in worker.delivery.sinks for target, failure in sink.failures}
        topics = worker.discovery.topics.failures
        return troubles_of(worker.owned, worker.readers, refused, worker.standing(), topics, worker.now_ms())

    def document(self) -> dict[str, Any]:
        """That of /status."""
        worker = self._worker
        member, target, operators = worker.member, worker.target, worker.operators
        now_ms, paused = worker.now_ms(), operators.wishes.paused_scopes
        return {
            "mirror": worker.config.name,
            "ready": self.is_ready(),
            "waits_for": self.waits_for(),
            "stopping": worker.is_stopping,
            "delivery": worker.config.delivery,
            "transactions": asdict(worker.delivery.transactions()),
            "member": member.member_id,
            "generation": member.generation,
            "leader": member.is_leader,
            "target": {
                "cluster": target.name,
                "connected": self._is_connected,
                "starting": self._is_target_unknown,
                "error": target.trouble,
                "over_quota": target.is_throttled,
                "throttled_ms": target.throttled_ms,
                "retries": self._retry_count,
                "queued_batches": sum(sink.queued_count for sink in worker.delivery.sinks),
            },
            "sources": [
                {**reader.status(), "throttle_bytes_per_second": operators.wishes.rate_of(name)}
                for name, reader in worker.readers.items()
            ],
            "refused_topics": [
                {"source": source, "topic": topic, "reason": reason}
                for (source, topic), reason in sorted(worker.discovery.guard.refusals().items())
            ],
            "troubles": [each.as_row() for each in self.troubles()],
            "groups": worker.group_sync.status(),
            "partitions": [partition_status(worker.owned[key], now_ms) for key in sorted(worker.owned)],
            "url": operators.url,
            "at_ms": now_ms,
            "draining": operators.is_draining,
            "paused": [str(scope) for scope in paused],
            "resumed": {
                str(scope): [str(each) for each in resumed] for scope, resumed in paused.items() if resumed
            },
            "topics": self._rates(),
            "internal_topics": left_out_rows(worker.readers.values()),
        }

    def gauges(self) -> list[GaugeRow]:
        """Those of the whole worker, in the order of /metrics."""
        worker = self._worker
        target = {"target": worker.target.name}
        refused = len(worker.discovery.guard.refusals())
        return [
            *self._target_gauges(target),
            (
                "millrace_mirror_produce_retries_total",
                "Batches sent again",
                target,
                float(self._retry_count),
            ),
            *throttle_gauges(worker.target, worker.readers.values()),
            (
                "millrace_mirror_refused_topics",
                "Topics that would go round, or mix with another",
                {},
                float(refused),
            ),
            *source_gauges(worker.readers.values()),
            *trouble_gauges(self.troubles(), worker.now_ms()),
            *self._own_gauges(),
            *self._wish_gauges(),
            *worker.group_sync.gauges(),
        ]

    def _target_gauges(self, target: dict[str, str]) -> list[GaugeRow]:
        """Nothing where this worker asks it for nothing, drained or without a share: it cannot say then that
        the target is away."""
        if self._worker.operators.is_draining or self._is_target_unknown:
            return []
        up = float(self._is_connected)
        text = "Whether the target answers; absent while this worker asks it for nothing"
        return [("millrace_mirror_target_up", text, target, up)]

    def _own_gauges(self) -> list[GaugeRow]:
        worker = self._worker
        return [
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
                float(self.is_ready()),
            ),
            (
                "millrace_mirror_workers",
                "Workers of the mirror as of the last rebalance",
                {},
                float(len(worker.operators.crew.workers)),
            ),
            (
                "millrace_mirror_in_flight_bytes",
                "Memory of fetched batches that are on their way, with the whole answers that they keep",
                {},
                float(worker.budget.held_size),
            ),
            (
                "millrace_mirror_in_flight_limit_bytes",
                "The most memory that fetched batches may take",
                {},
                float(worker.config.in_flight_bytes),
            ),
        ]

    def _wish_gauges(self) -> list[GaugeRow]:
        """What operators want of each partition and source."""
        worker, wishes = self._worker, self._worker.operators.wishes
        rows: list[GaugeRow] = [
            (
                "millrace_mirror_paused_partitions",
                "1 where an operator paused the partition, otherwise 0",
                {"source": each.source, "topic": each.topic, "partition": str(each.partition)},
                float(wishes.is_paused(each)),
            )
            for each in sorted(worker.owned)
        ]
        for name in worker.readers:
            source = {"source": name}
            rate = wishes.rate_of(name)
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

    def _rates(self) -> list[dict[str, Any]]:
        rows = []
        for (source, topic), (records, size) in sorted(self._worker.metrics.totals().items()):
            rate = self._worker.operators.throughput.rate(source, topic)
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

    @property
    def _is_connected(self) -> bool:
        return any(sink.is_connected for sink in self._worker.delivery.sinks)

    @property
    def _is_target_unknown(self) -> bool:
        """Not asked yet, and nothing says that it is away: a worker without a share has no sinks."""
        worker = self._worker
        return not worker.target.trouble and not any(sink.was_connected for sink in worker.delivery.sinks)

    @property
    def _retry_count(self) -> int:
        return sum(sink.retry_count for sink in self._worker.delivery.sinks)

    def _lasting_troubles(self) -> list[Trouble]:
        now_ms = self._worker.now_ms()
        return [each for each in self.troubles() if each.for_ms(now_ms) >= LASTING_AFTER_MS]
