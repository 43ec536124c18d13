"""The brokers' rules through hundreds of seeded histories of a virtual cluster (see cluster/): the pure cores
of replication and of the controller, and groups and transactions with their shells.

Each history draws its cluster, its faults and their times from its seed. A failure names the seed;
`python -m tests.simulation.cluster SEED` replays it. The mutations take one rule out and must be noticed:
they test the simulator itself. `make simulate RUNS=…` runs as many histories as wanted.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.coordination import broker_registry, controller
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.groups.membership import Group
from millrace.broker.protocol.system_topics import TRANSACTIONS_TOPIC
from millrace.broker.replication import follower
from millrace.broker.replication.local_partition import WaitingAppends
from millrace.broker.replication.partition import NO_LEADER, PartitionState, Replica, Role
from millrace.broker.server import transaction_parts
from millrace.broker.server.internal_topics import InternalTopicLog
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.transactions.state import Transaction
from millrace.broker.transactions.verification import TransactionGate
from tests.simulation import histories
from tests.simulation.cluster import zookeeper
from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.controller_office import ControllerOffice
from tests.simulation.cluster.coordinators import Coordinators
from tests.simulation.cluster.disk import DiskFailed
from tests.simulation.cluster.failed_logs import FailedLogs
from tests.simulation.cluster.fetching import Fetching
from tests.simulation.cluster.history import History, Outcome
from tests.simulation.cluster.loads import ALL, GROUPS, REPLICATION, STREAMS
from tests.simulation.cluster.product_log import product_log
from tests.simulation.cluster.streams import StreamProducer

FIRST_SEED = int(os.environ.get("MILLRACE_SIMULATE_SEED", "1"))
RUNS = int(os.environ.get("MILLRACE_SIMULATE_RUNS", "50"))
CHUNK = 50
MOST_MUTATED_RUNS = 40
SEARCHED_FROM = 1
"""Whatever seed was asked for: from another one a search may be longer."""


def run(seed: int, load: int | None = None, moves: bool | None = False) -> Outcome:
    return History(seed, load, moves).run()


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + RUNS, CHUNK))
def test_every_invariant_holds_in_every_history(first: int) -> None:
    acknowledged = 0
    for seed in range(first, min(first + CHUNK, FIRST_SEED + RUNS)):
        outcome = run(seed, moves=None)
        tail = "\n".join(outcome.trace[-40:])
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}\n{tail}"
        acknowledged += outcome.acknowledged
        histories.went_through("brokers")
    assert acknowledged > 0, "nothing was ever acknowledged: these histories prove nothing"


def test_an_end_that_a_replaced_coordinator_hears_is_not_mixed_up_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that ends at the former coordinator, cut from ZooKeeper, what it began at the present one."""
    rule = broker_registry.restarted

    def where_it_is_in_sync(state: PartitionState, *rest: Any, **options: Any) -> PartitionState | None:
        """Without writes of states that stay as they are the history is the one that was found."""
        left = rule(state, *rest, **options)
        return None if left == state else left

    monkeypatch.setattr(broker_registry, "restarted", where_it_is_in_sync)
    assert run(42790).violation is None
    monkeypatch.setattr(Transaction, "_confirmed", lambda _, answer: [answer])
    assert run(42790).violation is not None, "this history is another one by now: find one of its kind"


def test_a_broker_that_is_back_but_not_registered_again_is_not_reckoned_with() -> None:
    """It was killed; the session of its former life goes on, and the controller believes in that one when the
    last member that was not interrupted stops in order. What only these two had may be lost."""
    history = History(FIRST_SEED, REPLICATION, moves=False)
    broker = history.brokers[1]
    with product_log(history.world):
        for each in history.brokers.values():
            each.start()
        history.world.run(2_000)
    assert history.truth.is_running(1, 0)
    broker.crash(power=False)
    assert not history.truth.is_running(1, 0)
    broker.start()
    assert not history.truth.is_running(1, 0)
    with product_log(history.world):
        history.world.run(8_000)
    assert history.truth.is_running(1, 0)


@pytest.mark.parametrize("load", [REPLICATION, ALL])
def test_a_history_follows_from_its_seed(load: int) -> None:
    assert run(FIRST_SEED, load).trace == run(FIRST_SEED, load).trace


def first_violation(
    load: int | None = None,
    is_wanted: Callable[[History], bool] = lambda _history: True,
    *,
    begin: int = SEARCHED_FROM,
    moves: bool = False,
) -> tuple[int, str]:
    """The seed of a history that is noticed to break its promises, and how it does. The search begins at
    `begin`: not far from where it was found last."""
    wanted = filter(is_wanted, (History(seed, load, moves) for seed in itertools.count(begin)))
    for history in itertools.islice(wanted, MOST_MUTATED_RUNS):
        violation = history.run().violation
        if violation is not None:
            return history.seed, violation
    pytest.fail(f"{MOST_MUTATED_RUNS} histories without this rule, and nothing was noticed")


def notices_a_violation(load: int | None = None, *, begin: int = SEARCHED_FROM) -> str:
    return first_violation(load, begin=begin)[1]


def test_moves_happen_and_end() -> None:
    """And brokers hand over before they stop, or these histories say nothing of it."""
    notes = [note for seed in range(10) for note in run(seed, REPLICATION, moves=True).trace]
    for what in ("ends moves", "removes its replica", " to None: goes to", "leaves"):
        assert any(what in note for note in notes), what


def test_moves_that_end_before_all_are_in_sync_lose_records(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = controller.arrive

    def hasty(partition: PartitionInfo, staying: frozenset[int], epoch: int) -> PartitionState | None:
        state = partition.state
        if state is None or not partition.is_moving or not set(partition.target) & staying:
            return rule(partition, staying, epoch)
        return rule(partition, staying, epoch) or replace(
            state,
            leader=next(each for each in partition.target if each in staying),
            leader_epoch=state.leader_epoch + 1,
            isr=tuple(each for each in partition.target if each in staying),
        )

    monkeypatch.setattr(controller, "arrive", hasty)
    assert "invariant" in first_violation(REPLICATION, moves=True)[1]


def test_without_truncation_by_epoch_histories_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = follower.decide

    def blind(answer: follower.Answer, *rest: Any) -> follower.Decision:
        return rule(replace(answer, diverging=None), *rest)

    monkeypatch.setattr(follower, "decide", blind)
    assert notices_a_violation()


def test_truncation_to_the_high_watermark_instead_loses_records(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Broker._apply

    def cut_at_high_watermark(self: Broker, number: int) -> None:
        replica = self.replicas[number]
        before = replica.role, replica.leader_epoch
        rule(self, number)
        if replica.role is Role.FOLLOWER and (replica.role, replica.leader_epoch) != before:
            self.logs[number].truncate_to(replica.high_watermark)

    monkeypatch.setattr(Broker, "_apply", cut_at_high_watermark)
    assert "invariant" in notices_a_violation()


def test_a_restarted_broker_that_stays_in_sync_loses_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_registry, "restarted", lambda *_, **__: None)
    assert "invariant" in notices_a_violation()


def test_only_the_fence_stops_a_controller_that_does_not_know_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that clings to its office when its session is over; with the fence it learns of that by its first
    write."""
    rule = ControllerOffice.forget

    def cling(self: ControllerOffice) -> None:
        held = getattr(self, "_held", None)
        rule(self)
        self._held = held

    monkeypatch.setattr(ControllerOffice, "forget", cling)
    with monkeypatch.context() as patch:
        patch.setattr(ControllerOffice, "_fence", lambda *_: [])
        seed, violation = first_violation(REPLICATION)
    assert "invariant 4" in violation
    assert run(seed, REPLICATION).violation is None


@pytest.mark.parametrize(("side", "name"), [(Broker, "advance"), (Fetching, "fetch")])
def test_records_that_are_shown_before_they_are_flushed_give_an_offset_twice(
    side: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `visibility=flushed`, a leader that counts what its disk has not, and a follower that asks for
    more before its disk has what it was given."""
    rule = getattr(side, name)

    def hasty(self: Any, number: int) -> None:
        broker = self if isinstance(self, Broker) else self._broker
        rules, broker.rules = broker.rules, replace(broker.rules, only_flushed=False)
        try:
            rule(self, number)
        finally:
            broker.rules = rules

    def mostly_without_power(self: History) -> tuple[Callable[[], None], ...]:
        return self._black_out, self._lose_power, self._isolate, self._kill

    monkeypatch.setattr(side, name, hasty)
    monkeypatch.setattr(History, "_draw_faults", mostly_without_power)
    _, violation = first_violation(REPLICATION, lambda history: history.rules.only_flushed)
    assert "invariant 3" in violation


def test_a_log_that_goes_on_after_a_failed_flush_loses_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next flush succeeds, and says nothing of the pages that the failed one has lost."""

    def trusting(self: FailedLogs, number: int) -> bool:
        log = self._broker.logs[number]
        with suppress(DiskFailed):
            log.flush()
        log.is_offline = False
        return True

    def mostly_disks(self: History) -> tuple[Callable[[], None], ...]:
        return self._fail_flush, self._fail_flush, self._kill, self._stop

    monkeypatch.setattr(FailedLogs, "flush", trusting)
    monkeypatch.setattr(History, "_draw_faults", mostly_disks)
    assert "invariant" in first_violation(REPLICATION, lambda history: history.rules.only_flushed)[1]


def test_transactional_batches_that_nobody_verifies_hang_or_stray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_parts, "TransactionGate", partial(_ungated, TransactionGate))
    assert notices_a_violation(STREAMS)


def _ungated(gate: type[TransactionGate], *arguments: Any, **settings: Any) -> TransactionGate:
    return gate(*arguments, **{**settings, "enabled": False})


def test_stable_offset_that_trusts_unreplicated_markers_shows_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trusting(self: ProducerState, high_watermark: int) -> int:
        return min(high_watermark, *self._open.values(), high_watermark)

    monkeypatch.setattr(ProducerState, "last_stable_offset", trusting)
    assert "invariant 6" in notices_a_violation(STREAMS)


def test_coordinators_that_answer_before_replication_break_their_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = InternalTopicLog.append_now

    def hasty(self: InternalTopicLog, partition: int, batch: bytes) -> tuple[int, None]:
        return rule(self, partition, batch)[0], None

    monkeypatch.setattr(InternalTopicLog, "append_now", hasty)
    assert notices_a_violation(GROUPS)
    assert notices_a_violation(STREAMS)


def test_coordinators_whose_memory_follows_uncertain_writes_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WaitingAppends, "dismiss", WaitingAppends.fail)
    assert "not committed" in notices_a_violation(ALL, begin=24)


def test_transactions_without_fencing_by_epoch_end_otherwise_than_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = Transaction._identity_error

    def unfenced(self: Transaction, producer: Any) -> ErrorCode:
        error = rule(self, producer)
        return ErrorCode.none if error is ErrorCode.producer_fenced else error

    monkeypatch.setattr(Transaction, "_identity_error", unfenced)
    assert notices_a_violation(STREAMS)


def test_replaced_coordinators_that_answer_from_memory_break_their_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where coordinators are cut from ZooKeeper, by clients that begin where the newest metadata says and end
    where the oldest does."""
    ending: set[StreamProducer] = set()
    end = StreamProducer._end

    async def end_by_old_metadata(self: StreamProducer, committed: bool) -> bool:
        ending.add(self)
        try:
            return await end(self, committed)
        finally:
            ending.remove(self)

    def leader_of(self: StreamProducer, number: int) -> Broker | None:
        states = _believed(self.brokers, number)
        of = min if self in ending else max
        return self.brokers.get(of(states, key=_leader_epoch).leader) if states else None

    def cut_coordinators(self: History) -> None:
        for number in self.rules.topics.numbers_of(TRANSACTIONS_TOPIC):
            states = _believed(self.brokers, number)
            leader = max(states, key=_leader_epoch).leader if states else NO_LEADER
            if leader != NO_LEADER:
                self.network.cut(self.brokers[leader].name, zookeeper.NAME)
        self.world.after(2_500, self.network.heal)

    monkeypatch.setattr(StreamProducer, "_end", end_by_old_metadata)
    monkeypatch.setattr(StreamProducer, "leader_of", leader_of)
    monkeypatch.setattr(History, "_draw_faults", lambda self: (MethodType(cut_coordinators, self),))
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "_confirmed", lambda _, answer: [answer])
        seed, _ = first_violation(STREAMS)
    for each in range(SEARCHED_FROM, max(seed + 1, SEARCHED_FROM + 8)):
        assert run(each, STREAMS).violation is None, f"seed {each}"


def _believed(brokers: Mapping[int, Broker], number: int) -> list[PartitionState]:
    """A partition's state as each living broker knows it."""
    alive = (broker for broker in brokers.values() if broker.is_alive)
    return [broker.states[number][0] for broker in alive if number in broker.states]


def _leader_epoch(state: PartitionState) -> int:
    return state.leader_epoch


def test_leaders_that_take_others_out_after_their_own_log_has_failed_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a broker is cut from everything for so long that others are late, and its disk fails then."""

    def cut_off(self: History) -> None:
        alone = self._any_alive()
        if alone is not None:
            for name in (zookeeper.NAME, *(each.name for each in self.brokers.values() if each is not alone)):
                self.network.cut(alone.name, name)
            late_ms = 2 * self.rules.max_lag_ms
            self.world.after(late_ms, fail_disk, self, alone)
            self.world.after(late_ms + 1_000, self.network.heal)

    def fail_disk(self: History, broker: Broker) -> None:
        if not self.network.reaches(broker.name, zookeeper.NAME):  # no faults any more at the end
            for log in broker.logs.values():
                log.failing = 0.5

    monkeypatch.setattr(Replica, "let_go", lambda self: setattr(self, "role", Role.NONE))
    monkeypatch.setattr(History, "_draw_faults", lambda self: (MethodType(cut_off, self),))
    assert "whose log has failed" in notices_a_violation(REPLICATION)


def test_commits_of_an_old_generation_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "check_commit", lambda *_, **__: ErrorCode.none)
    assert notices_a_violation(GROUPS)


def test_groups_whose_timers_follow_the_time_of_day_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinators, "_steady_ms", Coordinators._now_ms)
    assert "does not become whole" in notices_a_violation(GROUPS, begin=10)


def test_repeated_batches_that_are_appended_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = ProducerState.check

    def forgetful(self: ProducerState, header: Any) -> None:
        rule(self, header)

    monkeypatch.setattr(ProducerState, "check", forgetful)
    assert notices_a_violation(STREAMS)
