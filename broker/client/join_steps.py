"""Where a member of a group is within a join (`group_member`), and who waits for whom there."""

from __future__ import annotations

import enum


class JoinStep(enum.Enum):
    """Of a join; the value is what is told of one that takes long."""

    REACHING = ""  # no request is out: what the cluster says is told
    JOINING = "the group's coordinator holds the answer back: it waits for the other members"
    SHARING = "this member leads the group and has not shared out its work yet"
    FOLLOWING = "the group's leader has not shared out its work yet"
    RECORDING = "the group's coordinator has not taken the shares yet"


# A request is out whose answer waits for others.
HELD_BACK = (JoinStep.JOINING, JoinStep.FOLLOWING, JoinStep.RECORDING)
# The others wait for a member that is here, or may be.
WAITED_FOR = (JoinStep.JOINING, JoinStep.SHARING)
