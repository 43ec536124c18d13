"""What the audited producers of asyncio clients have in common: who reports, when, and what futures tell.

`aiokafka_producer` and `client_producer` hold one each; the clients themselves are told apart by two
coroutines that they give: one sends an event, one sees that the events topic is there. Runs in the producer's
event loop and belongs to it alone. What must stay true: events are sent in order, and after one that is not
taken the others wait for the next report, unless it is larger than a request may be; a future that the
application cancelled says nothing of its record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from millrace.audit.clients.adapter_config import fail_all
from millrace.audit.stream_reporter import OutgoingEvent, RecordStamp, StreamReporter

FIRST_PAUSE_S = 1.0

SendEvent = Callable[[OutgoingEvent], Awaitable["asyncio.Future[Any]"]]


class LoopReports:
    """The reports of one producer. `not_taken` are the errors of `send` after which an event is sent again
    with the next report, `too_large` that of one which keeps none back; `make_topic` says whether the cluster
    could be asked."""

    def __init__(
        self,
        reporter: StreamReporter,
        send: SendEvent,
        make_topic: Callable[[], Awaitable[bool]],
        *,
        not_taken: type[Exception],
        too_large: type[Exception],
        log: logging.Logger,
    ) -> None:
        self._reporter, self._send, self._make_topic = reporter, send, make_topic
        self._not_taken, self._too_large, self._log = not_taken, too_large, log
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._topic_ready = False
        self._untold: set[asyncio.Future[Any]] = set()

    def begin(self) -> None:
        """Report regularly from now on. Again it does nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._report_regularly())

    def follow(self, stamp: RecordStamp, size: int, future: asyncio.Future[Any]) -> None:
        """Count the record by what its future comes to; `size` bytes of value."""
        self._untold.add(future)
        future.add_done_callback(partial(self._tell, stamp, size))

    async def report(self) -> None:
        """Publish now what changed since the last report."""
        async with self._lock:
            if await self._topic_is_there():
                await self._publish(self._reporter.report())

    async def end(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Deliver what is queued (`flush`), then the final counts and that the streams are closed."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])  # and not `await`: who waits here may be cancelled as well
        await flush()
        while self._untold:  # their callbacks run one turn of the loop later
            await asyncio.wait(set(self._untold))
        async with self._lock:
            await self._topic_is_there()
            futures = await self._publish(self._reporter.close())
            await flush()
            await asyncio.gather(*futures, return_exceptions=True)

    def _tell(self, stamp: RecordStamp, size: int, future: asyncio.Future[Any]) -> None:
        self._untold.discard(future)
        if future.cancelled() or future.exception() is not None:
            stamp.ambiguous()
        else:
            stamp.acknowledged(size)

    async def _topic_is_there(self) -> bool:
        if not self._topic_ready:
            self._topic_ready = await self._make_topic()
        return self._topic_ready

    async def _publish(self, events: list[OutgoingEvent]) -> list[asyncio.Future[Any]]:
        futures: list[asyncio.Future[Any]] = []
        for number, event in enumerate(events):
            try:
                future = await self._send(event)
            except self._too_large as error:
                self._log.warning("report %s is refused: %s", event.key, error)
                event.too_large()
                continue  # it keeps no other one back
            except BaseException as error:
                fail_all(events[number:])
                if not isinstance(error, self._not_taken):
                    raise
                self._log.warning("a report could not be sent, it will be repeated: %s", error)
                break
            future.add_done_callback(partial(self._event_told, event))
            futures.append(future)
        return futures

    def _event_told(self, event: OutgoingEvent, future: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is None:
            event.delivered()
        elif isinstance(error, self._too_large):
            event.too_large()
        else:
            event.failed()

    async def _report_regularly(self) -> None:
        """The first report follows the first record soon."""
        pause_s = min(self._reporter.interval_ms / 1000, FIRST_PAUSE_S)
        while self._reporter.refusal is None:
            await asyncio.sleep(pause_s)
            pause_s = self._reporter.interval_ms / 1000
            try:
                await self.report()
            except Exception:
                self._log.exception(
                    "the audit's report failed; the next one will hold what this one did not say"
                )
