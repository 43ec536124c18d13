"""The follower's side of replication in the simulation: fetches from leaders, and what their answers lead to.

The decisions are the product's (`follower.decide`). A token for each partition tells the answer that is
waited for from those that come late; whoever becomes a follower anew takes a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millrace.broker.replication import follower as following
from millrace.broker.replication.partition import ANY_BROKER_EPOCH, NO_LEADER, Role
from tests.simulation.cluster.disk import Stored

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

FETCH_TIMEOUT_MS = 120
IDLE_FETCH_MS = 15


class FetchAnswer(NamedTuple):
    answer: following.Answer
    records: list[Stored]


class Fetching:
    """What one broker fetches, by the number of the partition."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.forget()

    def forget(self) -> None:
        """The process begins a new life."""
        self._fetching: dict[int, int] = dict.fromkeys(self._broker.logs, 0)

    def fetch(self, number: int) -> None:
        """Ask the present leader for what comes next, and again if no answer comes."""
        broker = self._broker
        replica, log = broker.replicas[number], broker.logs[number]
        self._fetching[number] += 1
        token = self._fetching[number]
        if replica.role is not Role.FOLLOWER or replica.leader == NO_LEADER:
            return
        broker.later(FETCH_TIMEOUT_MS, self._retry, number, token)
        own_epoch = broker.brokers.get(broker.id, ANY_BROKER_EPOCH)
        leader = broker.peers.get(replica.leader)
        if not broker.is_registered or own_epoch == ANY_BROKER_EPOCH or leader is None:
            return
        if broker.rules.only_flushed and not broker.failed.flush(number):
            return
        broker.network.send(
            broker.name,
            leader,
            leader.leading.on_fetch,
            number,
            broker,
            own_epoch,
            replica.leader_epoch,
            log.end_offset,
            log.start_offset,
            log.epochs.latest_epoch,
            token,
        )

    def _retry(self, number: int, token: int) -> None:
        if self._fetching[number] == token:
            self.fetch(number)

    def _position(self, number: int) -> following.FollowerState:
        replica, log = self._broker.replicas[number], self._broker.logs[number]
        return following.FollowerState(
            replica.leader_epoch, log.start_offset, log.end_offset, replica.high_watermark
        )

    def on_answer(self, number: int, token: int, given: FetchAnswer) -> None:
        broker = self._broker
        replica, log = broker.replicas[number], broker.logs[number]
        if replica.role is not Role.FOLLOWER:
            return
        decision = following.decide(given.answer, self._position(number), log.epochs)
        rest = 0
        match decision:
            case following.Append():
                log.append_stored(given.answer.fetch_offset, given.records, broker.world.now_ms)
                replica.follow(given.answer.high_watermark, log.end_offset)
                start = following.start_to_follow(self._position(number), given.answer.log_start_offset)
                if start is not None:
                    log.advance_start(start)
                rest = 0 if given.records else IDLE_FETCH_MS
            case following.AskBounds():
                leader = broker.peers.get(replica.leader)
                if leader is not None and self._fetching[number] == token:
                    broker.network.send(
                        broker.name,
                        leader,
                        leader.leading.on_bounds,
                        number,
                        broker,
                        replica.leader_epoch,
                        token,
                    )
                return
            case following.AskLater():
                rest = IDLE_FETCH_MS
            case _:
                self._cut(number, decision)
        if self._fetching[number] == token:
            broker.later(rest, self._retry, number, token)

    def on_leader_bounds(self, number: int, token: int, start: int, end: int) -> None:
        if self._broker.replicas[number].role is Role.FOLLOWER and self._fetching[number] == token:
            self._cut(number, following.realign(self._position(number), start, end))
            self.fetch(number)

    def _cut(self, number: int, decision: following.Decision) -> None:
        broker = self._broker
        replica, log = broker.replicas[number], broker.logs[number]
        match decision:
            case following.Truncate(offset):
                if offset < log.end_offset:
                    broker.world.note(f"{broker.name} cuts {number} from {log.end_offset} to {offset}")
                log.truncate_to(offset, broker.world.now_ms)
                replica.truncated(log.end_offset)
            case following.StartAnew(offset):
                broker.world.note(f"{broker.name} begins {number} anew at {offset}")
                log.start_anew(offset)
                replica.begun_anew(offset)
            case _:
                return
        broker.checkpoints[number] = min(broker.checkpoints[number], log.end_offset)
