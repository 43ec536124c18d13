"""What a log of the broker holds, batch by batch, as a reader gets it."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.storage.log import Log


def batches_of(log: Log, from_offset: int | None = None) -> Iterator[memoryview]:
    """Each whole batch from `from_offset` (the log's start by default) to the end as it is now."""
    offset = log.start_offset if from_offset is None else from_offset
    end_offset = log.end_offset
    while offset < end_offset:
        found = log.read(offset, 1 << 20, end_offset=end_offset)
        if not found.data:
            return
        for position, header in iterate_batches(found.data):
            yield found.data[position : position + header.size]
        offset = found.next_offset
