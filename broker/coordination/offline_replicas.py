"""Tells the cluster which replicas this broker cannot open or write: `/brokers/offline/<id>`, ephemeral.

The controller does not count on them, Metadata lists them. The znode goes with the broker's session, and when
there is nothing to report. Called by `server/broker.py` again and again with what is so now.
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

log = structlog.get_logger("millrace.broker")

Offline = dict[str, list[int]]


class OfflineReporter:
    """Writes when there is something new to say."""

    def __init__(self, session: Session, broker_id: int) -> None:
        self._session = session
        self._path = paths.offline_path(broker_id)
        self._reported: Offline | None = None

    def forget(self) -> None:
        """The session is another one: what was reported in the last one is gone."""
        self._reported = None

    async def report(self, offline: Mapping[str, Sequence[int]]) -> None:
        """Make the znode say this: topic -> partitions. While ZooKeeper cannot be reached, the next call
        tries again."""
        wanted = {topic: sorted(numbers) for topic, numbers in offline.items() if numbers}
        if wanted == self._reported or self._session.state is not SessionState.CONNECTED:
            return
        try:
            await self._write(wanted)
        except SessionError as error:
            log.debug("offline replicas were not reported", error=str(error))
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
