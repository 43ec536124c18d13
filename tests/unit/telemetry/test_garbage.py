"""The garbage collector of a starting server."""

from __future__ import annotations

import gc

from millrace.broker.telemetry.garbage import settle


def test_process_that_collects_garbage_already_stays_as_it_is() -> None:
    frozen = gc.get_freeze_count()
    settle()
    assert gc.isenabled() and gc.get_freeze_count() == frozen
