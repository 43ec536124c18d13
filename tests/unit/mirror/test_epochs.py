"""Where two histories part, against two logs that are written down record by record."""

from __future__ import annotations

import random

from millrace.broker.protocol.mirror_positions import decode_value, encode_value
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.sources.epochs import MAX_EPOCHS, EpochHistory
from tests.unit.mirror.pipeline_stage import (
    SECOND,
    Around,
    Target,
    answer,
    batch,
    pipeline_of,
    started,
)


def test_histories_part_where_the_first_of_them_leaves_the_common_epoch() -> None:
    history = EpochHistory(3, 50)
    history.fetched(5, 100)
    # The leader wrote on in epoch 3 up to 150: 100..149 there are records that were never fetched.
    assert history.parts_at(3, 150, 200) == (100, 3)
    assert history.parts_at(3, 80, 200) == (80, 3)
    assert history.parts_at(5, 120, 200) == (120, 5)


def test_the_leader_is_asked_again_with_our_own_epoch() -> None:
    history = EpochHistory(1, 0)
    history.fetched(4, 10)
    history.fetched(6, 20)
    # In our log epoch 4 comes before 20; whether the leader has it, is not said yet.
    assert history.parts_at(5, 25, 30) == (20, 4)


def test_the_next_owner_and_a_rewound_lane_know_where_the_last_epoch_began() -> None:
    """A replica that left epoch 5 at 60 and leads by an election that was not clean has other records from 50
    on, where ours went on in epoch 7: whoever took its word would never carry 50..59."""

    def parted(pipeline: PartitionPipeline) -> tuple[int, int]:
        return pipeline.progress.epochs.parts_at(5, 60, pipeline.progress.fetch_offset)

    first, target, _ = started()
    first.accept(answer(batch(0, [5] * 50, epoch=5), batch(50, [5] * 50, epoch=7)))
    target.acknowledge(2)
    position = first.position_to_write(SECOND)
    assert position is not None
    assert (position.next_offset, position.leader_epoch, position.epoch_from) == (100, 7, 50)
    second = pipeline_of(first.partition, first.target, Target(), Around())
    known = decode_value(encode_value(position))
    second.ready(known)
    assert parted(first) == parted(second) == (50, 5)
    second.rewind()
    assert parted(second) == (50, 5)
    first.rewind(known)
    assert parted(first) == (50, 5)


def test_what_was_fetched_before_the_assignment_bounds_the_answer() -> None:
    """And the leader's word is taken there: asked again with our epoch it would say the same for ever."""
    assert EpochHistory(3, 50).parts_at(2, 70, 90) == (50, 2)
    assert EpochHistory(3, 50).parts_at(2, 70, 50) == (50, 2)


def test_an_epoch_from_before_the_assignment_that_the_leader_left_out_is_not_asked_for_again() -> None:
    """The position's epoch is all that is known; where the leader has ended an older one before it, the same
    question would only be a second gap, without records."""
    assert EpochHistory(1, 6).parts_at(0, 3, 6) == (3, 0)
    assert EpochHistory(1, 6).parts_at(1, 3, 6) == (3, 1)


def test_a_cut_forgets_the_epochs_behind_it() -> None:
    history = EpochHistory(1, 0)
    history.fetched(2, 10)
    history.fetched(3, 20)
    history.cut(20)
    assert history.parts_at(2, 99, 99)[0] == 99
    history.cut(10)
    assert history.parts_at(1, 99, 99)[0] == 99
    history.cut(0)
    assert history.parts_at(0, 99, 99)[0] == 0


def test_old_epochs_are_forgotten_on_the_safe_side() -> None:
    history = EpochHistory(0, 0)
    for epoch in range(1, MAX_EPOCHS + 10):
        history.fetched(epoch, epoch * 10)
    assert history.parts_at(3, 5_000, 9_000)[0] <= 100
    assert len(history._starts) == MAX_EPOCHS


def _log(rng: random.Random, epochs: list[int]) -> list[int]:
    """The epoch of each record."""
    return [epoch for epoch in epochs for _ in range(rng.randint(0, 5))]


def test_never_after_the_first_record_that_differs() -> None:
    """A leader and a reader share a stretch, then each goes its way (an epoch has one leader, so none is in
    both behind the fork, but one of them may have gone on in the last shared one). What the leader answers
    for the reader's last epoch, again and again as the reader goes back, leads to no later than the first
    difference."""
    for seed in range(500):
        rng = random.Random(seed)
        shared = [0, *_log(rng, [0, 1, 2])]
        ours = shared + _log(rng, sorted(rng.sample(range(4, 20, 2), 3)))
        leaders = shared + _log(rng, [*sorted(rng.sample(range(3, 20, 2), 3)), 31])
        if rng.random() < 0.5:
            leaders = shared + shared[-1:] * rng.randint(1, 8) + leaders[len(shared) :]
        same = 0
        while same < min(len(ours), len(leaders)) and ours[same] == leaders[same]:
            same += 1
        history = EpochHistory(-1, 0)
        for offset, epoch in enumerate(ours):
            if offset == 0 or ours[offset - 1] != epoch:
                history.fetched(epoch, offset)
        at, epoch = len(ours), ours[-1]
        for _ in range(20):
            answer = max(each for each in leaders if each <= epoch)
            end = max(offset for offset, each in enumerate(leaders) if each <= epoch) + 1
            if answer == epoch and end >= at:
                break
            at, epoch = history.parts_at(answer, end, at)
            history.cut(at)
        assert at <= same or ours[same:at] == leaders[same:at], f"seed {seed}: {at}, {ours}, {leaders}"
