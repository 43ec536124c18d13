"""Which of two runs' words stays in a watermark's znode."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.runs.watermark_znode import _put

DAY_MS = 86_400_000


class Held:
    """A client of a ZooKeeper with one znode."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def get_async(self, path: str) -> Any:
        return SimpleNamespace(get=lambda timeout: (self.content, SimpleNamespace(version=1)))

    def set_async(self, path: str, content: bytes, version: int) -> Any:
        def get(timeout: float) -> None:
            self.content = content

        return SimpleNamespace(get=get)


def told(run: int, at_ms: int, watermark_ms: int) -> dict[str, Any]:
    return {"version": 1, "watermark_ms": watermark_ms, "at": iso_time(at_ms), "run": run}


@pytest.mark.parametrize(
    ("run", "at_ms", "stays"),
    [
        pytest.param(499, 5 * DAY_MS - 500, False, id="an earlier run that took longer"),
        pytest.param(500, 5 * DAY_MS - 500, False, id="one at the same time that looked before"),
        pytest.param(500, 5 * DAY_MS + 500, True, id="one at the same time that looked after"),
        pytest.param(501, 6 * DAY_MS, True, id="the next run"),
        pytest.param(501, 5 * DAY_MS - 1, True, id="the next run, of a host whose clock is behind"),
        pytest.param(1, 6 * DAY_MS, True, id="the first run of a new state"),
    ],
)
def test_only_a_run_that_is_later_by_number_and_time_has_the_last_word(run, at_ms, stays):
    client: Any = Held(json.dumps(told(500, 5 * DAY_MS, 3 * DAY_MS)).encode())
    assert _put(client, "/x", told(run, at_ms, DAY_MS), 1.0) is stays
    assert json.loads(client.content)["run"] == (run if stays else 500)
