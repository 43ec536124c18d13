"""The mirror's numbers: plain counters on the hot path, Prometheus text when asked.

Counted by `pipeline`, `gap_records` and the delivery, read by `control`. Gauges are computed at scrape time
from what the worker owns.

    millrace_mirror_lag_records{source,topic,partition}   records between position and the source's log end
    millrace_mirror_lag_seconds{source,topic,partition}   how long the oldest of them has been waiting
    millrace_mirror_stable_offset{source,topic,partition} the source's last stable offset: what lies between
                                                          it and the log's end is in open transactions
    millrace_mirror_trouble_seconds{source,topic,partition}  for how long it has been tried in vain;
                                                          partition "": a topic that the target does not take
    millrace_mirror_records_total{source,topic}           acknowledged by the target
    millrace_mirror_bytes_total{source,topic}             of batches, as they were sent
    millrace_mirror_target_batches_total{source,topic}    those batches; small ones of the source are merged
    millrace_mirror_batches_total{source,path}            pass_through, rebuild, split, coalesce, drop,
                                                          unreadable
    millrace_mirror_path_records_total{source,path}       of those batches, as the source has them
    millrace_mirror_path_bytes_total{source,path}         (not of drop and unreadable, which are not carried)
    millrace_mirror_end_to_end_seconds{source,from}       from the source to the target's acknowledgement
    millrace_mirror_transaction_seconds{outcome}          from a transaction's first record to its end
    millrace_mirror_open_gaps{source}                     partitions stopped, or about to skip, at a gap
    millrace_mirror_gaps_total{source,class}              gaps met, each counted once
    millrace_mirror_partitions{source,state}
    millrace_mirror_source_up{source}, millrace_mirror_target_up{target}
                                                          (absent without a share of the work),
    millrace_mirror_produce_retries_total{target}
    millrace_mirror_source_throttled_seconds_total{source}, _target_throttled_seconds_total{target}
                                                          by quotas of the cluster, summed over connections
    and those of `operators`: millrace_mirror_info{mirror,target,delivery,version}, _ready, _workers,
    _in_flight_bytes, _in_flight_limit_bytes, _paused_partitions{source,topic,partition} (1 or 0),
    _throttle_bytes_per_second{source}

There is no label for the mirror: its workers are the targets of one scrape job.

End-to-end latency is measured for each batch up to the target's acknowledgement; the label `from` says
where it begins: `append` at the source's append (topics with LogAppendTime), `create` at the newest
record's creation time (live data: not older than an hour), `seen` at the moment this worker first saw that
the source's log holds the batch (replayed data, whose creation times are of another day).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from millrace.mirror.batches.rebatch import NOT_CARRIED, BatchPath
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.topics.routes import SourcePartition

LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
    3600,
)


class Histogram:
    """Counts in fixed buckets, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        names = [str(bound) for bound in LATENCY_BUCKETS_S] + ["+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]


class MirrorMetrics:
    """One worker's counters; `collect` is prometheus_client's interface."""

    def __init__(
        self,
        now_ms: Callable[[], int],
        pipelines: Callable[[], Iterable[PartitionPipeline]],
        gauges: Callable[[], Iterable[tuple[str, str, dict[str, str], float]]],
    ) -> None:
        self._now_ms = now_ms
        self._pipelines = pipelines
        self._gauges = gauges
        self._delivered: dict[tuple[str, str], list[int]] = {}
        self._batches: dict[tuple[str, BatchPath], list[int]] = {}
        self._latency: dict[tuple[str, str], Histogram] = {}
        self._gaps: Counter[tuple[str, str]] = Counter()
        self._known_gaps: set[tuple[bytes, str]] = set()
        self._transaction_times: dict[str, Histogram] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_batch(
        self, partition: SourcePartition, path: BatchPath, batches: int, records: int, size: int
    ) -> None:
        key = (partition.source, path)
        counts = self._batches.get(key)
        if counts is None:
            counts = self._batches[key] = [0, 0, 0]
        counts[0] += batches
        counts[1] += records
        counts[2] += size

    def count_delivered(
        self, partition: SourcePartition, records: int, size: int, measured_from: str, seconds: float
    ) -> None:
        where = (partition.source, partition.topic)
        counts = self._delivered.get(where)
        if counts is None:
            counts = self._delivered[where] = [0, 0, 0]
        counts[0] += records
        counts[1] += size
        counts[2] += 1
        key = (partition.source, measured_from)
        histogram = self._latency.get(key)
        if histogram is None:
            histogram = self._latency[key] = Histogram()
        histogram.observe(seconds)

    def count_transaction(self, seconds: float, committed: bool) -> None:
        outcome = "committed" if committed else "aborted"
        self._transaction_times.setdefault(outcome, Histogram()).observe(seconds)

    def count_gap(self, key: bytes, source: str, gap_class: str) -> None:
        """`key` is the event's: a gap that is met again is the same gap."""
        if (key, gap_class) not in self._known_gaps:
            self._known_gaps.add((key, gap_class))
            self._gaps[source, gap_class] += 1

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(source, topic) → records and bytes that the target has acknowledged since the process began."""
        return {key: (records, size) for key, (records, size, _) in self._delivered.items()}

    def delivered_records(self) -> int:
        return sum(records for records, *_ in self._delivered.values())

    def text(self) -> bytes:
        """The Prometheus exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_partitions()
        records = CounterMetricFamily(
            "millrace_mirror_records", "Records acknowledged by the target", labels=["source", "topic"]
        )
        sizes = CounterMetricFamily(
            "millrace_mirror_bytes", "Bytes of batches acknowledged by the target", labels=["source", "topic"]
        )
        sent = CounterMetricFamily(
            "millrace_mirror_target_batches",
            "Batches acknowledged by the target, as they were sent",
            labels=["source", "topic"],
        )
        for (source, topic), (count, size, batch_count) in self._delivered.items():
            records.add_metric([source, topic], count)
            sizes.add_metric([source, topic], size)
            sent.add_metric([source, topic], batch_count)
        batches = CounterMetricFamily(
            "millrace_mirror_batches", "Batches by what happened to them", labels=["source", "path"]
        )
        path_records = CounterMetricFamily(
            "millrace_mirror_path_records",
            "Records of the source's batches by what happened to them",
            labels=["source", "path"],
        )
        path_bytes = CounterMetricFamily(
            "millrace_mirror_path_bytes",
            "Bytes of the source's batches by what happened to them",
            labels=["source", "path"],
        )
        for (source, path), (batch_count, record_count, byte_count) in self._batches.items():
            batches.add_metric([source, path], batch_count)
            if path not in NOT_CARRIED:
                path_records.add_metric([source, path], record_count)
                path_bytes.add_metric([source, path], byte_count)
        latency = HistogramMetricFamily(
            "millrace_mirror_end_to_end_seconds",
            "Source to acknowledged in the target, per batch; `from` says where it begins",
            labels=["source", "from"],
        )
        for key, histogram in self._latency.items():
            latency.add_metric(list(key), histogram.cumulative(), histogram.sum)
        gaps = CounterMetricFamily(
            "millrace_mirror_gaps",
            "Stretches that could not be carried, by their class",
            labels=["source", "class"],
        )
        for labels, count in sorted(self._gaps.items()):
            gaps.add_metric(list(labels), count)
        transactions = HistogramMetricFamily(
            "millrace_mirror_transaction_seconds",
            "From the first record of a transaction to its end, by outcome",
            labels=["outcome"],
        )
        for outcome, times in sorted(self._transaction_times.items()):
            transactions.add_metric([outcome], times.cumulative(), times.sum)
        yield from (records, sizes, sent, batches, path_records, path_bytes, latency, gaps, transactions)
        yield from self._collect_gauges()

    def _collect_gauges(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, text, labels, value in self._gauges():
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()

    def _collect_partitions(self) -> Iterator[Metric]:
        now_ms = self._now_ms()
        labels = ["source", "topic", "partition"]
        lag_records = GaugeMetricFamily(
            "millrace_mirror_lag_records", "Records behind the source's log end", labels=labels
        )
        lag_seconds = GaugeMetricFamily(
            "millrace_mirror_lag_seconds", "Age of the oldest record that waits", labels=labels
        )
        stable = GaugeMetricFamily(
            "millrace_mirror_stable_offset",
            "The source's last stable offset: what follows it is in open transactions",
            labels=labels,
        )
        gaps: dict[str, int] = {}
        states: dict[tuple[str, str], int] = {}
        for pipeline in self._pipelines():
            where = pipeline.partition
            gaps[where.source] = gaps.get(where.source, 0) + (pipeline.gap is not None)
            key = (where.source, pipeline.state.value)
            states[key] = states.get(key, 0) + 1
            if pipeline.state is State.STARTING or pipeline.lag.log_end < 0:
                continue  # not known yet, and 0 would be a lie
            values = [where.source, where.topic, str(where.partition)]
            position = pipeline.progress.position
            lag_records.add_metric(values, pipeline.lag.records_behind(position))
            lag_seconds.add_metric(values, pipeline.lag.seconds_behind(position, now_ms))
            if pipeline.lag.stable_end >= 0:
                stable.add_metric(values, pipeline.lag.stable_end)
        open_gaps = GaugeMetricFamily(
            "millrace_mirror_open_gaps", "Partitions stopped or about to skip at a gap", labels=["source"]
        )
        for source, count in gaps.items():
            open_gaps.add_metric([source], count)
        partitions = GaugeMetricFamily(
            "millrace_mirror_partitions", "Partitions of this worker", labels=["source", "state"]
        )
        for key, count in states.items():
            partitions.add_metric(list(key), count)
        yield from (lag_records, lag_seconds, stable, open_gaps, partitions)
