"""What the product logs while it runs in the simulator: part of the history's trace; a defect ends it.

A shell that catches what it did not expect says so with a traceback in its log. Here that is a failure of the
history, as nothing else would show it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from tests.simulation.cluster.truth import Violation
from tests.simulation.cluster.world import World

_INFO = 20


@contextmanager
def product_log(world: World) -> Iterator[None]:
    """Until it is left, everything that is logged goes to `world`."""

    def take(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Any:
        failure = event.pop("exc_info", None)
        text = str(event.pop("event", ""))
        world.note("log: " + text + "".join(f" {name}={value}" for name, value in event.items()))
        if failure:
            error = sys.exc_info()[1] if failure is True else failure
            if isinstance(error, Violation):
                world.fail(error)
            lines = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
            world.fail(Violation(f"the product logs a defect: {text}\n{lines}"))
        raise structlog.DropEvent

    former = structlog.get_config()
    structlog.configure(
        processors=[take],
        wrapper_class=structlog.make_filtering_bound_logger(_INFO),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**former)
