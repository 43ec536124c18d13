from __future__ import annotations

import pytest

from millrace.mirror.delivery.lane import (
    REST_AFTER_MS,
    SEQUENCE_MODULUS,
    Identity,
    Item,
    Outcome,
    TargetLane,
    replayed_after_ms,
)

OLD_BEFORE_MS = 1_000


class Numbered(Item):
    """A batch of a lane."""

    def __init__(self, number: int, record_count: int = 10, *, is_replayed: bool = False) -> None:
        super().__init__(record_count, 10 * record_count, OLD_BEFORE_MS - is_replayed)
        self.number = number


def lane(count: int) -> TargetLane[Numbered]:
    made: TargetLane[Numbered] = TargetLane(Identity(7, 0))
    for number in range(count):
        made.enqueue(Numbered(number))
    return made


def send_all(
    of: TargetLane[Numbered], now_ms: int = 0, *, old_before_ms: int = OLD_BEFORE_MS
) -> list[Numbered]:
    sent = []
    while (item := of.next_to_send(now_ms, replayed_before_ms=old_before_ms)) is not None:
        sent.append(item)
    return sent


def confirmed(count: int) -> TargetLane[Numbered]:
    made = lane(count + 1)
    (first,) = send_all(made)
    made.answered(first, Outcome.ACKNOWLEDGED, 0)
    return made


def test_first_batch_of_an_identity_goes_alone() -> None:
    made = lane(3)
    assert [item.number for item in send_all(made)] == [0]


def test_five_go_together_in_sequence_after_that() -> None:
    made = confirmed(9)
    sent = send_all(made)
    assert [item.number for item in sent] == [1, 2, 3, 4, 5]
    assert [item.base_sequence for item in sent] == [10, 20, 30, 40, 50]


def test_rest_makes_it_careful_again() -> None:
    made = confirmed(3)
    assert len(send_all(made, REST_AFTER_MS + 1)) == 1


def test_failed_row_is_sent_again_from_its_first_with_the_same_sequences() -> None:
    made = confirmed(3)
    first, second, third = send_all(made)
    assert made.answered(first, Outcome.RETRY, 0) is Outcome.RETRY
    assert send_all(made, 10_000) == []
    assert made.answered(second, Outcome.OUT_OF_ORDER, 0) is Outcome.RETRY
    assert made.answered(third, Outcome.OUT_OF_ORDER, 0) is Outcome.RETRY
    assert not made.needs_identity
    assert send_all(made, 10_000) == [first]
    assert first.base_sequence == 10
    made.answered(first, Outcome.ACKNOWLEDGED, 10_000)
    assert send_all(made, 10_000) == [second, third]
    assert [second.base_sequence, third.base_sequence] == [20, 30]


def test_back_off_grows_and_ends_with_success() -> None:
    made = lane(1)
    waits = []
    for _ in range(12):
        (item,) = send_all(made, made.retry_at_ms)
        now_ms = made.retry_at_ms
        made.answered(item, Outcome.RETRY, now_ms)
        waits.append(made.retry_at_ms - now_ms)
    assert waits[:3] == [50, 100, 200]
    assert waits[-1] == 5_000
    assert made.is_failing
    (item,) = send_all(made, made.retry_at_ms)
    made.answered(item, Outcome.ACKNOWLEDGED, made.retry_at_ms)
    assert not made.is_failing


def test_refused_batch_leaves_and_the_others_take_its_sequence() -> None:
    made = confirmed(2)
    first, second = send_all(made)
    refused: list[int] = []
    result = made.answered(first, Outcome.REFUSED, 0, on_refused=lambda item: refused.append(item.number))
    assert (result, refused) == (Outcome.REFUSED, [1])
    made.answered(second, Outcome.OUT_OF_ORDER, 0)
    assert send_all(made, 10_000) == [second]
    assert second.base_sequence == 10


def test_refusal_behind_a_failure_frees_no_sequence() -> None:
    """The one that failed may be in the log: its number, and those behind it, are taken."""
    made = confirmed(2)
    first, second = send_all(made)
    made.answered(first, Outcome.RETRY, 0)
    assert made.answered(second, Outcome.REFUSED, 0) is Outcome.RETRY
    assert send_all(made, 10_000) == [first]
    made.answered(first, Outcome.ACKNOWLEDGED, 10_000)
    assert send_all(made, 10_000) == [second]
    assert [first.base_sequence, second.base_sequence] == [10, 20]


def test_refusal_of_a_batch_that_may_be_in_the_log_gives_its_sequence_to_nobody() -> None:
    """It was appended, the answer was lost, and by the second try a limit was lowered. The batch behind it
    would be taken for its duplicate, and be lost."""
    made = confirmed(2)
    first, second = send_all(made)
    made.answered(first, Outcome.RETRY, 0)
    made.answered(second, Outcome.OUT_OF_ORDER, 0)
    assert send_all(made, 10_000) == [first]
    refused: list[int] = []
    result = made.answered(
        first, Outcome.REFUSED, 10_000, on_refused=lambda item: refused.append(item.number)
    )
    assert (result, refused, made.needs_identity) == (Outcome.RETRY, [], True)
    made.renew(Identity(8, 0))
    assert send_all(made, 10_000) == [first]
    result = made.answered(
        first, Outcome.REFUSED, 10_000, on_refused=lambda item: refused.append(item.number)
    )
    assert (result, refused, made.needs_identity) == (Outcome.REFUSED, [1], False)
    assert send_all(made, 10_000) == [second]
    assert (second.base_sequence, second.identity) == (0, Identity(8, 0))


def test_refusal_after_tries_that_are_known_to_be_in_no_log_is_final() -> None:
    made = confirmed(2)
    first, second = send_all(made)
    made.answered(first, Outcome.NOT_TAKEN, 0)
    made.answered(second, Outcome.OUT_OF_ORDER, 0)
    (again,) = send_all(made, 10_000)
    assert made.answered(again, Outcome.REFUSED, 10_000) is Outcome.REFUSED
    assert not made.needs_identity
    assert send_all(made, 10_000) == [second]
    assert second.base_sequence == 10


@pytest.mark.parametrize("lost_before_the_refusal", [True, False])
def test_nothing_moves_up_while_a_batch_behind_the_refused_one_may_be_in_the_log(
    lost_before_the_refusal: bool,
) -> None:
    """A request that was given up may arrive late: just when its sequence is the next one, and then whoever
    has got that sequence meanwhile is taken for a duplicate."""
    made = confirmed(3)
    first, second, third = send_all(made)
    if lost_before_the_refusal:
        made.answered(first, Outcome.NOT_TAKEN, 0)
        made.answered(second, Outcome.RETRY, 0)
        made.answered(third, Outcome.OUT_OF_ORDER, 0)
        (first,) = send_all(made, 10_000)
        made.answered(first, Outcome.REFUSED, 10_000)
    else:
        made.answered(first, Outcome.REFUSED, 0)
        made.answered(second, Outcome.RETRY, 0)
        made.answered(third, Outcome.OUT_OF_ORDER, 0)
    assert made.needs_identity
    assert send_all(made, 20_000) == []


def test_batch_acknowledged_ahead_of_a_refused_one_holds_up_nobody() -> None:
    made = confirmed(3)
    first, second, third = send_all(made)
    made.answered(first, Outcome.NOT_TAKEN, 0)
    made.answered(second, Outcome.ACKNOWLEDGED, 0)
    made.answered(third, Outcome.OUT_OF_ORDER, 0)
    assert send_all(made, 10_000) == [first]
    assert made.answered(first, Outcome.REFUSED, 10_000) is Outcome.REFUSED
    assert made.needs_identity, "in the log behind one that is not"
    made.renew(Identity(8, 0))
    assert send_all(made, 10_000) == [third]
    assert len(made) == 1


def test_batch_acknowledged_ahead_of_withdrawn_ones_holds_up_nobody() -> None:
    made = confirmed(4)
    first, second, third, last = send_all(made)
    made.answered(first, Outcome.NOT_TAKEN, 0)
    made.answered(second, Outcome.NOT_TAKEN, 0)
    made.answered(third, Outcome.ACKNOWLEDGED, 0)
    made.answered(last, Outcome.OUT_OF_ORDER, 0)
    (first,) = send_all(made, 10_000)
    made.answered(first, Outcome.REFUSED, 10_000)
    assert made.withdraw(lambda item: item is second) == [second]
    made.renew(Identity(8, 0))
    assert send_all(made, 10_000) == [last]


def test_halves_take_the_place_of_a_refused_batch() -> None:
    made = confirmed(2)
    first, second = send_all(made)
    made.answered(
        first,
        Outcome.REFUSED,
        0,
        on_refused=lambda item: made.replace(item, [Numbered(11, 4), Numbered(12, 6)]),
    )
    made.answered(second, Outcome.OUT_OF_ORDER, 0)
    (half,) = send_all(made, 10_000)
    made.answered(half, Outcome.ACKNOWLEDGED, 10_000)
    rest = send_all(made, 10_000)
    assert [(item.number, item.base_sequence) for item in rest] == [(12, 14), (2, 20)]


def test_out_of_order_first_batch_asks_for_a_new_identity() -> None:
    made = confirmed(2)
    first, second = send_all(made)
    made.answered(first, Outcome.OUT_OF_ORDER, 0)
    made.answered(second, Outcome.OUT_OF_ORDER, 0)
    assert made.needs_identity
    assert send_all(made, 10_000) == []
    made.renew(Identity(8, 0))
    assert send_all(made, 10_000) == [first]
    assert (first.base_sequence, first.identity) == (0, Identity(8, 0))


def test_batch_acknowledged_ahead_keeps_its_place_in_the_count() -> None:
    made = confirmed(9)
    sent = send_all(made)
    made.answered(sent[0], Outcome.RETRY, 0)
    for item in sent[1:]:
        made.answered(item, Outcome.ACKNOWLEDGED, 0)
    assert send_all(made, 10_000) == [sent[0]]
    made.answered(sent[0], Outcome.ACKNOWLEDGED, 10_000)
    assert [item.base_sequence for item in send_all(made, 10_000)] == [60, 70, 80, 90]


def test_withdrawal_leaves_what_was_sent_and_what_stands_before_it() -> None:
    made = confirmed(8)
    send_all(made)
    assert [item.number for item in made.withdraw(lambda item: item.number % 2 == 0)] == [6, 8]
    assert len(made) == 6


def test_sequence_wraps() -> None:
    made = lane(2)
    made._next_sequence = SEQUENCE_MODULUS - 5
    (first,) = send_all(made)
    made.answered(first, Outcome.ACKNOWLEDGED, 0)
    (second,) = send_all(made)
    assert (first.base_sequence, second.base_sequence) == (SEQUENCE_MODULUS - 5, 5)


def test_batch_behind_a_refused_one_leaves_when_nobody_wants_it() -> None:
    made = confirmed(3)
    first, second, third = send_all(made)
    gone: list[Numbered] = []
    made.answered(
        first,
        Outcome.REFUSED,
        0,
        on_refused=lambda _: gone.extend(made.withdraw(lambda item: item is second)),
    )
    assert gone == [second]
    assert made.answered(second, Outcome.OUT_OF_ORDER, 0) is Outcome.REFUSED
    made.answered(third, Outcome.OUT_OF_ORDER, 0)
    assert send_all(made, 10_000) == [third]
    assert third.base_sequence == 10


def test_only_what_was_sent_before_is_sent_again_when_asked_so() -> None:
    made = confirmed(2)
    first = made.next_to_send(0)
    assert first is not None
    assert made.next_to_send(0, only_again=True) is None
    assert made.is_unsettled
    made.answered(first, Outcome.RETRY, 0)
    assert made.next_to_send(10_000, only_again=True) is first
    made.answered(first, Outcome.ACKNOWLEDGED, 10_000)
    assert not made.is_unsettled
    assert made.next_to_send(10_000, only_again=True) is None


def test_replayed_data_goes_one_by_one() -> None:
    """The target may forget its producer at any moment, and would then take a later one first."""
    made: TargetLane[Numbered] = TargetLane(Identity(7, 0))
    for number, is_replayed in enumerate((False, True, True, False, False, False, True, False)):
        made.enqueue(Numbered(number, is_replayed=is_replayed))
    together = []
    while sent := send_all(made):
        together.append([item.number for item in sent])
        for item in sent:
            made.answered(item, Outcome.ACKNOWLEDGED, 0)
    assert together == [[0], [1], [2], [3], [4, 5, 6], [7]]


@pytest.mark.safety
def test_what_has_become_old_since_it_came_or_was_tried_goes_one_by_one() -> None:
    """The target was away for a day."""
    made = confirmed(6)
    tried = send_all(made)
    assert len(tried) == 5
    for item in tried:
        made.answered(item, Outcome.RETRY, 0)
    day_ms, later = 24 * 3_600_000, OLD_BEFORE_MS + 1
    together = []
    while sent := send_all(made, day_ms, old_before_ms=later):
        together.append([item.number for item in sent])
        for item in sent:
            made.answered(item, Outcome.ACKNOWLEDGED, day_ms)
    assert together == [[1], [2], [3], [4], [5], [6]]


def test_what_is_old_follows_from_when_the_target_forgets() -> None:
    minute, hour = 60_000, 3_600_000
    assert replayed_after_ms(24 * hour) == 12 * hour
    assert replayed_after_ms(hour) == hour // 2
    assert replayed_after_ms(7 * 24 * hour) == 12 * hour, "it may be lowered at any moment"
    # What is under way may be so for a minute nearly: where that is all there is, everything goes alone.
    assert replayed_after_ms(minute + minute // 2) == minute // 2
    assert replayed_after_ms(minute) == 0


@pytest.mark.safety
def test_the_last_batch_in_the_log_decides_and_not_the_last_answer() -> None:
    """By its timestamps the target forgets the producer; an answer that was lost is made up for later."""
    made: TargetLane[Numbered] = TargetLane(Identity(7, 0))
    for number, is_replayed in enumerate((False, False, True, False, False)):
        made.enqueue(Numbered(number, is_replayed=is_replayed))
    (first,) = send_all(made)
    made.answered(first, Outcome.ACKNOWLEDGED, 0)
    fresh, replayed = send_all(made)
    made.answered(fresh, Outcome.RETRY, 0)
    made.answered(replayed, Outcome.ACKNOWLEDGED, 0)
    assert send_all(made, 10_000) == [fresh]
    made.answered(fresh, Outcome.ACKNOWLEDGED, 10_000)
    alone = send_all(made, 10_000)
    assert [item.number for item in alone] == [3]
    made.answered(alone[0], Outcome.ACKNOWLEDGED, 10_000)
    made.enqueue(Numbered(5))
    assert [item.number for item in send_all(made, 10_000)] == [4, 5]


@pytest.mark.safety
def test_an_identity_that_takes_over_again_is_known_by_its_own_last_batch() -> None:
    made: TargetLane[Numbered] = TargetLane(Identity(7, 0))

    def go_one_by_one(*, is_replayed: bool) -> None:
        for number in range(2):
            made.enqueue(Numbered(number, is_replayed=is_replayed))
        for _ in range(2):
            (sent,) = send_all(made)
            made.answered(sent, Outcome.ACKNOWLEDGED, 0)

    go_one_by_one(is_replayed=True)
    made.switch(Identity(8, 0))
    made.enqueue(Numbered(0))
    (sent,) = send_all(made)
    made.answered(sent, Outcome.ACKNOWLEDGED, 0)
    made.switch(Identity(7, 0))
    made.enqueue(Numbered(0))
    made.enqueue(Numbered(1))
    assert [item.number for item in send_all(made)] == [0]
