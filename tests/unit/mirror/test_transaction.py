from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from millrace.mirror.delivery.transaction import (
    FAILING_AFTER_MS,
    FIRST_SIZE,
    GIVE_UP_AFTER_MS,
    LINGER_MS,
    MAX_AGE_MS,
    MIN_SIZE,
    QUICK_MS,
    SLOW_MS,
    Act,
    LaneTransaction,
    Phase,
    Seat,
    Step,
)
from millrace.mirror.topics.routes import TargetPartition

A, B, POSITIONS = TargetPartition("a", 0), TargetPartition("b", 0), TargetPartition("positions", 0)
SEAT = Seat("m1", 3)
INTERVAL_MS = 250


@dataclass
class View:
    seat: Seat | None = SEAT
    waiting: list[TargetPartition] = field(default_factory=list)
    own_partitions: frozenset[TargetPartition] = frozenset({POSITIONS})
    is_settled: bool = True
    is_exact: bool = True
    more_is_coming: bool = False
    has_news: bool = False
    is_urgent: bool = False
    blocked: frozenset[TargetPartition] = frozenset()
    silent: frozenset[TargetPartition] = frozenset()

    def failing(self) -> frozenset[TargetPartition]:
        return self.blocked

    def holding_up(self) -> frozenset[TargetPartition]:
        return self.silent


def begun() -> LaneTransaction:
    rules = LaneTransaction(INTERVAL_MS)
    assert rules.next_step(View(), 0).act is Act.BEGIN_PRODUCER
    rules.producer_began()
    return rules


def opened(view: View, now_ms: int = 1_000) -> LaneTransaction:
    rules = begun()
    step = rules.next_step(view, now_ms)
    assert step == Step(Act.ADD_PARTITIONS, partitions=frozenset(view.waiting) | {POSITIONS})
    rules.partitions_added(step.partitions)
    assert rules.next_step(view, now_ms).act is Act.ADD_GROUP
    rules.group_added()
    return rules


def fencing(view: View, now_ms: int = 1_000) -> LaneTransaction:
    rules = opened(view, now_ms)
    view.waiting = []
    assert rules.next_step(view, now_ms).act is Act.WRITE_POSITIONS
    rules.positions_written()
    return rules


def ending(view: View) -> LaneTransaction:
    rules = fencing(view)
    assert rules.next_step(view, 1_000) == Step(Act.FENCE, seat=view.seat)
    rules.fence_passed()
    assert rules.next_step(view, 1_000).act is Act.END
    return rules


def test_closes_as_soon_as_all_is_acknowledged_and_nothing_more_comes() -> None:
    view = View(waiting=[A])
    rules = opened(view)
    assert rules.next_step(view, 1_003) == Step(Act.WAIT, 1_000 + MAX_AGE_MS)
    view.waiting = []
    assert rules.next_step(view, 1_004).act is Act.WRITE_POSITIONS


def test_waits_a_moment_for_what_the_source_is_known_to_have() -> None:
    view = View(waiting=[A], more_is_coming=True)
    rules = opened(view)
    view.waiting = []
    assert rules.next_step(view, 1_010) == Step(Act.WAIT, 1_010 + LINGER_MS)
    assert rules.next_step(view, 1_010 + LINGER_MS).act is Act.WRITE_POSITIONS


def test_nothing_new_goes_out_once_it_is_old_or_full() -> None:
    view = View(waiting=[A], is_settled=False)
    old = opened(view)
    assert old.next_step(view, 1_000 + MAX_AGE_MS).act is Act.WAIT
    assert (old.phase, old.only_again, old.lets(A)) == (Phase.SEALED, True, True)
    full = opened(view)
    full.sent(FIRST_SIZE - 1, 1_001)
    assert not full.only_again
    full.sent(1, 1_002)
    assert full.only_again


def test_is_open_for_half_a_second_and_holds_32_mib_at_most() -> None:
    """However much waits, and however quickly the target takes it."""
    view = View(waiting=[A], more_is_coming=True)
    rules, sizes = opened(view), []
    for _ in range(8):
        sizes.append(rules.allowance)
        rules.sent(sizes[-1] - 1, 1_000)
        assert not rules.only_again
        rules.sent(1, 1_000)
        assert rules.only_again
        assert rules.next_step(view, 1_000).act is Act.WRITE_POSITIONS
        rules.positions_written()
        assert rules.next_step(view, 1_000).act is Act.FENCE
        rules.fence_passed()
        assert rules.next_step(view, 1_000).act is Act.END
        rules.committed(1_000)
        rules.partitions_added(rules.next_step(view, 1_000).partitions)
        rules.group_added()
    assert sizes[0] < sizes[1] < sizes[-2] == sizes[-1] == 32 << 20
    view.is_settled = False
    assert rules.next_step(view, 1_499) == Step(Act.WAIT, 1_500)
    assert not rules.only_again
    rules.next_step(view, 1_500)
    assert rules.only_again


def test_partition_that_was_not_added_gets_nothing() -> None:
    view = View(waiting=[A])
    rules = opened(view)
    assert (rules.lets(A), rules.lets(B)) == (True, False)
    view.waiting = [A, B]
    assert rules.next_step(view, 1_001) == Step(Act.ADD_PARTITIONS, partitions=frozenset({B}))


@pytest.mark.parametrize("missing", ["is_settled", "is_exact"])
def test_positions_wait_for_every_acknowledgement_and_for_open_gaps(missing: str) -> None:
    view = View(waiting=[A])
    rules = opened(view)
    view.waiting = []
    setattr(view, missing, False)
    assert rules.next_step(view, 1_001).act is Act.WAIT
    setattr(view, missing, True)
    assert rules.next_step(view, 1_002).act is Act.WRITE_POSITIONS


def test_rest_of_a_stretch_of_several_batches_may_follow_the_seal() -> None:
    view = View(waiting=[A], is_exact=False)
    rules = opened(view)
    rules.next_step(view, 1_000 + MAX_AGE_MS)
    assert not rules.only_again


def test_positions_alone_wait_for_their_interval_unless_somebody_waits_for_them() -> None:
    rules = ending(View(waiting=[A]))
    rules.committed(2_000)
    view = View(has_news=True)
    assert rules.next_step(view, 2_001) == Step(Act.WAIT, 2_000 + INTERVAL_MS)
    view.is_urgent = True
    assert rules.next_step(view, 2_002).act is Act.ADD_PARTITIONS


def test_older_generation_waits_for_the_answer_to_the_join() -> None:
    view = View(waiting=[A])
    rules = fencing(view)
    assert rules.next_step(view, 1_000).act is Act.FENCE
    rules.fence_refused(SEAT.generation)
    assert rules.next_step(view, 1_001).act is Act.WAIT
    view.seat = Seat("m1", 4)
    assert rules.next_step(view, 1_002) == Step(Act.FENCE, seat=view.seat)


@pytest.mark.parametrize("seat", [None, Seat("m2", 4)])
def test_another_seat_dooms_what_is_open(seat: Seat | None) -> None:
    view = View(waiting=[A])
    rules = fencing(view)
    view.seat = seat
    assert rules.next_step(view, 1_001).act is Act.REWIND
    rules.rewound()
    # The id may be somebody else's by now: without a seat it is not taken back.
    assert rules.next_step(view, 1_002).act is (Act.WAIT if seat is None else Act.BEGIN_PRODUCER)


def test_doomed_before_the_end_is_rewound_under_a_new_epoch_without_reading() -> None:
    view = View(waiting=[A])
    rules = opened(view)
    rules.doom("the sequence is lost")
    assert not rules.lets(A)
    assert rules.next_step(view, 1_001).act is Act.REWIND
    rules.rewound()
    assert rules.next_step(view, 1_002).act is Act.BEGIN_PRODUCER
    rules.producer_began()
    assert rules.phase is Phase.IDLE


def test_refused_end_is_never_guessed() -> None:
    view = View(waiting=[A])
    rules = ending(view)
    rules.doom("too late to doom")
    assert rules.next_step(view, 1_001).act is Act.END
    rules.outcome_unknown("fenced")
    assert rules.is_unread
    assert rules.next_step(view, 1_002).act is Act.BEGIN_PRODUCER
    rules.producer_began()
    assert rules.next_step(view, 1_003).act is Act.READ_POSITIONS
    rules.positions_read()
    assert (rules.phase, rules.is_unread) == (Phase.IDLE, False)


def test_end_that_went_unanswered_once_costs_the_epoch() -> None:
    rules = ending(View(waiting=[A]))
    rules.committed(2_000, is_certain=False)
    assert rules.next_step(View(), 2_001).act is Act.BEGIN_PRODUCER
    rules.producer_began()
    assert rules.phase is Phase.IDLE


def test_partition_that_blocks_stays_alone_only_where_others_suffer() -> None:
    view = View(waiting=[A, B], is_settled=False)
    rules = opened(view)
    view.blocked = frozenset({A})
    rules.next_step(view, 1_000 + MAX_AGE_MS)
    step = rules.next_step(view, 1_000 + FAILING_AFTER_MS)
    assert step == Step(Act.REWIND, blamed=frozenset({A}))
    alone = opened(View(waiting=[A]))
    view = View(waiting=[A], is_settled=False, blocked=frozenset({A}))
    alone.next_step(view, 1_000 + MAX_AGE_MS)
    assert alone.next_step(view, 1_000 + FAILING_AFTER_MS).act is Act.WAIT
    assert alone.next_step(view, 1_000 + GIVE_UP_AFTER_MS).act is Act.REWIND


def test_silence_is_blamed_when_the_transaction_is_given_up_and_not_before() -> None:
    view = View(waiting=[A, B], is_settled=False, silent=frozenset({A}))
    rules = opened(view)
    rules.next_step(view, 1_000 + MAX_AGE_MS)
    assert rules.next_step(view, 1_000 + GIVE_UP_AFTER_MS - 1).act is Act.WAIT, "it may just be slow"
    view.blocked = frozenset({B})
    step = rules.next_step(view, 1_000 + GIVE_UP_AFTER_MS)
    assert step == Step(Act.REWIND, blamed=frozenset({A, B}))


def test_slow_target_gets_smaller_transactions_and_a_quick_one_larger() -> None:
    def after(took_ms: int, size: int) -> int:
        view = View(waiting=[A], is_settled=False)
        rules = opened(view)
        rules.sent(size, 1_000)
        rules.next_step(view, 1_000 + MAX_AGE_MS)
        view.is_settled = True
        sealed_at_ms = 1_000 if size >= FIRST_SIZE else 1_000 + MAX_AGE_MS
        assert rules.next_step(view, sealed_at_ms + took_ms).act is Act.WRITE_POSITIONS
        return rules.allowance

    assert after(SLOW_MS + 1, FIRST_SIZE) == FIRST_SIZE // 2
    assert after(QUICK_MS, FIRST_SIZE) == FIRST_SIZE
    assert after(10, FIRST_SIZE // 2) == FIRST_SIZE * 2
    assert after(10, FIRST_SIZE // 4) == FIRST_SIZE, "what was never needed is not granted"


def test_transactions_that_cannot_be_done_in_time_shrink_to_a_floor() -> None:
    view = View(waiting=[A], is_settled=False)
    rules = opened(view)
    for _ in range(8):
        rules.next_step(view, rules.opened_at_ms + MAX_AGE_MS)
        assert rules.next_step(view, rules.opened_at_ms + GIVE_UP_AFTER_MS).act is Act.REWIND
        rules.rewound()
        rules.producer_began()
        rules.partitions_added(rules.next_step(view, 1_000).partitions)
        rules.group_added()
    assert rules.allowance == MIN_SIZE


def test_report_of_an_aborted_transaction_is_not_taken_for_the_next() -> None:
    rules = begun()
    view = View(waiting=[A])
    step = rules.next_step(view, 0)
    rules.doom("meanwhile")
    rules.partitions_added(step.partitions)
    rules.group_added()
    rules.rewound()
    rules.producer_began()
    assert rules.next_step(view, 1).act is Act.ADD_PARTITIONS
    assert not rules.lets(A)
