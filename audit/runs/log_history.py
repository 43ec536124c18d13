"""Whether a log is still the one that was read: by its leader epochs (KIP-101, KIP-279, KIP-320). Pure.

A log that was shortened (an unclean election, a disk lost) gives its offsets out again, and may have grown
beyond where somebody stood. Offsets alone do not show it. Its history does: a record is told by its epoch and
its offset, so two logs are one up to the first offset at which their epochs differ.

Called by `resuming` for the audit's own positions, and by `reading_plan` and `reconciling` for those of
mirrors and groups, which say in which epoch the last batch before them was written.
"""

from __future__ import annotations

from millrace.broker.client.leader_epochs import EpochEnds, EpochStarts, is_partial

MAX_OFFSET = 2**63 - 1


def parts_at(ours: EpochStarts, end: int, theirs: EpochStarts, older: EpochEnds = ()) -> int | None:
    """The first offset below `end` at which a log that was read, of the epochs `ours`, is known to differ
    from the leader's; None where none is. Of the leader's, `theirs` are the newest epochs, and `older` what
    it answered for those of ours that are older.

    Two logs that have an epoch in common are one up to where the first of them leaves it (KIP-279), however
    many came since. (That it begins later in one of them is compaction's doing: a replica that was made since
    knows only what was left.) Where they have none, nothing tells what is one: they differ from 0 on.
    """
    known = [each for each in until(ours, end) if each[0] >= 0]
    if not known or not theirs:
        return None
    # What follows in ours was written while no leader told its epoch.
    left = told_to = next((start for epoch, start in ours if epoch < 0), end)
    newest = known[-1][0]
    for epoch, start in reversed(known):
        if epoch <= newest:
            newest, ended = _end_of(epoch, theirs, older)
            if newest == epoch:
                parts = min(left, ended)
                return parts if parts < told_to else None
        left = start
    return 0


def _end_of(epoch: int, theirs: EpochStarts, older: EpochEnds) -> tuple[int, int]:
    """As a leader answers: its newest epoch that is not above, and where the next one begins."""
    later = [start for each, start in theirs if each > epoch]
    if not later:
        return theirs[-1][0], MAX_OFFSET
    found = [each for each, _ in theirs if each <= epoch]
    if found:
        return found[-1], later[0]
    if not is_partial(theirs):
        return epoch, later[0]  # older than all that is left: where that begins
    return next(((newest, end) for asked, newest, end in older if asked == epoch), (-1, -1))


def until(history: EpochStarts, end: int) -> EpochStarts:
    """The history of what lies below `end`."""
    return tuple((epoch, start) for epoch, start in history if start < end)


def holds_to(history: EpochStarts, next_offset: int, epoch: int) -> int:
    """Up to where somebody's position is one in this log, who stands before `next_offset` and whose last
    batch was of `epoch`.

    Where their epoch ended in this log, theirs is another one. An epoch that this log does not have, or that
    is older than what was asked for, tells nothing of where the two part, so that none of it is taken for
    read; unless the log, of which retention took the begin, begins behind them.
    """
    if epoch < 0 or not history:
        return next_offset
    if epoch < history[0][0]:
        return next_offset if next_offset <= history[0][1] and not is_partial(history) else 0
    later = [start for each, start in history if each > epoch]
    if not later:
        return next_offset
    return min(next_offset, later[0]) if any(each == epoch for each, _ in history) else 0
