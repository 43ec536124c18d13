"""Reads the topics out of a consumer's subscription, the metadata of protocol type "consumer".

The coordinator does not interpret group metadata except here: Apache Kafka keeps the offsets of a
topic from expiring, and refuses OffsetDelete, while a member is subscribed to it.

Layout (all versions start alike): version i16, topic count i32, topics as i16-length strings; user
data and later fields follow and are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

CONSUMER_PROTOCOL_TYPE = "consumer"


def subscribed_topics(subscriptions: Iterable[bytes]) -> frozenset[str] | None:
    """The union of the members' topics, or None when one subscription cannot be read.

    None must be treated as "could be subscribed to anything": keeping an offset too long harms nobody.
    """
    topics: set[str] = set()
    for subscription in subscriptions:
        read = _read_topics(subscription)
        if read is None:
            return None
        topics.update(read)
    return frozenset(topics)


def _read_topics(subscription: bytes) -> list[str] | None:
    topics = []
    try:
        _version, count = struct.unpack_from(">hi", subscription, 0)
        position = 6
        # A count larger than the buffer could hold is a lie; without this check it costs a long loop.
        if not 0 <= count <= len(subscription) // 2:
            return None
        for _ in range(count):
            (size,) = struct.unpack_from(">h", subscription, position)
            position += 2
            if size < 0 or position + size > len(subscription):
                return None
            topics.append(subscription[position : position + size].decode())
            position += size
    except (struct.error, UnicodeDecodeError):
        return None
    return topics
