from __future__ import annotations

import pytest

from millrace.mirror.progress import BrokenCommitRule, PartitionProgress


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
    progress.split(span, 2)
    progress.failed(span)
    progress.failed(span)
    progress.gap_recorded(span)
    assert (progress.position, progress.is_blocked) == (0, True)
    progress.gap_recorded(span)
    assert progress.position == 5


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
