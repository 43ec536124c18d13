"""Log lines and their rate."""

from __future__ import annotations

import io
import json

import pytest
import structlog

from millrace.broker.telemetry.logs import RateLimit, configure


def logged(log_format: str, folder: str = "a b") -> str:
    stream = io.StringIO()
    configure(log_format, stream=stream)
    try:
        structlog.get_logger("millrace.test").info("broker started", id=1, folder=folder)
    finally:
        configure()
    return stream.getvalue()


def test_human_line_is_one_line_with_quoted_spaces() -> None:
    line = logged("human")
    assert line.count("\n") == 1
    assert line.endswith('Z INFO    broker started  id=1 folder="a b"\n')


@pytest.mark.parametrize("end", ["\n", "\r", "\v", "\x1b[1A", "\x85", "\u2028", "\u202e", "\udc80"])
def test_what_a_client_has_chosen_makes_no_line_of_its_own(end: str) -> None:
    """Blanks that are not spaces, too: a forged line needs no quotes then."""
    line = logged("human", folder=f"a{end}2026-11-25T03:00:00.000Z\tERROR\u00a0lost")
    assert len(line.splitlines()) == 1 and line[:-1].isprintable()
    assert json.loads(line.partition("folder=")[2]).startswith(f"a{end}")


def test_json_line_holds_every_field() -> None:
    entry = json.loads(logged("json"))
    assert (entry["event"], entry["level"], entry["id"], entry["folder"]) == (
        "broker started",
        "info",
        1,
        "a b",
    )


def test_rate_limit_counts_what_it_holds_back() -> None:
    now = 0.0
    limit = RateLimit(lambda: now, interval_seconds=10)
    assert [limit.take("a"), limit.take("a"), limit.take("a"), limit.take("b")] == [0, None, None, 0]
    now = 10.0
    assert [limit.take("a"), limit.take("a")] == [2, None]
