"""A worker's seat in the mirror's group on the target: under a name of its own, or without one.

Made by `worker`. What the seat means for partitions is the worker's affair; here is how it is asked for, how
long it lasts, and what its loss means.

A worker without a name (`group.instance_id`) leaves the group when it ends: the others take its partitions at
once, and when it comes back the group levels the work again. With a name it is a static member (KIP-345): it
keeps its seat when it ends, and whoever joins under that name within the session timeout goes on with its
partitions, and nothing else moves. What it gets then is the share that was last given out (`is_inherited`):
nobody is asked anew, so it has to join once more to be known as what it is now. A drain gives the seat up
whether it has a name or not, and so does an end within a join, where the others would wait for this worker.

Two processes with one name: the later one has the seat, the earlier one ends with an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_member import Assign, GroupMember, OnAssign, OnRevoke
from millrace.broker.errors import FatalError, FencedInstanceId, KafkaError
from millrace.mirror.config import MirrorConfig
from millrace.mirror.sharing.peers import Crew

log = structlog.get_logger("millrace.mirror.seat")

PROTOCOL_TYPE = "millrace-mirror"
# A worker learns by its next heartbeat that others come or go: its partitions pause for so long at most.
MAX_HEARTBEAT_MS = 300


class WorkerSeat(GroupMember):
    """See the module's text."""

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        claim: Callable[[], Sequence[tuple[str, bytes]]],
        *,
        on_assign: OnAssign,
        on_revoke: OnRevoke,
        on_lost: OnRevoke,
        assign: Assign,
    ) -> None:
        group = config.group
        super().__init__(
            target,
            config.group_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=claim,
            on_assign=on_assign,
            on_revoke=on_revoke,
            on_lost=on_lost,
            assign=assign,
            instance_id=group.instance_id,
            session_timeout_ms=group.session_timeout_ms,
            rebalance_timeout_ms=group.rebalance_timeout_ms,
            heartbeat_interval_ms=min(MAX_HEARTBEAT_MS, max(1, group.session_timeout_ms // 4)),
        )
        self._is_kept = group.instance_id is not None
        self._session_timeout_s = group.session_timeout_ms / 1000

    async def keep(self) -> None:
        """Holds the seat until it is closed. Raises FatalError for what trying again cannot cure."""
        self.start()
        try:
            await self.wait()
        except FencedInstanceId as error:
            raise FatalError(
                f"another process has taken this worker's place in the mirror's group: it runs as "
                f"group.instance_id {self.instance_id} too. Give each worker a name of its own ({error})"
            ) from error
        except KafkaError as error:
            raise FatalError(f"the target refuses the mirror a seat in its group: {error}") from error
        finally:
            self.abandon()

    async def give_up(self) -> None:
        """Leaves the group: the others take the work at once."""
        await self.close(leave=True)

    async def end(self) -> None:
        """The process ends. A seat with a name waits for whoever comes back under it."""
        await self.close()
        if self._is_kept and self.member_id:
            log.info(
                "the seat is kept for a restart; drain a worker that shall not come back",
                name=self.instance_id,
                seconds=self._session_timeout_s,
            )

    def is_inherited(self, crew: Crew) -> bool:
        """Whether a share was given out to this worker's name before this process had it. `crew`: the workers
        that the share names."""
        return bool(crew.workers) and all(each.id != self.member_id for each in crew.workers)
