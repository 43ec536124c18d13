"""Log lines and their rate."""

from __future__ import annotations

import io
import json

import structlog

from millrace.broker.telemetry.logs import RateLimit, configure


def logged(log_format: str) -> str:
    stream = io.StringIO()
    configure(log_format, stream=stream)
    try:
        structlog.get_logger("millrace.test").info("broker started", id=1, folder="a b")
    finally:
        configure()
    return stream.getvalue()


def test_human_line_is_one_line_with_quoted_spaces() -> None:
    line = logged("human")
    assert line.count("\n") == 1
    assert line.endswith('Z INFO    broker started  id=1 folder="a b"\n')


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
