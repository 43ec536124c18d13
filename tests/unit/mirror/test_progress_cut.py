"""What was fetched is taken back, in whole or from the middle of a span on, and fetched again."""

from __future__ import annotations

import pytest

from millrace.mirror.delivery.progress import BrokenCommitRule, PartitionProgress


def test_what_lies_before_the_cut_goes_on_as_if_nothing_had_been_behind_it() -> None:
    progress = PartitionProgress(0)
    first = progress.fetched(5, 1, 50, leader_epoch=1)
    second = progress.fetched(10, 2, 100, leader_epoch=2)
    third = progress.fetched(15, 1, 70, leader_epoch=3)
    # The later piece of the second span, from 8 on, and the third span were never sent.
    progress.taken_back(second)
    progress.taken_back(third)
    progress.cut(8)
    assert (progress.fetch_offset, progress.fetched_leader_epoch) == (8, 2)
    assert progress.outstanding_size == 150
    progress.acknowledged(first)
    assert progress.position == 5
    progress.acknowledged(second)
    assert (progress.position, progress.outstanding_size, progress.position_leader_epoch) == (8, 0, 2)
    assert progress.is_drained
    progress.acknowledged(progress.fetched(15, 1, leader_epoch=3))
    assert progress.position == 15


def test_gap_that_is_tried_again_blocks_no_longer() -> None:
    progress = PartitionProgress(0)
    progress.acknowledged(progress.fetched(5, 1))
    failing = progress.fetched(9, 1)
    progress.failed(failing)
    assert progress.is_blocked
    progress.tried_again(failing)
    progress.cut(7)
    assert (progress.is_blocked, progress.position, progress.fetch_offset) == (False, 7, 7)


def test_gap_behind_the_cut_is_forgotten_with_its_span() -> None:
    progress = PartitionProgress(0)
    progress.fetched(5, 1)
    failing = progress.fetched(9, 1)
    progress.failed(failing)
    progress.cut(5)
    assert not progress.is_blocked
    progress.fetched(6, 1)


@pytest.mark.parametrize("offset", [2, 11])
def test_nothing_is_cut_that_is_settled_or_was_not_fetched(offset: int) -> None:
    progress = PartitionProgress(0)
    progress.acknowledged(progress.fetched(5, 1))
    progress.fetched(10, 1)
    with pytest.raises(BrokenCommitRule):
        progress.cut(offset)


def test_cut_of_an_assignment_that_ended_changes_nothing() -> None:
    progress = PartitionProgress(0)
    span = progress.fetched(5, 1)
    progress.close()
    progress.taken_back(span)
    progress.tried_again(span)
    progress.cut(2)
    assert progress.position == 0
