"""How much of a produce request may be done at once on the event loop, and how much it may ask for at all.

A batch of some KB may hold 64 MiB, and a request many of them: whoever decompresses them keeps everyone
else waiting. What is little is done at once, because a thread would cost more; what turns out to be more
(`TooMuchAtOnce`) is checked on a thread, batch after batch, within what a request may hold. The amounts are
such that none keeps the loop for longer than some 20 ms: a codec yields 200 MB/s at least, and streams
without content cost 0.2 µs a byte.

Called by `handlers/produce.py`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millrace.broker.errors import MillraceError, RecordTooLarge
from millrace.broker.protocol.batch import ATTRIBUTES_POSITION, COMPRESSION_MASK
from millrace.broker.protocol.hot_produce import PartitionBatches
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.batch_validation import Budget

COMPRESSED_AT_ONCE = 64 << 10
PLAIN_AT_ONCE = 4 << 20
"""Bytes of a request: of its compressed batches, and of these when decompressed."""

SIZE_AT_ONCE = 8 << 20
"""Bytes of all batches of a request: to check and write them takes time as well."""

BATCHES_AT_ONCE = 500
"""Of a request: to find its log and to write it costs some 20 µs for each, however small it is."""

PLAUSIBLE_RATIO = 64
"""No request compresses its records better, unless it is made for that."""

ATTRIBUTES_LOW_BYTE = ATTRIBUTES_POSITION + 1


class TooMuchAtOnce(MillraceError):
    """The batch, and those after it, are to be checked on a thread."""


def codec_of(records: memoryview | None) -> int:
    """0 also for what is too short to say."""
    return (
        records[ATTRIBUTES_LOW_BYTE] & COMPRESSION_MASK
        if records is not None and len(records) > ATTRIBUTES_LOW_BYTE
        else 0
    )


def is_much(partitions: Sequence[PartitionBatches]) -> bool:
    """Whether nothing of a request is to be begun at once."""
    sizes = [(len(records), codec_of(records)) for _, _, records in partitions if records is not None]
    return (
        sum(size for size, codec in sizes if codec) > COMPRESSED_AT_ONCE
        or sum(size for size, _ in sizes) > SIZE_AT_ONCE
    )


def budget_at_once() -> Budget:
    return Budget(PLAIN_AT_ONCE, TooMuchAtOnce)


def budget_of_request(size: int, request_max_size: int) -> Budget:
    """For all batches of a request of `size` bytes together, beyond which they are refused."""
    limit = max(request_max_size, PLAUSIBLE_RATIO * size)
    return Budget(
        limit,
        lambda: RecordTooLarge(
            f"the request's batches hold more than {limit} bytes when decompressed: send fewer in one request"
        ),
    )


def repeated(partitions: Sequence[PartitionBatches]) -> frozenset[TopicPartition]:
    """Partitions that stand in a request more than once."""
    if len(partitions) < 2:
        return frozenset()
    keys = [(topic, partition) for topic, partition, _ in partitions]
    if len(set(keys)) == len(keys):
        return frozenset()
    return frozenset(key for key, count in Counter(keys).items() if count > 1)
