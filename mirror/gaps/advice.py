"""What an operator can do about a gap, in a sentence. Pure.

Shown by the status (JSON, table, page). Every class has its sentence; the commands are the same for all:
`millrace mirror retry` tries the stretch again, `millrace mirror skip` lets it pass.
"""

from __future__ import annotations

from millrace.mirror.gaps.gaps import GapClass

_TODO = {
    GapClass.EXPIRED: "The source has deleted these records, so they cannot be carried any more: "
    "skip goes on with the oldest that is left.",
    GapClass.RECREATED: "This is another topic of the same name, and what the old one still held is gone, "
    "also what came after the mirror's last look at it: "
    "skip goes on with its first record.",
    GapClass.TRUNCATED: "The source lost records that it had shown (an unclean election, or a disk): "
    "skip goes on where its log now ends; the target may hold records that the source no longer has.",
    GapClass.TOO_LARGE: "The target takes no record of this size: raise max.message.bytes of its topic and "
    "retry, or skip.",
    GapClass.UNPACKED_TOO_LARGE: "The batch has to be written anew (it has holes, or a broker's timestamps), "
    "and its records take more memory than is given to any: skip, or produce them again in smaller batches.",
    GapClass.REFUSED: "The target does not take these records as they are: change its topic's settings and "
    "retry, or skip.",
    GapClass.CORRUPT: "The batch is damaged at the source: let a good replica lead there and retry, or skip.",
    GapClass.POSITION_LOST: "Nobody knows how far this partition was carried: skip goes on at the end of "
    "the source's log, and what lies before it is not carried; retry, as resume, carries the whole log, and "
    "what was carried before comes twice.",
}


def what_to_do(gap_class: GapClass) -> str:
    return _TODO[gap_class]
