"""Tells the cluster which replicas this broker cannot open or write: `/brokers/offline/<id>`, ephemeral.

The controller does not count on them, Metadata lists them. The znode goes with the broker's session, and when
there is nothing to report. Called by `server/broker.py` again and again with what is so now. Of more than one
znode takes, as many topics are told as it takes: a part of them that is known moves its leaders, all of them
that are not known move none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import (
    NodeExists,
    NodeMissing,
    Session,
    SessionError,
    SessionState,
)
from millrace.broker.coordination.transactions import MOST_BYTES

log = structlog.get_logger("millrace.broker")

Offline = dict[str, list[int]]

TELL_AFTER_FAILURES = 3
"""Until then it is a connection that comes and goes."""


def fitting(offline: Offline, room: int = MOST_BYTES) -> Offline:
    """As many of the topics, by name, as fit into a znode of so many bytes. Pure."""
    if len(paths.encode_offline(offline)) <= room:
        return offline
    found: Offline = {}
    for topic, numbers in sorted(offline.items()):
        size = len(paths.encode_offline({topic: numbers}))
        if size <= room:
            room -= size
            found[topic] = numbers
    return found


class OfflineReporter:
    """Writes when there is something new to say."""

    def __init__(self, session: Session, broker_id: int) -> None:
        self._session = session
        self._path = paths.offline_path(broker_id)
        self._reported: Offline | None = None
        self._tried: Offline | None = None
        self._failure_count = 0

    def forget(self) -> None:
        """The session is another one: what was reported in the last one is gone."""
        self._reported = None

    async def report(self, offline: Mapping[str, Sequence[int]]) -> None:
        """Make the znode say this: topic -> partitions. While ZooKeeper cannot be reached, the next call
        tries again."""
        wanted = {topic: sorted(numbers) for topic, numbers in offline.items() if numbers}
        if wanted == self._reported or self._session.state is not SessionState.CONNECTED:
            return
        told = fitting(wanted)
        if wanted != self._tried:
            self._tried, self._failure_count = wanted, 0
            if told != wanted:
                log.warning(
                    "more replicas are offline than one znode can name, and the cluster counts on the rest: "
                    "mend the data folder and restart the broker, or stop it, so that others lead",
                    znode=self._path,
                    topics=len(wanted),
                    told=len(told),
                )
        try:
            await self._write(told)
        except SessionError as error:
            self._failure_count += 1
            tell = log.warning if self._failure_count == TELL_AFTER_FAILURES else log.debug
            tell(
                "offline replicas are not reported, so the cluster counts on them: look at ZooKeeper's log, "
                "and that its jute.maxbuffer is no less than 1 MiB",
                znode=self._path,
                topics=len(told),
                error=str(error),
            )
            return
        self._reported = wanted

    async def _write(self, wanted: Offline) -> None:
        try:
            node = await self._session.get(self._path)
        except NodeMissing:
            node = None
        try:
            if node is not None and (not wanted or node.owner != self._session.id):
                # Also one that a former session left: it would vanish with that session.
                await self._session.delete(self._path)
                node = None
            if node is not None:
                await self._session.set(self._path, paths.encode_offline(wanted))
            elif wanted:
                await self._session.create(self._path, paths.encode_offline(wanted), ephemeral=True)
        except (NodeMissing, NodeExists) as error:
            raise SessionError(f"{self._path} changed meanwhile: {error}") from None
