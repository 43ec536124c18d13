"""Options of `spark.read.format("millrace")`: a wrong one is one line, and never shows a secret."""

from __future__ import annotations

import json
import pickle

import pytest

from millrace.audit.spark.spark_source import MillraceReader, ReadTask, parse_options
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.errors import ConfigError

GOOD = {"bootstrap": "a:1,b:2", "topics": "x, y"}
RANGE = {
    "cluster": "ewr",
    "tier": "ewr",
    "topic": "x",
    "topic_here": "ewr.x",
    "partition": 0,
    "first_offset": 5,
    "end_offset": 9,
}
PINNED = {"bootstraps": json.dumps({"ewr": ["a:1"]}), "ranges": json.dumps([RANGE])}


def test_defaults_and_values():
    read = parse_options(GOOD)
    assert (read.mode, read.tier, read.window_ms, read.tasks, read.digest) == (
        "cells",
        "cluster",
        60_000,
        4,
        False,
    )
    assert read.bootstraps == {"cluster": ["a:1", "b:2"]} and read.topics == ("x", "y")
    given = {**GOOD, "Mode": "records", "cluster": "ewr", "tier": "source", "window": "5m", "tasks": "9"}
    read = parse_options({**given, "digest": "TRUE", "chunk_offsets": "10", "fetch_max_bytes": "4096"})
    assert (read.mode, read.tier, read.window_ms, read.tasks) == ("records", "source", 300_000, 9)
    assert (read.digest, read.chunk_offsets, read.fetch_max_bytes) == (True, 10, 4096)
    assert parse_options(PINNED).ranges == (OffsetRange(**RANGE),)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bootstrap": "a:1"}, "option topics: got None, expected a value: it is required"),
        ({"topics": "x"}, "option bootstrap: got None, expected a value: it is required"),
        ({**GOOD, "bootstrap": "a"}, "option bootstrap: got 'a', expected host:port"),
        ({**GOOD, "topics": " , "}, "option topics: got ' , ', expected topics with commas"),
        ({**GOOD, "topics": "x,x"}, "option topics: got 'x,x', expected topics with commas, each once"),
        ({**GOOD, "mode": "rows"}, "option mode: got 'rows', expected cells or records"),
        ({**GOOD, "window": "0s"}, "option window: got '0s', expected a duration"),
        ({**GOOD, "window": "soon"}, "option window: got 'soon', expected a duration"),
        ({**GOOD, "tasks": "0"}, "option tasks: got '0', expected a whole number from 1"),
        ({**GOOD, "tasks": "-3"}, "option tasks: got '-3', expected a whole number from 1"),
        ({**GOOD, "tasks": "³"}, "option tasks: got '³', expected a whole number from 1"),
        ({**GOOD, "chunk_offsets": "1e3"}, "option chunk_offsets: got '1e3', expected a whole number"),
        (
            {**GOOD, "fetch_max_bytes": "10"},
            "option fetch_max_bytes: got '10', expected a whole number from 1024",
        ),
        ({**GOOD, "digest": "yes"}, "option digest: got 'yes', expected true or false"),
        ({**GOOD, "topic": "x"}, "option: got 'topic', expected one of mode, bootstrap"),
        ({**PINNED, "topics": "x"}, "option topics: got 'x', expected no value beside ranges"),
        ({"ranges": PINNED["ranges"]}, "option bootstraps: got '', expected a JSON object"),
        ({**PINNED, "ranges": "{}"}, "option ranges: got '{}', expected a JSON list"),
        ({**PINNED, "ranges": "[{}]"}, "option ranges[0]: got '{}', expected the fields of an offset range"),
        ({**PINNED, "ranges": "[7]"}, "option ranges[0]: got '7', expected the fields of an offset range"),
        (
            {**PINNED, "ranges": json.dumps([{**RANGE, "end_offset": 1}])},
            "expected partition, first_offset <= end_offset, from 0",
        ),
        (
            {**PINNED, "ranges": json.dumps([RANGE, {**RANGE, "cluster": "jfk"}])},
            "option ranges[1].cluster: got 'jfk', expected one of bootstraps (ewr)",
        ),
        ({**PINNED, "bootstraps": '{"ewr": "a:1"}'}, "option bootstraps, ewr: got 'a:1', expected a list"),
        ({**PINNED, "bootstraps": '{"ewr": ["a"]}'}, "option bootstraps: got 'a', expected host:port"),
        ({**GOOD, "securities": '{"ewr": {}}'}, "option securities: got 'ewr', expected a section for each"),
        ({**GOOD, "securities": '{"cluster": 1}'}, "option securities: got 'cluster', expected a section"),
    ],
)
def test_a_wrong_value_is_one_line(given, said):
    with pytest.raises(ConfigError) as problem:
        parse_options(given)
    assert said in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "given",
    [
        {**GOOD, "securities": '{"cluster": {"sasl": {"password": "hunter2"}}'},
        {**GOOD, "sasl.password": "hunter2"},
        {**GOOD, "kafka.sasl.jaas.config": 'password="hunter2"'},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(given):
    with pytest.raises(ConfigError) as problem:
        parse_options(given)
    assert "hunter2" not in str(problem.value) and "hunter2" not in repr(problem.value)


def test_what_travels_to_the_workers_pickles():
    given = {**PINNED, "tasks": "1", "securities": '{"ewr": {"protocol": "SSL"}}'}
    reader = MillraceReader(parse_options(given))
    again = pickle.loads(pickle.dumps(reader))
    (task,) = again.partitions()
    assert isinstance(task, ReadTask) and pickle.loads(pickle.dumps(task)) == task
    assert task.ranges == (OffsetRange(**RANGE),)


def test_an_empty_read_still_has_a_task():
    empty = parse_options({**PINNED, "ranges": "[]"})
    assert MillraceReader(empty).partitions() == [ReadTask(())]
