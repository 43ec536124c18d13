from __future__ import annotations

import pytest

from millrace.mirror.delivery.progress import BrokenCommitRule, PartitionProgress


def test_position_waits_for_the_oldest_piece() -> None:
    progress = PartitionProgress(100)
    first = progress.fetched(110, 1, 50)
    second = progress.fetched(120, 2, 70)
    progress.acknowledged(second)
    progress.acknowledged(second)
    assert (progress.position, progress.outstanding_size) == (100, 120)
    progress.acknowledged(first)
    assert (progress.position, progress.outstanding_size) == (120, 0)
    assert progress.position_to_write() == 120


def test_dropped_stretch_needs_no_acknowledgement() -> None:
    progress = PartitionProgress(0)
    progress.fetched(3, 0)
    assert progress.position == 3


def test_position_carries_the_epoch_of_the_batch_before_it() -> None:
    progress = PartitionProgress(0, leader_epoch=1)
    first = progress.fetched(5, 1, leader_epoch=2)
    progress.fetched(9, 1, leader_epoch=3)
    assert (progress.position_leader_epoch, progress.fetched_leader_epoch) == (1, 3)
    progress.acknowledged(first)
    assert progress.position_leader_epoch == 2


def test_failed_piece_holds_the_position_until_its_gap_is_recorded() -> None:
    progress = PartitionProgress(0)
    span = progress.fetched(5, 2)
    progress.failed(span)
    progress.acknowledged(span)
    assert progress.is_blocked
    assert progress.is_drained
    assert progress.position == 0
    progress.gap_recorded(span)
    assert (progress.position, progress.is_blocked) == (5, False)


def test_each_of_two_gaps_in_a_span_must_be_recorded() -> None:
    progress = PartitionProgress(0)
    span = progress.fetched(5, 1)
    first, second = progress.split(span, [3, 5])
    progress.failed(first)
    progress.failed(second)
    progress.gap_recorded(first)
    assert (progress.position, progress.is_blocked) == (3, True)
    progress.gap_recorded(second)
    assert progress.position == 5


def test_position_stands_between_the_halves_of_a_refused_batch() -> None:
    progress = PartitionProgress(0)
    first, second = progress.split(progress.fetched(5, 1, 11, 7), [2, 4])
    assert (second.next_offset, first.size + second.size) == (5, 11)
    progress.acknowledged(first)
    progress.failed(second)
    assert (progress.position, progress.position_leader_epoch, progress.is_exact) == (2, 7, True)


def test_stretch_of_several_batches_is_not_exact_between_them() -> None:
    progress = PartitionProgress(0)
    span = progress.fetched(5, 2)
    assert progress.is_exact
    progress.acknowledged(span)
    assert (progress.position, progress.is_exact) == (0, False)
    progress.acknowledged(span)
    assert (progress.position, progress.is_exact) == (5, True)


def test_acknowledged_behind_an_open_gap_is_not_exact() -> None:
    progress = PartitionProgress(0)
    first, second = progress.fetched(5, 1), progress.fetched(9, 1)
    progress.failed(first)
    progress.acknowledged(second)
    assert not progress.is_exact
    progress.gap_recorded(first)
    assert (progress.settled_position, progress.is_exact) == (9, True)


def test_position_in_a_transaction_is_the_committed_one() -> None:
    progress = PartitionProgress(7, transactional=True)
    progress.acknowledged(progress.fetched(9, 1, leader_epoch=2))
    assert (progress.position, progress.settled_position, progress.position_to_write()) == (7, 9, 9)
    progress.written(9, 2)
    assert (progress.position, progress.committed, progress.position_to_write()) == (9, (9, 2), None)


def test_nothing_moves_after_the_assignment_ended() -> None:
    progress = PartitionProgress(0)
    span = progress.fetched(5, 1)
    progress.close()
    progress.acknowledged(span)
    assert progress.position == 0
    assert progress.position_to_write() is None
    with pytest.raises(BrokenCommitRule):
        progress.fetched(9, 1)


def test_position_is_written_once() -> None:
    progress = PartitionProgress(7)
    assert progress.position_to_write() is None
    progress.fetched(8, 0)
    assert progress.position_to_write() == 8
    progress.written(8)
    assert progress.position_to_write() is None


def test_jump_may_go_back_and_is_written() -> None:
    progress = PartitionProgress(50, leader_epoch=4)
    progress.jump(0)
    assert (progress.position, progress.fetch_offset, progress.fetched_leader_epoch) == (0, 0, -1)
    assert progress.position_to_write() == 0


@pytest.mark.parametrize("break_it", ["twice", "backwards", "jump", "blocked"])
def test_broken_rule_is_raised(break_it: str) -> None:
    progress = PartitionProgress(10)
    span = progress.fetched(20, 1)
    with pytest.raises(BrokenCommitRule):
        if break_it == "twice":
            progress.acknowledged(span)
            progress.acknowledged(span)
        elif break_it == "backwards":
            progress.fetched(20, 1)
        elif break_it == "jump":
            progress.jump(0)
        else:
            progress.failed(span)
            progress.fetched(30, 1)
