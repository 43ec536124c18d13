"""How far a mirror without positions has come, by what arrived: the pure part of `arrivals`."""

from __future__ import annotations

import numpy as np

from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.runs.arrivals import of_pinned, stream_passages
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.scanning.cells import Cell
from tests.cells import encode_bitmaps


def cell(
    cluster: str,
    sequences: list[int],
    first_offset: int,
    *,
    stream: str = "a" * 16,
    partition: int = 0,
    topic_id: str = "id-1",
    copies: int = 0,
    topic: str = "flights",
) -> Cell:
    ((base, bitmap),) = encode_bitmaps(np.array(sequences, np.uint64))
    count = len(sequences) + copies
    return Cell(
        tier=cluster,
        cluster=cluster,
        topic=topic,
        partition=partition,
        stream=stream,
        producer="AA@ewr",
        window_start_ms=0,
        chunk_start=0,
        count=count,
        byte_count=0,
        first_offset=first_offset,
        last_offset=first_offset + count - 1,
        base=base,
        bitmap=bitmap,
        topic_id=topic_id,
    )


def pin(cluster: str = "ewr", partition: int = 0, topic_id: str = "id-1") -> PartitionPin:
    return PartitionPin(cluster, "flights", "flights", partition, topic_id, 0, 100)


def passages(cells: list[Cell], *pins: PartitionPin) -> dict:
    streams = {each.stream for each in cells}
    found = [
        each
        for stream in streams
        for each in stream_passages((c for c in cells if c.stream == stream), ["ewr", "jfk"], "agg")
    ]
    return of_pinned(pins or [pin()], found)


def test_what_arrived_whole_proves_its_last_offset_and_a_part_its_first():
    upstream = [cell("ewr", [1, 2, 3], 0), cell("ewr", [4, 5, 6], 10)]
    assert passages([*upstream, cell("agg", [1, 2, 3], 0)]) == {("ewr", "flights", 0): Passage(3, "id-1")}
    assert passages([*upstream, cell("agg", [6], 0)]) == {("ewr", "flights", 0): Passage(10, "id-1")}


def test_nothing_arrived_is_in_flight_from_offset_0_and_says_so():
    assert passages([cell("ewr", [1, 2], 0)]) == {("ewr", "flights", 0): Passage(0, "id-1")}
    assert passages([], pin("jfk", 3)) == {("jfk", "flights", 3): Passage(0, "id-1")}


def test_one_streams_arrivals_pass_what_another_lost_before():
    lost = cell("ewr", [7, 8], 0, stream="b" * 16)
    later = [cell("ewr", [1, 2], 5), cell("agg", [1, 2], 0)]
    assert passages([lost, *later])["ewr", "flights", 0] == Passage(7, "id-1")


def test_arrivals_from_a_topic_that_was_made_anew_pass_nothing_of_the_new_one():
    old = [cell("ewr", list(range(1, 91)), 0, topic_id="id-0"), cell("agg", list(range(1, 91)), 0)]
    new = cell("ewr", [91, 92], 0)
    assert passages([*old, new]) == {("ewr", "flights", 0): Passage(0, "id-1")}
    assert passages([*old, new, cell("agg", [91], 95)])["ewr", "flights", 0] == Passage(0, "id-1")
    assert passages([*old, new, cell("agg", [91, 92], 95)])["ewr", "flights", 0] == Passage(2, "id-1")


def test_a_copy_proves_nothing_whichever_topic_or_partition_it_stands_in():
    copies = [cell("ewr", [1, 2], 0), cell("ewr", [1, 2], 50, partition=1), cell("agg", [1, 2], 0)]
    assert set(passages(copies, pin(), pin(partition=1)).values()) == {Passage(0, "id-1")}
    recreated = [cell("ewr", [1], 80, topic_id="id-0"), cell("ewr", [1], 40), cell("agg", [1], 0)]
    assert passages(recreated) == {("ewr", "flights", 0): Passage(0, "id-1")}


def test_a_cell_with_repeats_proves_its_first_offset_at_most():
    assert passages([cell("ewr", [1, 2], 4, copies=1), cell("agg", [1, 2], 0)]) == {
        ("ewr", "flights", 0): Passage(4, "id-1")
    }


def test_each_partition_and_cluster_for_itself_and_the_furthest_counts():
    cells = [
        cell("ewr", [1, 2], 0),
        cell("ewr", [3, 4], 20),
        cell("jfk", [1, 2], 70, stream="b" * 16),
        cell("agg", [1, 2, 3, 4], 0),
        cell("agg", [1, 2], 10, stream="b" * 16),
    ]
    assert passages(cells, pin(), pin(partition=1), pin("jfk")) == {
        ("ewr", "flights", 0): Passage(22, "id-1"),
        ("ewr", "flights", 1): Passage(0, "id-1"),
        ("jfk", "flights", 0): Passage(72, "id-1"),
    }


def test_a_cluster_without_topic_ids_is_believed_by_name():
    cells = [cell("ewr", [1, 2], 0, topic_id=""), cell("agg", [1, 2], 0, topic_id="")]
    assert passages(cells, pin(topic_id="")) == {("ewr", "flights", 0): Passage(2, "")}


def test_copies_in_another_topic_neither_hide_nor_pass_the_records():
    """Somebody writes the stream's records, headers and all, into another topic that is audited too."""
    upstream = [cell("ewr", [1, 2], 0), cell("ewr", [3], 2), cell("ewr", [1, 2, 3], 0, topic="hotels")]
    ahead = [cell("agg", [1, 2], 0), cell("agg", [1, 2, 3], 0, topic="hotels")]
    assert passages([*upstream, *ahead]) == {("ewr", "flights", 0): Passage(2, "id-1")}
