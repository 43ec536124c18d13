"""Records read and checked in plain Python: the compiled kernels must accept the same, no more nor less."""

from __future__ import annotations

from millrace.broker.errors import InvalidRecord
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.plain_records import iterate_records, read_varint

__all__ = ["check_records", "iterate_records", "read_varint"]


def check_records(records: Buffer, record_count: int) -> tuple[int, int, int]:
    """What `records.validate_records` promises, in plain Python: least and greatest timestamp delta, and how
    many records have no key."""
    if record_count <= 0:
        raise InvalidRecord(f"batch announces {record_count} records")
    least, greatest, keyless = 2**63 - 1, -(2**63), 0
    for index, record in enumerate(iterate_records(records, record_count)):
        if record.offset_delta != index:
            raise InvalidRecord(f"record {index} has offset delta {record.offset_delta}")
        keyless += record.key is None
        least = min(least, record.timestamp_delta)
        greatest = max(greatest, record.timestamp_delta)
    return least, greatest, keyless
