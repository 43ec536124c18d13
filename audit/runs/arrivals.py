"""How far a mirror has come that keeps no positions: told by what arrived downstream, counted in Spark.

Called by `RunCells` before a run reconciles, once for each aggregate that a foreign mirror fills
(`mirror: foreign`, for instance MirrorMaker 2). Such a mirror tells nobody how far it is, but it keeps the
order within a partition: when a record of a source partition is seen in the aggregate, the mirror has passed
every offset before it. What one stream's arrivals tell of a partition holds for all streams in it, so the
lost tail of one producer shows as soon as a later record of another has arrived; hence this step of its own,
over all streams, before they are reconciled one by one.

What must stay true:

- the rule itself is `passage_by_arrivals`, by columns (`furthest_arrivals`): a cell of which all arrived
  proves its last offset, one of which some arrived its first, and what stands at several offsets proves
  nothing;
- only the topic that the partition has now is spoken of: in one that was deleted and made anew, offsets begin
  again, and an arrival from the old one has passed nothing of the new;
- a partition from which nothing arrived is named with offset 0: all of it is in flight. Lag is never a loss.

Several mirrors into one aggregate cannot be told apart by arrivals, as in `reading_plan.passages`. What is
missing at the very end of a partition stays IN FLIGHT until a later record arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.functions import col
from pyspark.sql.functions import max as greatest

from millrace.audit.config import audited_topic
from millrace.audit.reconciliation.reconcile import ClusterPartition, Passage
from millrace.audit.runs.partition_pins import PartitionPin

if TYPE_CHECKING:  # compiled loops, which only who looks at cells needs
    from millrace.audit.scanning.furthest_arrivals import FoundPassage
    from millrace.audit.scanning.stream_cells import StreamCells

_DDL = "cluster string, topic string, partition int, topic_id string, next_offset bigint"
_SCHEMA = pa.schema(
    [
        ("cluster", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("topic_id", pa.string()),
        ("next_offset", pa.int64()),
    ]
)


def arrival_passages(
    cells: DataFrame, pins: Iterable[PartitionPin], sources: Collection[str], aggregate: str
) -> dict[ClusterPartition, Passage]:
    """{place: how far it was carried into `aggregate`}, one for each pinned partition of `sources`.

    `cells` are the rows of all streams, without notes, kept and new. One Spark action; what comes to the
    driver is one row for each source partition and topic id.
    """
    clusters = sorted(sources)

    def rows_of(table: pa.Table) -> pa.Table:
        from millrace.audit.scanning.stream_cells import StreamCells

        found = list(stream_passages(StreamCells(table), clusters, aggregate))
        columns = zip(*found, strict=True) if found else ([] for _ in _SCHEMA)
        return pa.table([list(column) for column in columns], schema=_SCHEMA)

    found = (
        cells.filter(col("cluster").isin([*clusters, aggregate]))
        .groupBy("stream")
        .applyInArrow(rows_of, _DDL)
        .groupBy("cluster", "topic", "partition", "topic_id")
        .agg(greatest("next_offset").alias("next_offset"))
        .toArrow()
    )
    told = ((row["cluster"], row["topic"], row["partition"], row["topic_id"], row["next_offset"])
            for row in found.to_pylist())  # fmt: skip
    return of_pinned((pin for pin in pins if pin.cluster in sources), told)


def stream_passages(cells: StreamCells, sources: Collection[str], aggregate: str) -> Iterator[FoundPassage]:
    """What one stream's arrivals tell. Topics of one name and different ids are kept apart, and topics of
    different names: one may hold copies of the other's records. Pure."""
    from millrace.audit.scanning.furthest_arrivals import furthest_arrivals

    for topic in sorted({audited_topic(place) for _, place in cells.places}):
        together = cells.of_topic(topic)
        yield from furthest_arrivals(together.of_clusters(list(sources)), together.of_clusters([aggregate]))


def of_pinned(pins: Iterable[PartitionPin], found: Iterable[FoundPassage]) -> dict[ClusterPartition, Passage]:
    """The furthest of each pinned partition; another topic's id tells nothing of it. Pure."""
    passages = {(pin.cluster, pin.topic, pin.partition): Passage(0, pin.topic_id) for pin in pins}
    for cluster, topic, partition, topic_id, next_offset in found:
        known = passages.get((cluster, topic, partition))
        if known is None or (known.topic_id and topic_id and known.topic_id != topic_id):
            continue
        if next_offset > known.next_offset:
            passages[cluster, topic, partition] = Passage(next_offset, known.topic_id)
    return passages
