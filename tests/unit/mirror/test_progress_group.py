"""Whose a group at the source is: a mirror commits in none that consumers go on from."""

from __future__ import annotations

import pytest

from millrace.broker.client.group_offsets import CommittedOffset
from millrace.mirror.sources.progress_group import COMMIT_AGAIN_AFTER_MS, another_owner, is_due, mark_of

KEY = ("flights", 3)
OURS = {KEY: CommittedOffset(10, -1, mark_of("aggregate"))}


def test_group_that_is_new_or_our_own_is_committed_in() -> None:
    assert another_owner("progress", 0, "", {}, "aggregate") is None
    assert another_owner("progress", 0, "", OURS, "aggregate") is None


@pytest.mark.parametrize(
    ("member_count", "protocol_type", "offsets", "said"),
    [
        (2, "consumer", OURS, "2 members of"),
        (0, "consumer", OURS, "members that are away"),
        (0, "consumer", {KEY: CommittedOffset(7)}, "flights-3 at 7"),
        (0, "", {**OURS, ("flights", 1): CommittedOffset(7)}, "flights-1 at 7"),  # set by hand
        (0, "", {KEY: CommittedOffset(7, -1, mark_of("another"))}, "flights-3 at 7"),
    ],
)
def test_group_of_somebody_else_is_left_alone(
    member_count: int, protocol_type: str, offsets: dict[tuple[str, int], CommittedOffset], said: str
) -> None:
    reason = another_owner("billing", member_count, protocol_type, offsets, "aggregate")
    assert reason is not None
    assert reason.startswith("billing ")
    assert said in reason
    assert "choose a name for progress_group" in reason


def test_what_does_not_move_is_committed_again_before_the_source_forgets_it() -> None:
    assert is_due(None, 5, 0)
    assert is_due((4, 0), 5, 0)
    assert not is_due((5, 0), 5, COMMIT_AGAIN_AFTER_MS - 1)
    assert is_due((5, 0), 5, COMMIT_AGAIN_AFTER_MS)
