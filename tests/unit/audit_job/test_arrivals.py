"""How far a mirror without positions has come, by what arrived: the pure part of `arrivals`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.reconciliation.tier_reading import arrivals_of, passage_by_arrivals
from millrace.audit.runs.arrivals import of_pinned, stream_passages
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.scanning.cells import Cell
from millrace.audit.scanning.stream_cells import StreamCells
from tests.cells import encode_bitmaps, table_of


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
    tables = [table_of(c for c in cells if c.stream == stream) for stream in {c.stream for c in cells}]
    found = [each for own in tables for each in stream_passages(StreamCells(own), ["ewr", "jfk"], "agg")]
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


def any_cells(random: Random, count: int) -> list[Cell]:
    """One stream's, in all places and windows, of records that are copied, lost, moved and united."""
    found = []
    clusters, topics, ids = ("ewr", "jfk", "agg"), ("flights", "hotels"), ("id-1", "id-2")
    offsets = dict.fromkeys(itertools.product(clusters, topics, ids, (0, 1)), 0)
    high = random.choice([0, 1]) << 32
    for number in range(count):
        place = random.choice(list(offsets))
        cluster, topic, topic_id, partition = place
        near = range(3 * number, 3 * number + random.choice([1, 1, 4]))
        sequences = list(near) if random.random() < 0.7 else random.sample(range(3 * count), 2)
        told = cell(
            cluster,
            [high + 1 + each for each in sequences],
            offsets[place],
            partition=partition,
            topic_id=topic_id,
            topic=topic,
            copies=random.choice([0, 0, 0, 1]),
        )
        offsets[place] = told.last_offset + 1 + random.choice([0, 0, 5])
        told = replace(told, window_start_ms=random.choice([0, 0, 0, 60_000, 120_000]))
        if random.random() < 0.1:
            told = replace(told, partition=-1, first_offset=-1, last_offset=-1)
        found.append(told)
    arrived = [each for each in found if each.cluster != "agg" and random.random() < 0.5]
    return [*found, *(replace(each, cluster="agg", tier="agg") for each in arrived)]


def cell_by_cell(cells: list[Cell]) -> set[tuple]:
    """What `passage_by_arrivals` says, topics of one name and different ids apart."""
    told = set()
    for topic in ("flights", "hotels"):
        arrived = arrivals_of(each for each in cells if (each.cluster, each.topic) == ("agg", topic))
        upstream = [each for each in cells if each.cluster != "agg" and each.topic == topic]
        apart = [replace(each, topic=f"{topic}/{each.topic_id}") for each in upstream]
        for (cluster, place, partition), passage in passage_by_arrivals(apart, arrived).items():
            told.add((cluster, *place.split("/"), partition, passage.next_offset))
    return told


@pytest.mark.parametrize("seed", range(40))
def test_columns_say_what_looking_at_each_cell_says(seed: int):
    random = Random(seed)
    cells = any_cells(random, random.choice([3, 10, 40, 200]))
    found = list(stream_passages(StreamCells(table_of(cells)), ["ewr", "jfk"], "agg"))
    told = {(cluster, topic, id_, partition, at) for cluster, topic, partition, id_, at in found}
    assert told == cell_by_cell(cells), seed
    assert len(told) == len(found)
