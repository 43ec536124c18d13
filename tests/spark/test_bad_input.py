"""What must not be believed, through the whole job: counted, shown, status 2, and never PROVEN.

Each case spoils a world that is proven without it (the first test). The rules have unit tests of their own
(`test_hostile_events`, `test_counting`, `test_traps`); here the way from a broker's bytes to the exit status,
the summary, the console and the page is walked.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.audit import job
from millrace.audit.config import parse_config
from millrace.audit.contract.events import encode_event
from millrace.audit.contract.header import encode_prefix
from millrace.audit.report.console import console_lines
from tests.spark.conftest import DAY_MS, NOW_MS, START_MS, MockCluster, Stream, World

pytestmark = pytest.mark.java
STREAM = "00000000000000aa"
BOTH = ("ewr", "agg")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A source and an aggregate, each case's own."""
    clusters = {"ewr": MockCluster("lz4"), "agg": MockCluster("zstd")}
    config = {
        "clusters": {
            name: {"bootstrap": [each.bootstrap], "tier": "aggregate" if name == "agg" else "source"}
            for name, each in clusters.items()
        },
        "topics": ["flights"],
        "window": "1d",
        "grace": "1s",
        "state": str(tmp_path / "state"),
        "report": str(tmp_path / "report"),
    }
    return World(clusters, parse_config(config))


def sent(world: World, *, without: tuple[int, ...] = ()) -> Stream:
    """40 records in four windows, acknowledged and carried; those `without` were lost on the way out."""
    stream = Stream("ewr", "UA@ewr", STREAM)
    for sequence in range(1, 41):
        world.send(stream, [sequence], reaches_source=sequence not in without)
    world.report(stream)
    world.carry(stream, lose=without)
    world.position("ewr", 1000)
    return stream


def put(world: World, content: bytes, created_ms: int = START_MS) -> None:
    for name in BOTH:
        headers = [("_mr", content)]
        world.clusters[name].produce("flights", b"strange", headers=headers, timestamp=created_ms)


def put_named(world: World, sequence: int, name: bytes) -> None:
    created_ms = world.created_ms(sequence)
    put(world, encode_prefix(STREAM) + ((sequence << 48) | created_ms).to_bytes(14, "big") + name, created_ms)


def count_event(world: World, **changes: Any) -> None:
    """Another report of the stream's first window."""
    stream = Stream("ewr", "UA@ewr", STREAM)
    key, value = encode_event(world.count_event(stream, START_MS, list(range(1, 11)), report=2))
    spoilt = json.dumps({**json.loads(value), **changes}).encode()
    world.clusters["ewr"].produce("millrace.audit", spoilt, key=key.encode() if isinstance(key, str) else key)


def header_cut_short(world: World) -> None:
    sent(world)
    put(world, b"\x01" + b"\0" * 8)


def header_of_a_future_version(world: World) -> None:
    sent(world)
    world.clusters["agg"].produce("flights", b"strange", headers=[("_mr", b"\x09" * 30)])


def event_that_is_not_json(world: World) -> None:
    sent(world)
    world.clusters["ewr"].produce("millrace.audit", b"not json", key=f"count/{STREAM}/0".encode())


def ranges(acknowledged: list[list[int]]) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        sent(world)
        count_event(world, acknowledged=acknowledged)

    return spoil


def name_in_place_of_a_lost_record(name: bytes) -> Callable[[World], None]:
    """Record 5 was acknowledged and lost; another with its stream and number stands in both clusters."""

    def spoil(world: World) -> None:
        sent(world, without=(5,))
        put_named(world, 5, name)

    return spoil


def name_in_an_event(name: str) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        sent(world)
        count_event(world, producer=name)

    return spoil


def other_name_in_a_window_of_its_own(world: World) -> None:
    """Every cell has one name; that of the last window is not the one that the reports tell."""
    stream = Stream("ewr", "UA@ewr", STREAM)
    world.send(stream, range(1, 31))
    other = dataclasses.replace(stream, producer="ZZ@lga", sent=[])
    world.send(other, range(31, 41))
    world.carry(stream)
    world.carry(other)
    stream.sent += other.sent
    world.report(stream)
    world.position("ewr", 1000)


def two_producers_in_the_events(world: World) -> None:
    stream = sent(world)
    other = dataclasses.replace(stream, producer="ZZ@lga", sent=[])
    world.send(other, range(41, 51))
    world.report(other, report=9)
    world.carry(other)


def window_length_changes(world: World) -> None:
    sent(world)
    count_event(world, window_ms=DAY_MS // 2, report=3)


SHORT = "header cut short or impossible"
EVENT = f"event 'count/{STREAM}/{START_MS}'"
UNSHOWN = "producer name that cannot be shown"
# (what spoils the world, what the report counts as not to be trusted, why the stream's rows are not proven)
CASES: dict[str, tuple[Callable[[World], None], str, str]] = {
    "header cut short": (header_cut_short, SHORT, ""),
    "header of a future version": (
        header_of_a_future_version,
        "header of an unknown version, in agg, topic flights",
        "",
    ),
    "event that is not JSON": (
        event_that_is_not_json,
        f"not JSON: event 'count/{STREAM}/0' in cluster ewr",
        "",
    ),
    "last before first": (ranges([[10, 1]]), EVENT, ""),
    "negative": (ranges([[-1, 8]]), EVENT, ""),
    "beyond 63 bits": (ranges([[1, 2**63]]), EVENT, ""),
    "name of 10 KB in a header": (name_in_place_of_a_lost_record(b"n" * 10_240), UNSHOWN, UNSHOWN),
    "control characters in a header": (name_in_place_of_a_lost_record(b"a\x1b[31m\0b"), UNSHOWN, UNSHOWN),
    "name of 10 KB in an event": (name_in_an_event("n" * 10_240), EVENT, ""),
    "control characters in an event": (name_in_an_event("a\x1b[31m"), EVENT, ""),
    "another producer's header": (
        name_in_place_of_a_lost_record(b"ZZ@lga"),
        "two producers use one stream id: UA@ewr and ZZ@lga",
        "record headers name ZZ@lga",
    ),
    "another producer's window": (
        other_name_in_a_window_of_its_own,
        "two producers use one stream id: it is known as UA@ewr, record headers name ZZ@lga",
        "record headers name ZZ@lga",
    ),
    "two producers in the events": (
        two_producers_in_the_events,
        "two producers use one stream id",
        "two producers use one stream id",
    ),
    "window length changes": (
        window_length_changes,
        "the length of the windows changed under way",
        "the length of the windows changed under way",
    ),
}
OF_THE_GATE = {
    "header cut short",
    "header of a future version",
    "event that is not JSON",
    "negative",
    "name of 10 KB in a header",
    "another producer's header",
    "window length changes",
}
"""One of each way to be told; the others are in `tests/unit/audit/test_hostile_events.py`, too."""


def audit(world: World) -> job.JobResult:
    world.flush()
    return job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS)


def test_without_anything_bad_it_is_proven(spark, world):
    sent(world)
    result = audit(world)
    assert (result.exit_status, result.problem) == (0, "") and result.summary is not None
    assert (result.summary["verdict"], result.summary["untrusted"]) == ("PROVEN", [])


@pytest.mark.parametrize(
    "case", [case if case in OF_THE_GATE else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_bad_input_is_counted_and_shown_and_never_proven(spark, world, case):
    spoil, counted, reason = CASES[case]
    spoil(world)
    result = audit(world)
    summary = result.summary
    assert (result.exit_status, result.problem) == (2, "") and summary is not None
    assert summary["verdict"] == "UNKNOWN" and summary["counts"]["missing"] == 0
    told = [each["what"] for each in summary["untrusted"]]
    assert any(counted in what for what in told), told
    assert all(each["count"] > 0 for each in summary["untrusted"])
    if reason:
        assert any(reason in each["reason"] for each in summary["reasons"]), summary["reasons"]
        assert "PROVEN" not in summary["windows"]
    lines = list(console_lines(summary, str(world.config.report / "index.html"), "audit.yaml", 2))
    assert any("trusted" in line for line in lines), lines
    page = (world.config.report / "index.html").read_text("utf-8")
    (section,) = re.findall(r'<section id="untrusted">(.*?)</section>', page, re.DOTALL)
    for shown in (html.unescape(section), "\n".join(line for line in lines if "not trusted" in line)):
        assert counted in shown, shown
    for shown in ("\n".join(lines).replace("\n", ""), page.replace("\n", "")):
        assert "\x1b" not in shown and "\0" not in shown and "n" * 500 not in shown
