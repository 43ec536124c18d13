"""Cuts long runs of ZooKeeper operations into transactions that the server takes. Pure.

ZooKeeper closes the connection on a request above its `jute.maxbuffer` (1 MiB less one byte), without a word
of why: whoever sends it again breaks the connection again, for ever. So what grows with the number of
partitions is cut here by its bytes; `session.py` refuses what would still be too large. Used by the
controller and by whoever begins moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace.broker.coordination.session import Operation, operation_bytes

MOST_BYTES = 900_000
"""Of one transaction, without the cluster's chroot, which stands in front of each path."""

MOST_OPERATIONS = 500
"""Longer transactions would hold up the ensemble's other writes; so many leave 290 bytes for each chroot."""


def cut(operations: Sequence[Operation], *, beside: int = 0) -> Iterator[Sequence[Operation]]:
    """The same operations in the same order, in runs of one or more that each fit into a transaction which
    has `beside` bytes of others."""
    start, size = 0, beside
    for place, operation in enumerate(operations):
        more = operation_bytes(operation)
        if place > start and (size + more > MOST_BYTES or place - start >= MOST_OPERATIONS):
            yield operations[start:place]
            start, size = place, beside
        size += more
    if start < len(operations):
        yield operations[start:]
