"""Control records: what a broker writes between the records of clients, above all the ends of transactions.

A control batch has bit 5 of its attributes set and holds one record. Its key tells what it is:

    version i16 (0) · type i16      0 ABORT, 1 COMMIT; 2 to 6 are KRaft's own and end no transaction

The value of ABORT and COMMIT (KIP-98, EndTxnMarker of version 0):

    version i16 (0) · coordinator epoch i32

Newer versions only add fields behind these, so both are read by their known beginning. Called by the
transaction coordinator's sender and WriteTxnMarkers (`build_marker`), by the log, the cleaner, the loaders
of internal topics and `millrace log` (`parse_marker`). Pure.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from millrace.broker.errors import InvalidRecord
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.plain_records import iterate_records
from millrace.broker.protocol.records import Record, build_batch, records_section

ABORT = 0
COMMIT = 1

TYPE_NAMES = {
    ABORT: "ABORT",
    COMMIT: "COMMIT",
    2: "LEADER_CHANGE",
    3: "SNAPSHOT_HEADER",
    4: "SNAPSHOT_FOOTER",
    5: "KRAFT_VERSION",
    6: "KRAFT_VOTERS",
}

_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")
_VERSION = 0


class Marker(NamedTuple):
    """The end of a producer's transaction in one partition."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    committed: bool


def build_marker(
    producer_id: int, producer_epoch: int, coordinator_epoch: int, committed: bool, now_ms: int
) -> bytearray:
    """One whole control batch that ends the producer's transaction; to be appended with internal origin."""
    record = Record(
        _KEY.pack(_VERSION, COMMIT if committed else ABORT),
        _VALUE.pack(_VERSION, coordinator_epoch),
        (),
        now_ms,
    )
    return build_batch(
        [record],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
    )


def control_type(batch: Buffer) -> int:
    """The type of a whole control batch; see `TYPE_NAMES`. Types that are not known are given as they are.

    Raises InvalidRecord for a batch that is not a control batch or whose key is cut.
    """
    return _read(batch)[0]


def parse_marker(batch: Buffer) -> Marker:
    """What a whole control batch of type ABORT or COMMIT says.

    Raises InvalidRecord for any other batch, and for a key or value that is cut.
    """
    kind, value = _read(batch)
    if kind not in (ABORT, COMMIT):
        raise InvalidRecord(f"control record of type {TYPE_NAMES.get(kind, kind)} ends no transaction")
    if value is None or len(value) < _VALUE.size:
        raise InvalidRecord("the value of an end-of-transaction marker is cut")
    version, coordinator_epoch = _VALUE.unpack_from(value)
    if version < _VERSION:
        raise InvalidRecord(f"end-of-transaction marker has version {version}")
    header = parse_header(batch)
    return Marker(header.producer_id, header.producer_epoch, coordinator_epoch, kind == COMMIT)


def _read(batch: Buffer) -> tuple[int, bytes | None]:
    """Type and value of a control batch's first record (Kafka writes one)."""
    header = parse_header(batch)
    if not header.is_control:
        raise InvalidRecord(f"the batch at offset {header.base_offset} is no control batch")
    for record in iterate_records(records_section(batch, header), header.record_count):
        if record.key is None or len(record.key) < _KEY.size:
            raise InvalidRecord(f"the key of the control record at offset {header.base_offset} is cut")
        version, kind = _KEY.unpack_from(record.key)
        if version < _VERSION:
            raise InvalidRecord(f"control record at offset {header.base_offset} has version {version}")
        return int(kind), record.value
    raise InvalidRecord(f"the control batch at offset {header.base_offset} is empty")
