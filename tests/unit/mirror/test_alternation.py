from __future__ import annotations

from millrace.mirror.delivery.alternation import Alternation
from millrace.mirror.delivery.lane import Identity, Item, Outcome, TargetLane
from millrace.mirror.delivery.transaction import Act, Phase, Seat, Step
from millrace.mirror.topics.routes import TargetPartition
from tests.unit.mirror.test_transaction import SEAT, View

A = TargetPartition("a", 0)
FIRST, SECOND = 0, 1


def begun() -> Alternation:
    pair = Alternation(250)
    for index in (FIRST, SECOND):
        assert pair.next_step(index, View(), 0).act is Act.BEGIN_PRODUCER
        pair.both[index].producer_began()
    return pair


def open_one(pair: Alternation, index: int, view: View, now_ms: int = 0) -> None:
    step = pair.next_step(index, view, now_ms)
    assert step.act is Act.ADD_PARTITIONS
    pair.both[index].partitions_added(step.partitions)
    assert pair.next_step(index, view, now_ms).act is Act.ADD_GROUP
    pair.both[index].group_added()


def write_one(pair: Alternation, index: int, now_ms: int = 0) -> None:
    assert pair.next_step(index, View(), now_ms).act is Act.WRITE_POSITIONS
    pair.both[index].positions_written()


def first_fencing() -> Alternation:
    pair = begun()
    open_one(pair, FIRST, View(waiting=[A]))
    write_one(pair, FIRST)
    return pair


def first_ending_second_open() -> Alternation:
    pair = first_fencing()
    open_one(pair, SECOND, View(waiting=[A]))
    assert pair.next_step(FIRST, View(), 0).act is Act.FENCE
    pair.both[FIRST].fence_passed()
    assert pair.next_step(FIRST, View(), 0).act is Act.END
    return pair


def test_second_is_filled_while_the_first_commits() -> None:
    pair = begun()
    view = View(waiting=[A])
    open_one(pair, FIRST, view)
    assert pair.next_step(SECOND, view, 0).act is Act.WAIT, "it has not the turn"
    write_one(pair, FIRST)
    open_one(pair, SECOND, view)
    assert (pair.turn, pair.filling.lets(A)) == (SECOND, True)


def test_second_takes_what_comes_until_the_first_is_about_to_be_committed() -> None:
    pair = first_fencing()
    view = View(waiting=[A])
    open_one(pair, SECOND, view)
    pair.filling.sent(1, 0)
    pair.next_step(SECOND, view, 1)
    assert pair.filling.phase is Phase.OPEN
    pair.both[FIRST].fence_passed()
    assert pair.next_step(FIRST, view, 1).act is Act.END
    pair.next_step(SECOND, View(waiting=[A], is_settled=False), 2)
    assert pair.filling.phase is Phase.SEALED


def test_transaction_is_not_cut_short_while_batches_wait_to_be_sent() -> None:
    pair = begun()
    view = View(waiting=[A], more_is_coming=True, is_settled=False)
    open_one(pair, FIRST, view)
    pair.filling.sent(1, 1)
    pair.next_step(FIRST, view, 1)
    assert pair.filling.phase is Phase.OPEN
    view.more_is_coming = False
    pair.next_step(FIRST, view, 2)
    assert pair.filling.phase is Phase.SEALED


def test_second_ends_only_after_the_first() -> None:
    pair = first_ending_second_open()
    write_one(pair, SECOND)
    assert pair.next_step(SECOND, View(), 1).act is Act.FENCE
    pair.both[SECOND].fence_passed()
    assert pair.next_step(SECOND, View(), 1).act is Act.WAIT
    pair.committed(FIRST, 2)
    assert pair.next_step(SECOND, View(), 2).act is Act.END


def test_lost_first_takes_the_second_along() -> None:
    pair = first_fencing()
    open_one(pair, SECOND, View(waiting=[A]))
    pair.both[FIRST].doom("the coordinator is away", {A})
    assert pair.next_step(SECOND, View(), 1) == Step(Act.REWIND, blamed=frozenset({A}))
    assert pair.lost_by == "the coordinator is away", "the second one's reason is none"
    pair.rewound()
    for index in (FIRST, SECOND):
        assert pair.next_step(index, View(), 2).act is Act.BEGIN_PRODUCER


def test_lost_second_waits_until_the_first_is_decided() -> None:
    pair = first_ending_second_open()
    pair.filling.doom("the sequence is lost")
    assert pair.next_step(SECOND, View(), 1).act is Act.WAIT
    assert pair.next_step(FIRST, View(), 1).act is Act.END
    pair.committed(FIRST, 2)
    assert pair.next_step(SECOND, View(), 2).act is Act.REWIND
    pair.rewound()
    assert pair.both[FIRST].phase is Phase.NO_PRODUCER, "its sequences were forgotten with the rows"


def test_nothing_opens_until_an_unknown_outcome_is_read() -> None:
    pair = first_ending_second_open()
    pair.both[FIRST].outcome_unknown("fenced")
    view = View(waiting=[A])
    for index in (SECOND, FIRST):
        assert pair.next_step(index, view, 1).act is Act.BEGIN_PRODUCER
        pair.both[index].producer_began()
    assert pair.next_step(SECOND, view, 2).act is Act.WAIT
    assert pair.next_step(FIRST, view, 2).act is Act.READ_POSITIONS
    pair.positions_read()
    assert Act.ADD_PARTITIONS in {pair.next_step(index, view, 3).act for index in (FIRST, SECOND)}


def test_lost_seat_dooms_both() -> None:
    pair = first_fencing()
    open_one(pair, SECOND, View(waiting=[A]))
    other = View(seat=Seat("m2", SEAT.generation + 1))
    acts = [pair.next_step(index, other, 1).act for index in (FIRST, SECOND)]
    assert acts == [Act.REWIND, Act.REWIND]
    assert not pair.holds_records


def test_id_whose_coordinator_is_away_gives_the_turn_back() -> None:
    pair = Alternation(250)
    pair.next_step(FIRST, View(), 0)
    pair.both[SECOND].producer_began()
    pair.both[FIRST].producer_refused(0, 500)
    assert pair.next_step(SECOND, View(waiting=[A]), 1).act is Act.ADD_PARTITIONS


def test_row_goes_on_where_an_identity_left_it() -> None:
    first, second = Identity(1, 0), Identity(2, 0)
    row: TargetLane[Item] = TargetLane(first)

    def send(count: int) -> int:
        item = Item(count, 1)
        row.enqueue(item)
        assert row.next_to_send(0) is item
        row.answered(item, Outcome.ACKNOWLEDGED, 0)
        return item.base_sequence

    assert send(3) == 0
    row.switch(second)
    assert send(5) == 0
    row.switch(first)
    assert send(1) == 3
    row.switch(second)
    assert send(1) == 5
    row.switch(Identity(1, 1))
    assert send(1) == 0, "a new epoch begins anew"
