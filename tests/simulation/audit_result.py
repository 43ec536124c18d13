"""What one run of the simulated audit said, for who checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.audit.reconciliation.verdicts import WindowVerdict


@dataclass
class Result:
    """What one run said."""

    rows: list[WindowVerdict]
    watermarks: dict[str, int | None]
    now_ms: int
    untrusted: dict[str, int]
    exit_status: int
    summary: Mapping[str, Any]
    since_ms: int | None
    made_ms: dict[tuple[str, str, int | None, str], int | None]
    """{(topic, stream, window, producer): when the verdict was made}"""
    pruned: list[tuple[str, int]]
    """(stream, window) whose evidence the run let go"""
