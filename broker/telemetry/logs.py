"""Log lines: one line an event, to stderr, for people by default and as JSON on request.

    2013-01-01T10:00:00.123Z INFO  broker started  id=1 listen=127.0.0.1:9092

Every process calls `configure` once; modules take `structlog.get_logger("millrace.<part>")`. `RateLimit`
keeps a misbehaving peer from filling the disk: it lets one line through an interval and counts the rest.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog

EventDict = MutableMapping[str, Any]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(log_format: str = "human", level: str = "info", stream: TextIO | None = None) -> None:
    """Set up logging for this process. `log_format` is "human" or "json"."""
    render = _json_line if log_format == "json" else _human_line
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def _human_line(_logger: object, _method: str, event: EventDict) -> str:
    at = str(event.pop("timestamp", ""))
    level = str(event.pop("level", "info")).upper()
    message = str(event.pop("event", ""))
    trace = event.pop("exception", None)
    fields = " ".join(f"{key}={_human_value(value)}" for key, value in event.items())
    line = f"{at[:23]}Z {level:<7} {message}"
    line = f"{line}  {fields}" if fields else line
    return f"{line}\n{trace}" if trace else line


def _human_value(value: object) -> str:
    """Much of it comes from clients: nothing that they chose may end the line, or look like another field."""
    text = str(value)
    if not text.isprintable():
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _json_line(_logger: object, _method: str, event: EventDict) -> str:
    return json.dumps(event, default=str, ensure_ascii=False)


class RateLimit:
    """Lets one event of a kind through in every interval and counts what it held back.

    `clock` returns seconds and never goes back (the event loop's `time`).
    """

    def __init__(self, clock: Callable[[], float], interval_seconds: float = 10.0) -> None:
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._last: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def take(self, kind: str) -> int | None:
        """None to stay silent; otherwise how many were held back since the last one let through."""
        now = self._clock()
        last = self._last.get(kind)
        if last is not None and now - last < self._interval_seconds:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return None
        self._last[kind] = now
        return self._held_back.pop(kind, 0)
