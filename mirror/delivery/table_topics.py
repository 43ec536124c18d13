"""How the topics are set that the mirror keeps its own records in, read as tables. Pure.

Used wherever one of them is created: positions, marks of beginnings, routes, wishes, the offset map. The
newest record of a key is all that counts of them, and they are read from their beginning: the positions at
every assignment, while partitions wait. What is read in vain is the segment that is written to, which no
compaction touches, and what was written since the last one. By a cluster's defaults that is a gigabyte, five
million positions, and half of the rest.
"""

from __future__ import annotations

# Some 35,000 positions.
SEGMENT_BYTES = 8 << 20

TABLE_CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(SEGMENT_BYTES),
    "min.cleanable.dirty.ratio": "0.1",
}
