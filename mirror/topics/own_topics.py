"""The topics of the target that a mirror keeps its own records in: their names, widths and settings. Pure.

All are read as tables: the newest record of a key is all that counts of them, and they are read from their
beginning: the positions at every assignment, while partitions wait. What is read in vain is the segment that
is written to, which no compaction touches, and what was written since the last one. By a cluster's defaults
that is a gigabyte, five million positions, and half of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millrace.broker.protocol.system_topics import POSITIONS_TOPIC_PREFIX, ROUTES_TOPIC_PREFIX

# Some 35,000 positions.
SEGMENT_BYTES = 8 << 20

TABLE_CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(SEGMENT_BYTES),
    "min.cleanable.dirty.ratio": "0.1",
}


class OwnTopic(NamedTuple):
    """One of each mirror's. `partitions` and `configs`: what it is created with."""

    prefix: str
    partitions: int = 1
    configs: Mapping[str, str] = TABLE_CONFIGS

    def of(self, mirror: str) -> str:
        """Its name."""
        return f"{self.prefix}{mirror}"


POSITIONS = OwnTopic(POSITIONS_TOPIC_PREFIX)
STARTS = OwnTopic("millrace.starts.")
ROUTES = OwnTopic(ROUTES_TOPIC_PREFIX)
WISHES = OwnTopic("millrace.control.")
# Its width is final: it says where a source topic's map is.
OFFSET_MAP = OwnTopic(
    "millrace.offsets.", 4, {**TABLE_CONFIGS, "segment.bytes": str(32 << 20), "segment.ms": "86400000"}
)
OWN_TOPICS = (POSITIONS, STARTS, ROUTES, WISHES, OFFSET_MAP)
