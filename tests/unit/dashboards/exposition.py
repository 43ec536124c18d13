"""What a mirror's /metrics says when everything that can be counted was counted once."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.mirror.batches.rebatch import BatchPath
from millrace.mirror.config import parse_config
from millrace.mirror.control.metrics import MirrorMetrics
from millrace.mirror.control.wishes import throttle_record
from millrace.mirror.delivery.delivery import TransactionCounts
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.worker import Worker

PARTITION = SourcePartition("ewr", "flights", 0)
_LINE = re.compile(r"^(\w+)(?:\{| )", re.MULTILINE)


def counted() -> MirrorMetrics:
    """A worker's metrics: the worker is whole and has never run."""
    config = parse_config(
        {
            "name": "aggregate",
            "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
            "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
        }
    )
    clusters = {name: Cluster(name, ["127.0.0.1:1"]) for name in ("agg", "ewr")}
    worker = Worker(config, clusters["agg"], {"ewr": clusters["ewr"]}, lambda: 1_000)
    worker.owned[PARTITION] = _pipeline()
    worker.operators.wishes.apply(*throttle_record("ewr", 1_000_000, 1))
    sink = Sink(clusters["agg"], lambda: 1_000)
    sink.is_connected = True
    worker.delivery = SimpleNamespace(  # type: ignore[assignment]
        sinks=[sink], transactions=TransactionCounts, standing=tuple
    )
    metrics = worker.metrics
    metrics.count_batch(PARTITION, BatchPath.PASS_THROUGH, 1, 10, 1_000)
    metrics.count_delivered(PARTITION, 10, 1_000, "create", 0.02)
    metrics.count_gap(b"gap/1", "ewr", "expired")
    metrics.count_transaction(0.01, True)
    metrics.count_transaction(0.02, False)
    return metrics


def sample_text() -> str:
    return counted().text().decode()


def metric_names() -> set[str]:
    return set(_LINE.findall(sample_text()))


def _pipeline() -> Any:
    """Only what metrics look at."""
    from millrace.mirror.delivery.progress import PartitionProgress
    from millrace.mirror.pipeline import State
    from millrace.mirror.sources.lag import LagSamples

    lag = LagSamples()
    lag.sample(110, 1_000)
    return SimpleNamespace(
        partition=PARTITION,
        target=TargetPartition("flights", 0),
        gap=None,
        state=State.RUNNING,
        lag=lag,
        progress=PartitionProgress(100),
    )
