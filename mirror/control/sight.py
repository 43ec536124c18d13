"""What a worker shows of what it carries: rows of its status, gauges, what is tried in vain. It only looks.

Called by `status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from millrace.broker.client.cluster import Cluster
from millrace.mirror.gaps.advice import what_to_do
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.troubles import Failure, Trouble, held_back, topic_troubles

GaugeRow: TypeAlias = tuple[str, str, dict[str, str], float]
"""Name, help, labels, value."""


def troubles_of(
    owned: Mapping[SourcePartition, PartitionPipeline],
    readers: Mapping[str, SourceReader],
    refused: Mapping[TargetPartition, Failure],
    standing: Iterable[tuple[SourcePartition, Failure]],
    topics: Iterable[tuple[tuple[str, str], Failure]],
    now_ms: int,
) -> list[Trouble]:
    """The oldest first. `refused`: batches that the target refuses; `standing`: what is not put on record
    there; `topics`: what the target does not take as a whole."""
    found = topic_troubles(topics)
    found += [Trouble(*key, *failure) for key, failure in standing if key in owned]
    for source, reader in readers.items():
        found += [Trouble(source, topic, None, *failure) for topic, failure in reader.view_failures]
    for key, pipeline in owned.items():
        of_source, lag = readers.get(key.source), pipeline.lag
        failures = (
            None if of_source is None else of_source.failures.get((key.topic, key.partition)),
            refused.get(pipeline.target),
            held_back(lag.held_ms(now_ms), lag.stable_end, now_ms),
        )
        found += [Trouble(*key, *failure) for failure in failures if failure is not None]
    return sorted(found, key=Trouble.order)


def trouble_gauges(troubles: Iterable[Trouble], now_ms: int) -> list[GaugeRow]:
    """One row for each partition, whatever it has: the oldest counts."""
    oldest: dict[tuple[str, str, str], int] = {}
    for each in troubles:
        key = (each.source, each.topic, "" if each.partition is None else str(each.partition))
        oldest[key] = max(oldest.get(key, 0), each.for_ms(now_ms))
    text = "For how long a partition, or a whole topic (no partition), has not been carried"
    return [
        (
            "millrace_mirror_trouble_seconds",
            text,
            {"source": source, "topic": topic, "partition": partition},
            lasts_ms / 1000,
        )
        for (source, topic, partition), lasts_ms in oldest.items()
    ]


def left_out_rows(readers: Iterable[SourceReader]) -> list[dict[str, str]]:
    """Topics that the sources' patterns select and that are never carried, as of the last look at each."""
    return [
        {"source": reader.name, "topic": each.topic, "reason": each.reason}
        for reader in readers
        if reader.view is not None
        for each in reader.selector.left_out(
            {name: topic.internal for name, topic in reader.view.topics.items()}
        )
    ]


def source_gauges(readers: Iterable[SourceReader]) -> list[GaugeRow]:
    name, text = "millrace_mirror_source_up", "Whether the source answers"
    return [(name, text, {"source": reader.name}, float(reader.is_connected)) for reader in readers]


def throttle_gauges(target: Cluster, readers: Iterable[SourceReader]) -> list[GaugeRow]:
    clusters = [("target", target), *(("source", reader.cluster) for reader in readers)]
    return [
        (
            f"millrace_mirror_{role}_throttled_seconds_total",
            f"For how long a {role} wanted no more requests, by its quotas, summed over connections",
            {role: cluster.name},
            cluster.throttled_ms / 1000,
        )
        for role, cluster in clusters
    ]


def partition_status(pipeline: PartitionPipeline, now_ms: int) -> dict[str, Any]:
    """Its row in the status."""
    where, progress, gap = pipeline.partition, pipeline.progress, pipeline.gap
    is_started = pipeline.state is not State.STARTING
    status: dict[str, Any] = {
        "source": where.source,
        "topic": where.topic,
        "partition": where.partition,
        "to": str(pipeline.target),
        "state": pipeline.state.value,
        "position": progress.position if is_started else None,
        "log_end": pipeline.lag.log_end if pipeline.lag.log_end >= 0 else None,
        "stable_end": pipeline.lag.stable_end if pipeline.lag.stable_end >= 0 else None,
        "outstanding_bytes": progress.outstanding_size,
    }
    if is_started and pipeline.lag.log_end >= 0:
        status["lag_records"] = pipeline.lag.records_behind(progress.position)
        status["lag_seconds"] = pipeline.lag.seconds_behind(progress.position, now_ms)
    if gap is not None:
        status["gap"] = {
            "from": gap.from_offset,
            "to": gap.to_offset,
            "class": gap.gap_class.value,
            "reason": gap.reason,
            "at_ms": gap.at_ms,
            "open": gap.has_open_end,
            "todo": what_to_do(gap.gap_class),
        }
    return status
