"""The two servers that every scenario runs against: Millrace, and Apache Kafka as the measure.

A test takes the fixture `server` (a `Subject`) or `bootstrap`, runs once for each, and expects the same of
both. Where the two are meant to differ, the test asks `server.outcome(id, kafka=…, millrace=…)` which value
to expect; `differences.py` lists those ids with their reasons, and `test_differences.py` checks that the list
and the uses are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from millrace.broker.config import SETTING_FIELDS
from tests.kafka_fixture import SAME_SETTINGS
from tests.wire.differences import DIFFERENCES

KAFKA = "kafka"
MILLRACE = "millrace"
SUBJECTS = (MILLRACE, KAFKA)

_ASKED = os.environ.get("MILLRACE_WIRE_SERVERS", "")
_CHOSEN = [name for name in _ASKED.split(",") if name] or list(SUBJECTS)
assert set(_CHOSEN) <= set(SUBJECTS), f"MILLRACE_WIRE_SERVERS: expected some of {', '.join(SUBJECTS)}"
_OF_KAFKA = [pytest.mark.kafka] if _ASKED else [pytest.mark.kafka, pytest.mark.long]
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.java, *(_OF_KAFKA if name == KAFKA else [])]) for name in _CHOSEN
]
"""Of a fixture that starts one of them: a test that takes it runs once for each."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Apart(Generic[Value]):
    """What each server is expected to do where the two differ for a documented reason."""

    difference: str
    kafka: Value
    millrace: Value

    def __post_init__(self) -> None:
        assert self.difference in DIFFERENCES, f"{self.difference} is not in tests/wire/differences.py"
        assert self.kafka != self.millrace, f"{self.difference} is no difference: take it off the list"


@dataclass(frozen=True)
class Subject:
    """A running server. `data` is the folder that holds a folder for each partition."""

    name: str
    bootstrap: str
    data: Path

    @property
    def port(self) -> int:
        return int(self.bootstrap.rpartition(":")[2])

    def outcome(self, difference: str, *, kafka: Value, millrace: Value) -> Value:
        """What this server is expected to do where the two differ for a documented reason."""
        apart = Apart(difference, kafka, millrace)
        return apart.kafka if self.name == KAFKA else apart.millrace


def millrace_settings() -> dict[str, object]:
    """The settings both servers share, as far as Millrace has them (`test_differences.py`: it has all)."""
    return {name: value for name, value in SAME_SETTINGS.items() if name in SETTING_FIELDS}
