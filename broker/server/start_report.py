"""What a broker that starts is waiting for, in one line at intervals: who looks at a start that stands still
must see whether it is at its disks or without ZooKeeper.

Made by `broker.py`, begun and ended with its start. What is asked of a ZooKeeper that is away waits until it
is back, for however long that takes, and until then nothing else is said. Then the start goes on, or ends
with an error where the session has ended meanwhile.
"""

from __future__ import annotations

import asyncio

import structlog

from millrace.broker.coordination.session import Session, SessionState

INTERVAL_SECONDS = 10.0

log = structlog.get_logger("millrace.broker")


class StartReport:
    """See the module. `session` is set as soon as there is one; `zookeeper` is its address, for people."""

    def __init__(self, zookeeper: str, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.session: Session | None = None
        self._zookeeper = zookeeper
        self._interval_seconds = interval_seconds
        self._telling: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """On the event loop, once."""
        self._telling = asyncio.get_running_loop().create_task(self._tell(), name="start report")

    def end(self) -> None:
        """The broker is up, or has given up."""
        if self._telling is not None:
            self._telling.cancel()

    async def _tell(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await asyncio.sleep(self._interval_seconds)
            log.warning("the broker is not up yet", waiting_for=self._cause(), seconds=round(clock() - began))

    def _cause(self) -> str:
        if self.session is None:
            return "its data folders"
        if self.session.state is SessionState.CONNECTED:
            return "its logs, its compiled loops, its place in the cluster; ZooKeeper is connected"
        return f"ZooKeeper at {self._zookeeper}: the connection is {self.session.state.value}"
