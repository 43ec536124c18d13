"""Which batches of a fetch answer are committed data: the reader's half of read_committed.

A server that is asked for committed records stops at the last stable offset but still sends aborted
batches, with a list of aborted transactions beside them; the reader drops those (KIP-98). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millrace.broker.errors import CorruptMessage, KafkaError
from millrace.broker.protocol.batch import BatchHeader, iterate_batches, verify_crc
from millrace.broker.protocol.control_records import ABORT, control_type


def committed_batches(
    records: memoryview, aborted: Iterable[tuple[int, int]]
) -> Iterator[tuple[memoryview, BatchHeader, bool]]:
    """Each whole batch of one partition's answer, with its header and whether its records are data.

    False for control batches and for those of aborted transactions; their offsets count all the same.
    `aborted` is the answer's own list of (producer id, first offset). Raises CorruptMessage.
    """
    still_to_come = sorted(aborted, key=lambda each: each[1], reverse=True)
    aborting: set[int] = set()
    for position, header in iterate_batches(records):
        batch = records[position : position + header.size]
        while still_to_come and still_to_come[-1][1] <= header.last_offset:
            aborting.add(still_to_come.pop()[0])
        if header.is_control:
            if header.producer_id in aborting and _is_abort(batch, header):
                aborting.discard(header.producer_id)
            yield batch, header, False
        else:
            yield batch, header, not (header.is_transactional and header.producer_id in aborting)


def _is_abort(batch: memoryview, header: BatchHeader) -> bool:
    """Whether a control batch ends its producer's transaction by aborting it. Other kinds of control record
    (leader changes, snapshots) end none. Its checksum comes first: what it says decides about others."""
    verify_crc(batch, 0, header)
    try:
        return control_type(batch) == ABORT
    except KafkaError as error:
        raise CorruptMessage(f"the end of a transaction cannot be read: {error}") from None
