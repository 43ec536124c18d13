"""Append times read by Arrow: the same as read row by row, whatever a tier is called."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.audit.report.append_times import timed_rows
from millrace.audit.report.latency import Latencies

TIERS = ["ewr+s1", "agg", 'group:a "b", 1', "größe/2", "}"]
UPSTREAMS = [{}, {"agg": ["ewr", "s1"], 'group:a "b", 1': ["agg"], "größe/2": ["ewr", "s1"], "ewr+s1": []}]
TIMES = st.tuples(st.integers(0, 2000), st.integers(0, 9)).map(lambda each: [each[0], each[0] + each[1]])


@st.composite
def details(draw):
    named = draw(st.lists(st.sampled_from(range(len(TIERS))), unique=True))
    told = {TIERS[number]: draw(TIMES) for number in sorted(named)}
    detail = {
        "reasons": draw(st.sampled_from([[], ['"append_ms":{ is no word of ours']])),
        "append_ms": told,
        "unpromised": draw(st.booleans()),
        "shared": draw(st.sampled_from([[], ["x"], [["y", 1]]])),
    }
    return {name: value for name, value in detail.items() if value}


def table_of(rows):
    columns = ("topic", "number", "detail")
    return pa.table(
        {name: [row[at] for row in rows] for at, name in enumerate(columns)},
        schema=pa.schema([("topic", pa.string()), ("number", pa.int64()), ("detail", pa.string())]),
    )


@pytest.mark.parametrize("upstreams", UPSTREAMS, ids=["unknown", "known"])
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), details()), max_size=30))
def test_they_are_what_each_row_says(upstreams, found):
    rows = [
        (topic, number, json.dumps(detail, separators=(",", ":")))
        for number, (topic, detail) in enumerate(found)
    ]
    one_by_one, together = Latencies(upstreams), Latencies(upstreams)
    for topic, detail in found:
        if "append_ms" in detail:
            one_by_one.add(topic, detail["append_ms"])
    read = {}
    for timed in timed_rows(table_of(rows), TIERS):
        together.add_rows(timed.rows["topic"], timed.first, timed.last)
        for at, number in enumerate(timed.rows["number"].to_pylist()):
            told = {
                tier: [timed.first[tier][at].as_py(), timed.last[tier][at].as_py()] for tier in timed.first
            }
            read[number] = (list(told.items()), timed.unpromised[at].as_py())
    assert together.told() == one_by_one.told()
    assert read == {
        number: (list(detail["append_ms"].items()), detail.get("unpromised", False))
        for number, (_, detail) in enumerate(found)
        if "append_ms" in detail
    }


def test_a_detail_may_be_long():
    long = {"reasons": ["x" * 9_000_000], "append_ms": {"agg": [1, 2]}}
    rows = [("a", number, json.dumps(long, separators=(",", ":"))) for number in range(2)]
    (timed,) = timed_rows(table_of(rows), TIERS)
    assert timed.last["agg"].to_pylist() == [2, 2]


def test_tiers_may_be_many():
    """Each group of consumers is one."""
    tiers = [f"t{number}" for number in range(200)]
    told = [{tier: [number, number] for tier in tiers[number:]} for number in range(0, 200, 3)] * 2
    rows = [("a", at, json.dumps({"append_ms": each}, separators=(",", ":"))) for at, each in enumerate(told)]
    read = {
        number: timed
        for timed in timed_rows(table_of(rows), tiers)
        for number in timed.rows["number"].to_pylist()
    }
    assert {number: list(timed.first) for number, timed in read.items()} == {
        number: list(each) for number, each in enumerate(told)
    }
    assert len({id(timed) for timed in read.values()}) == len(told) // 2
