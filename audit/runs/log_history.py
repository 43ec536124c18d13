"""Whether a log is still the one that was read: by its leader epochs (KIP-101, KIP-279, KIP-320). Pure.

A log that was shortened (an unclean election, a disk lost) gives its offsets out again, and may have grown
beyond where somebody stood. Offsets alone do not show it. Its history does: a record is told by its epoch and
its offset, so two logs are one up to the first offset at which their epochs differ.

Called by `reading_plan` for the audit's own positions, and for those of mirrors and groups, which say in
which epoch the last batch before them was written.
"""

from __future__ import annotations

from millrace.broker.client.leader_epochs import EpochStarts


def epoch_at(history: EpochStarts, offset: int) -> int:
    """The epoch in which the offset was written; -1 where that is not known."""
    found = -1
    for epoch, start in history:
        if start > offset:
            break
        found = epoch
    return found


def parts_at(ours: EpochStarts, theirs: EpochStarts, first: int, end: int) -> int | None:
    """The first offset of [first, end) at which the histories are known to differ.

    An epoch begins once. Where both have it, and one of them later, compaction took its first records there:
    a replica that was made since knows only what was left.
    """
    bounds = {first, *(start for _, start in (*ours, *theirs) if first < start < end)}
    for offset in sorted(bounds) if first < end else ():
        here, there = epoch_at(ours, offset), epoch_at(theirs, offset)
        if here < 0 or there < 0 or here == there:
            continue
        other = theirs if here > there else ours
        if all(epoch != max(here, there) for epoch, _ in other):
            return offset
    return None


def until(history: EpochStarts, end: int) -> EpochStarts:
    """The history of what lies below `end`."""
    return tuple((epoch, start) for epoch, start in history if start < end)


def holds_to(history: EpochStarts, next_offset: int, epoch: int) -> int:
    """Up to where somebody's position is one in this log, who stands before `next_offset` and whose last
    batch was of `epoch`.

    Where their epoch ended in this log, theirs is another one. An epoch that this log does not have tells
    nothing of where the two part, so that none of it is taken for read; unless the log, of which retention
    took the begin, begins behind them.
    """
    if epoch < 0 or not history:
        return next_offset
    if epoch < history[0][0]:
        return next_offset if next_offset <= history[0][1] else 0
    later = [start for each, start in history if each > epoch]
    if not later:
        return next_offset
    return min(next_offset, later[0]) if any(each == epoch for each, _ in history) else 0
