"""What several of these tests need."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE_S = 30


class Overslept(BaseException):
    """Something waits for itself."""


@pytest.fixture
def waking() -> Iterator[None]:
    """A call that waits for ever ends as a failure, not as a hang."""

    def wake(signum: int, frame: Any) -> None:
        raise Overslept

    before = signal.signal(signal.SIGALRM, wake)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
