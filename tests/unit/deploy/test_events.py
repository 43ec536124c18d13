"""What is replayed: the flights as they were, and files of users with all their faults."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from millrace.deploy.demo.events import DAY_MS, SECOND_MS, Events, EventSource, Feed, InputUnusable

CSV = "datacenter,producer,n,when\nBerlin,a,1,2024-05-01T00:00:02Z\nOslo,b,2,2024-05-01T00:00:01Z\n"


def values_of(events: Events, feed: Feed) -> list[dict[str, object]]:
    return [json.loads(value) for value in events.values.take(events.feeds[feed])]


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return str(path)


def test_flights_are_all_there_by_airport_and_carrier() -> None:
    events = EventSource().load()
    assert events.count == 336_776
    assert events.datacenters == ["ewr", "jfk", "lga"]
    counts = [sum(len(events.feeds[feed]) for feed in events.feeds_of(name)) for name in events.datacenters]
    assert counts == [120_835, 111_279, 104_662]
    assert len({feed.producer.split("@")[0] for feed in events.feeds}) == 16
    assert (events.topic, events.window_ms) == ("flights", DAY_MS)


def test_first_flight_is_created_at_its_scheduled_departure_in_new_york() -> None:
    events = EventSource().load()
    assert events.created_ms is not None
    (value,) = events.values.take(np.array([0]))
    row = json.loads(value)
    assert (row["carrier"], row["flight"], row["origin"], row["sched_dep_time"]) == ("UA", 1545, "EWR", 515)
    # 5:15 in New York on 1 January is 10:15 UTC.
    assert events.created_ms[0] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC).timestamp() * 1000
    july = events.count - 1 - int(np.argmax(events.created_ms[::-1] == _ms(2013, 7, 4, 9)))
    (value,) = events.values.take(np.array([july]))
    # 5:00 in New York on 4 July is 9:00 UTC.
    assert (json.loads(value)["month"], json.loads(value)["sched_dep_time"]) == (7, 500)


def _ms(year: int, month: int, day: int, hour: int) -> int:
    return int(datetime(year, month, day, hour, tzinfo=UTC).timestamp() * 1000)


def test_missing_figures_are_null_in_the_event() -> None:
    events = EventSource().load()
    cancelled = [value for value in events.values.take(np.arange(1000)) if b'"dep_time":null' in value]
    assert len(cancelled) == 4


def test_every_feed_is_in_the_order_of_creation() -> None:
    events = EventSource().load()
    assert events.created_ms is not None
    for rows in events.feeds.values():
        assert (np.diff(events.created_ms[rows]) >= 0).all()


def test_csv_without_times_keeps_the_order_of_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "my events.csv", "datacenter,producer,n\nX 1,a,1\nX 1,a,2\nY,a,3\n")
    events = EventSource(path=path).load()
    assert events.topic == "my-events"
    assert list(events.feeds) == [Feed("x-1", "a"), Feed("y", "a")]
    assert [row["n"] for row in values_of(events, Feed("x-1", "a"))] == [1, 2]
    assert events.created_ms is None
    assert events.window_ms == SECOND_MS


def test_csv_with_times_is_ordered_by_them(tmp_path: Path) -> None:
    path = write(tmp_path / "e.csv", CSV.replace("Oslo,b", "Berlin,a"))
    events = EventSource(path=path, time_column="when").load()
    assert [row["n"] for row in values_of(events, Feed("berlin", "a"))] == [2, 1]


def test_jsonl_is_sent_as_its_lines_stand(tmp_path: Path) -> None:
    line = '{ "dc": "A", "who": 7, "nested": {"k": [1]} }'
    path = write(tmp_path / "e.jsonl", f"{line}\n\n")
    events = EventSource(path=path, datacenter_column="dc", producer_column="who", topic="t").load()
    assert list(events.feeds) == [Feed("a", "7")]
    assert list(events.values.take(np.array([0]))) == [line.encode()]


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("e.csv", CSV, {"datacenter_column": "site"}, "no column 'site': name one with --datacenter-column"),
        ("e.csv", CSV, {"producer_column": "p"}, r"no column 'p'.*\(it has datacenter, producer, n, when\)"),
        ("e.csv", CSV, {"time_column": "n"}, "column 'n' holds no times"),
        ("e.csv", "datacenter,producer\nA,b\n,b\n", {}, "event 2 has no datacenter"),
        ("e.csv", "datacenter,producer\nA,b,c\n", {}, "not a CSV file with a header line"),
        ("e.csv", "datacenter,producer\n", {}, "holds no events"),
        ("e.csv", "", {}, "not a CSV file"),
        ("e.jsonl", '{"datacenter": "A", "producer": "b"}\nnot json\n', {}, "line 2 is not JSON"),
        ("e.jsonl", "[1]\n", {}, "line 1 is not a JSON object"),
        ("e.jsonl", '{"datacenter": "A"}\n', {}, "no column 'producer'"),
        ("e.jsonl", '{"datacenter": "A", "producer": null}\n', {}, "event 1 has no producer"),
        ("e.jsonl", "", {}, "holds no events"),
        ("e.csv", "datacenter,producer,n,n\nA,b,1,2\n", {}, "has 2 columns of the name 'n'"),
        ("e.csv", "datacenter,producer,n\nA,b,\udcff\n", {}, "column 'n' holds a text that is not UTF-8"),
        ("e.csv", "datacenter,producer,\udcff\nA,b,1\n", {}, "header line is not UTF-8"),
        ("e.jsonl", "[" * 100_000, {}, "line 1 is not JSON"),
        ("e.jsonl", '{"datacenter": "A", "producer": "\\ud800"}', {}, "a lone surrogate"),
    ],
)
def test_unusable_file_is_refused_in_one_line(
    name: str, text: str, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(InputUnusable, match=words) as caught:
        EventSource(path=path, **options).load()
    assert path in str(caught.value)


@pytest.mark.parametrize("name", ["none.csv", "none.jsonl", "."])
def test_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputUnusable, match="cannot read"):
        EventSource(path=str(tmp_path / name)).load()


def test_too_many_datacenters_are_refused(tmp_path: Path) -> None:
    lines = "".join(f"{name},p\n" for name in "abcdefg")
    path = write(tmp_path / "e.csv", f"datacenter,producer\n{lines}")
    with pytest.raises(InputUnusable, match="more than 6 datacenters"):
        EventSource(path=path).load()


@pytest.mark.parametrize("name", ["heartbeats", "orders.heartbeats", "__orders", "_schemas"])
def test_topic_that_the_mirror_never_carries_is_refused_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"{name}.csv", CSV)
    with pytest.raises(
        InputUnusable, match=f"topic {name} is never mirrored .*: choose another with --topic"
    ):
        EventSource(path=path).load()
    assert EventSource(path=path, topic="orders").load().topic == "orders"
    with pytest.raises(InputUnusable, match="is never mirrored"):
        EventSource(topic=name).load()
