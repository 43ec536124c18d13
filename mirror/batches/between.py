"""A seam for tests and the demo: a hook that gets each batch which is about to be produced, and gives the
buffers to produce instead of it. Called by `pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from millrace.broker.protocol.batch import iterate_batches
from millrace.mirror.topics.routes import SourcePartition

BetweenHook: TypeAlias = Callable[[str, str, int, memoryview], Sequence[bytes | bytearray | memoryview]]
"""Source cluster, topic, partition, one whole dense batch."""


def put_between(
    hook: BetweenHook, where: SourcePartition, batch: memoryview, offsets: Sequence[int]
) -> list[tuple[memoryview, Sequence[int]]]:
    """The batches that the hook gives, each with as many offsets as it has records. `offsets` are those of
    the batch."""
    pieces: list[tuple[memoryview, Sequence[int]]] = []
    for buffer in hook(*where, batch):
        for position, header in iterate_batches(buffer):
            given = memoryview(buffer)[position : position + header.size]
            # The hook may have added or removed records; only the count must be right.
            named = offsets if header.record_count == len(offsets) else range(header.record_count)
            pieces.append((given, named))
    return pieces
