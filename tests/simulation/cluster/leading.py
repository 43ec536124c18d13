"""The leader's side of replication in the simulation: fetches of followers, and the in-sync set.

The decisions are the product's (`Replica`). A change of the in-sync set is written until it is certain what
became of it, as in the product's `partition_states`: tied to the state it was based on and to the replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.broker.errors import KafkaError, OffsetOutOfRange
from millrace.broker.replication import follower as following
from millrace.broker.replication.partition import IsrChange, Role
from tests.simulation.cluster.assignment import STATES, assigned_now
from tests.simulation.cluster.disk import Stored
from tests.simulation.cluster.fetching import FetchAnswer
from tests.simulation.cluster.truth import Violation
from tests.simulation.cluster.zookeeper import Refused, Set, VirtualZooKeeper

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

NO_EPOCH = -1
READ_MOST = 50


class Leading:
    """What one broker does for the followers of the partitions that it leads."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def on_fetch(
        self,
        number: int,
        follower: Broker,
        broker_epoch: int,
        leader_epoch: int,
        offset: int,
        start_offset: int,
        last_epoch: int,
        token: int,
    ) -> None:
        broker = self._broker
        replica, log = broker.replicas[number], broker.logs[number]

        def reply(records: list[Stored] | None = None, **fields: Any) -> None:
            answer = following.Answer(
                leader_epoch,
                offset,
                last_epoch,
                high_watermark=replica.high_watermark,
                log_start_offset=log.start_offset,
                **fields,
            )
            broker.network.send(
                broker.name,
                follower,
                follower.fetching.on_answer,
                number,
                token,
                FetchAnswer(answer, records or []),
            )

        try:
            progress = replica.check_follower(follower.id, leader_epoch, broker_epoch)
            if last_epoch != NO_EPOCH and offset >= log.start_offset:
                epoch, end = log.epochs.end_offset_for(last_epoch, log.end_offset)
                if epoch == NO_EPOCH:
                    raise OffsetOutOfRange(f"leader epoch {last_epoch} is not known here")
                if epoch < last_epoch or end < offset:
                    reply(diverging=(epoch, end))
                    return
            if not log.start_offset <= offset <= log.end_offset:
                raise OffsetOutOfRange(f"offset {offset}")
        except KafkaError as error:
            reply(error_code=error.code)
            return
        progress.fetched(offset, start_offset, log.end_offset, broker.world.now_ms, broker_epoch)
        if follower.id not in replica.isr:
            change = replica.expansion_due(follower.id)
            if change is not None:
                self._change(number, change)
        broker.advance(number)
        reply(log.read(offset, log.end_offset, READ_MOST))

    def on_bounds(self, number: int, follower: Broker, leader_epoch: int, token: int) -> None:
        broker = self._broker
        replica, log = broker.replicas[number], broker.logs[number]
        if replica.role is Role.LEADER and replica.leader_epoch == leader_epoch:
            broker.network.send(
                broker.name,
                follower,
                follower.fetching.on_leader_bounds,
                number,
                token,
                log.start_offset,
                log.end_offset,
            )

    def check_in_sync_sets(self) -> None:
        broker = self._broker
        for number, replica in broker.replicas.items():
            if replica.role is Role.LEADER and replica.followers:
                broker.advance(number)
                change = replica.shrink_due(broker.logs[number].end_offset, broker.world.now_ms)
                if change is not None:
                    self._change(number, change)
        broker.later(broker.rules.max_lag_ms / 2, self.check_in_sync_sets)

    def _change(self, number: int, change: IsrChange) -> None:
        self._broker.replicas[number].begin(change)
        self._write(number, change)

    def _write(self, number: int, change: IsrChange) -> None:
        """Until it is certain what became of it; a session that ends leaves that open."""
        broker = self._broker
        replica = broker.replicas[number]
        if replica.pending is not change:
            return
        if broker.is_suspended or broker.session is None or broker.session.is_over:
            broker.later(50, self._write, number, change)
            return
        path, session = f"{STATES}{number}", broker.session
        if broker.logs[number].is_offline:
            raise Violation(f"{broker.name} changes the in-sync set of {number}, whose log has failed")

        def write(zookeeper: VirtualZooKeeper) -> Any:
            standing = zookeeper.read(path)
            if (
                standing is not None
                and standing[1] == change.state.version + 1
                and standing[0] == change.state
            ):
                return standing[1]
            replicas = assigned_now(zookeeper, broker.rules.replicas)[number].replicas
            if not change.fits(replicas):
                return replicas
            zookeeper.commit([Set(path, change.state, change.state.version)])
            return change.state.version + 1

        def answered(result: Any) -> None:
            if isinstance(result, Refused):
                return
            if isinstance(result, tuple):
                replica.called_off(change)
                return
            broker.world.note(f"{broker.name} sets the in-sync set of {number} to {change.state.isr}")
            known = broker.states.get(number)
            if known is None or known[1] < result:
                broker.states[number] = (change.state, result)
            if (
                broker.rules.has_moves
            ):  # the watch brings nothing new; other histories stay as they were found
                broker.office.wake()
            if replica.written(change, result):
                broker.in_sync_set_changed(number)

        broker.ask(write, answered)

        def look_again() -> None:
            if replica.pending is change and broker.session is not session:
                self._write(number, change)
            elif replica.pending is change:
                broker.later(broker.rules.session_timeout_ms, look_again)

        broker.later(broker.rules.session_timeout_ms, look_again)
