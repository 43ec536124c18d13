"""Options of a pinned read, which the job makes: a wrong one is one line, and never shows a secret."""

from __future__ import annotations

import json

import pytest

from millrace.audit.spark.read_options import parse_options
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.errors import ConfigError

RANGE = {
    "cluster": "ewr",
    "tier": "ewr",
    "topic": "x",
    "topic_here": "ewr.x",
    "partition": 0,
    "first_offset": 5,
    "end_offset": 9,
}
PINNED = {"bootstraps": json.dumps({"ewr": ["a:1", "b:2"]}), "ranges": json.dumps([RANGE])}


def test_defaults_and_values():
    read = parse_options(PINNED)
    assert (read.mode, read.window_ms, read.tasks, read.digest) == ("cells", 60_000, 4, False)
    assert read.bootstraps == {"ewr": ["a:1", "b:2"]} and read.ranges == (OffsetRange(**RANGE),)
    assert read.read_committed and read.fail_on_loss
    read = parse_options({**PINNED, "Window": "5m", "tasks": "9", "digest": "TRUE", "chunk_offsets": "10"})
    assert (read.window_ms, read.tasks, read.digest, read.chunk_offsets) == (300_000, 9, True, 10)
    assert parse_options({**PINNED, "fetch_max_bytes": "4096"}).fetch_max_bytes == 4096


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**PINNED, "window": "0s"}, "option window: got '0s', expected a duration"),
        ({**PINNED, "window": "soon"}, "option window: got 'soon', expected a duration"),
        ({**PINNED, "tasks": "0"}, "option tasks: got '0', expected a whole number from 1"),
        ({**PINNED, "tasks": "-3"}, "option tasks: got '-3', expected a whole number from 1"),
        ({**PINNED, "tasks": "³"}, "option tasks: got '³', expected a whole number from 1"),
        ({**PINNED, "chunk_offsets": "1e3"}, "option chunk_offsets: got '1e3', expected a whole number"),
        (
            {**PINNED, "fetch_max_bytes": "10"},
            "option fetch_max_bytes: got '10', expected a whole number from 1024",
        ),
        ({**PINNED, "digest": "yes"}, "option digest: got 'yes', expected true or false"),
        ({**PINNED, "topics": "x"}, "option: got 'topics', expected one of ranges"),
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
        (
            {**PINNED, "securities": '{"jfk": {}}'},
            "option securities: got 'jfk', expected a section for",
        ),
        ({**PINNED, "securities": '{"ewr": 1}'}, "option securities: got 'ewr', expected a section"),
    ],
)
def test_a_wrong_value_is_one_line(given, said):
    with pytest.raises(ConfigError) as problem:
        parse_options(given)
    assert said in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "given",
    [
        {**PINNED, "securities": '{"ewr": {"sasl": {"password": "hunter2"}}'},
        {**PINNED, "sasl.password": "hunter2"},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(given):
    with pytest.raises(ConfigError) as problem:
        parse_options(given)
    assert "hunter2" not in str(problem.value) and "hunter2" not in repr(problem.value)
