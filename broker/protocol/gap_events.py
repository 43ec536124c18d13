"""A gap as an event in the audit's topic: what of a source's log a mirror could not carry. Pure.

Written by mirrors (`mirror/gaps/gaps.py`), read by the audit, which believes none of it before
`audit/contract/event_json.py` has looked at every field; audit/contract/EVENTS.md says it for others. The
format is final:

    key    gap/<mirror>/<source>/<topic>/<partition>/<from>/<class>[/<topic id>]
    value  {"version":1,"type":"gap", and of GapEvent the fields that FIELDS names}

The topic is compacted, and no gap takes another's place: the same one has the same key after a restart,
another topic of the same name, or another class, another key. Keys of older programs end with `from`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

VERSION = 1
TYPE = "gap"


@dataclass(frozen=True, slots=True)
class GapEvent:
    """Source offsets [from_offset, to_offset) that a mirror could not carry, with the class of the cause.

    `topic_id` is Kafka's id of the topic ("" = not known): one that is made anew gives its offsets out again.
    `target` is that of the cluster into which they were not carried ("" = not known): a mirror of the same
    name into another one may have carried them.
    `has_open_end`: of a log that is gone, `to_offset` is how far it was known; more may have stood behind it.
    `older_key` says that the event came under the key that ends with `from`: there, the event of a newer
    topic, or of another class, may have taken the place of this one's predecessor.
    """

    mirror: str
    source: str
    topic: str
    partition: int
    from_offset: int
    to_offset: int
    cause: str
    at_ms: int
    topic_id: str = ""
    older_key: bool = False
    target: str = ""
    has_open_end: bool = False

    @property
    def key(self) -> str:
        if self.older_key:
            return self.place_key
        return f"{self.place_key}/{self.cause}" + (f"/{self.topic_id}" if self.topic_id else "")

    @property
    def place_key(self) -> str:
        """Where the gap begins, whatever its topic and class."""
        return f"gap/{self.mirror}/{self.source}/{self.topic}/{self.partition}/{self.from_offset}"


FIELDS = {
    "mirror": "mirror",
    "source": "source",
    "topic": "topic",
    "partition": "partition",
    "from_offset": "from",
    "to_offset": "to",
    "cause": "class",
    "at_ms": "at_ms",
    "topic_id": "topic_id",
    "target": "target",
    "has_open_end": "open",
}
"""{attribute of GapEvent: its name in JSON}, in the order in which they are written"""
QUIET: dict[str, Any] = {"topic_id": "", "target": "", "has_open_end": False}
"""What an attribute is that is not written then"""


def encode_gap(event: GapEvent) -> tuple[bytes, bytes]:
    """(record key, record value)."""
    value: dict[str, Any] = {"version": VERSION, "type": TYPE}
    for attribute, name in FIELDS.items():
        content = getattr(event, attribute)
        if attribute not in QUIET or content != QUIET[attribute]:
            value[name] = content
    return event.key.encode(), json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
