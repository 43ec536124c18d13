"""The hash by which Apache Kafka shares groups and transactional ids out among partitions of its own topics.

Called by the coordinators and by whoever looks for them. Pure.
"""

from __future__ import annotations

import struct

_LEAST_INT = -(1 << 31)


def coordinator_partition(key: str, partition_count: int) -> int:
    """The absolute value of Java's String.hashCode (over UTF-16 code units), modulo the partition count.

    Java has no absolute value of -2^31; Apache Kafka takes 0 for it.
    """
    code = 0
    for (unit,) in struct.iter_unpack(">H", key.encode("utf-16-be", "surrogatepass")):
        code = (code * 31 + unit) & 0xFFFFFFFF
    signed = code - (1 << 32) if code >= 1 << 31 else code
    return 0 if signed == _LEAST_INT else abs(signed) % partition_count
