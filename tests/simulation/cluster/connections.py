"""Requests and answers between processes, over connections: in order, and never twice.

One connection for each (caller, callee, channel), as the product has them. What is lost on the way, or held
up for longer than `timeout_ms`, is a NetworkException for the caller; the callee may have done its work all
the same, at once or much later.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from millrace.broker.errors import NetworkException
from tests.simulation.cluster.loop import LoopProcess
from tests.simulation.cluster.world import Network


async def call(
    network: Network,
    caller: LoopProcess,
    callee: LoopProcess,
    channel: str,
    service: Callable[..., Any],
    *arguments: Any,
    timeout_ms: float,
    late_ms: int = 0,
) -> Any:
    """What `service(*arguments)`, run in the callee, gives. Raises NetworkException. `late_ms`: the request
    is on its way for so long at least, whatever becomes of the caller."""
    answer: asyncio.Future[Any] = caller.loop.create_future()

    def serve() -> None:
        callee.spawn(work())

    async def work() -> None:
        result = service(*arguments)
        if inspect.isawaitable(result):
            result = await result
        network.send_in_order(channel, callee.name, caller, take, result)

    def take(result: Any) -> None:
        if not answer.done():
            answer.set_result(result)

    if late_ms:
        caller.world.after(late_ms, network.send_in_order, channel, caller.name, callee, serve)
    else:
        network.send_in_order(channel, caller.name, callee, serve)
    try:
        return await asyncio.wait_for(answer, timeout_ms / 1000)
    except TimeoutError:
        raise NetworkException(f"{callee.name} does not answer") from None
