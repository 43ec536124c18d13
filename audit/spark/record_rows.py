"""Records as rows: the columns of Spark's Kafka connector, and what an audited producer told beside them.

Called by `task_reader` for mode `records`. Types and meaning are the connector's: `timestamp` is the
record's, `timestampType` 0 for a time of creation and 1 for one of append, `headers` null where a record has
none, a header's name what UTF-8 makes of its bytes. With `includeIdentity` there is one column more,
`identity`: null without a `_mr` header, or with one that cannot be read (`headers` shows it as it is).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from millrace.audit.contract.header import HEADER_KEY, InvalidIdentity, decode_identity
from millrace.audit.spark.read_options import ReadOptions
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.records import Record, read_records

_PLAIN = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "timestampType int"
)
_HEADERS = ", headers array<struct<key: string, value: binary>>"
_IDENTITY = ", identity struct<stream: string, sequence: bigint, created: timestamp, producer: string>"

_MOMENT = pa.timestamp("us", tz="UTC")
_ARROW = (
    ("key", pa.binary()),
    ("value", pa.binary()),
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("timestamp", _MOMENT),
    ("timestampType", pa.int32()),
)
_ARROW_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ARROW_IDENTITY = pa.struct(
    [("stream", pa.string()), ("sequence", pa.int64()), ("created", _MOMENT), ("producer", pa.string())]
)


def record_ddl(options: ReadOptions) -> str:
    """The columns as Spark has them."""
    return _PLAIN + _HEADERS * options.headers + _IDENTITY * options.identity


ROWS_PER_ARROW_BATCH = 10_000
BYTES_PER_ARROW_BATCH = 8 << 20  # a column of more than 2 GiB is no part of any


class RecordRows:
    """Rows on their way into Arrow batches."""

    def __init__(self, options: ReadOptions) -> None:
        self._headers, self._identity = options.headers, options.identity
        fields = list(_ARROW)
        if options.headers:
            fields.append(("headers", _ARROW_HEADERS))
        if options.identity:
            fields.append(("identity", _ARROW_IDENTITY))
        self._schema = pa.schema(fields)
        self._columns: list[list[Any]] = [[] for _ in fields]
        self._byte_count = 0

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, range_: OffsetRange, batch: memoryview) -> Iterator[pa.RecordBatch]:
        """Every record of a whole batch that lies in the range; yields what is full meanwhile, as a batch may
        hold many times its size."""
        kind = int(parse_header(batch).is_log_append_time)
        for record in read_records(batch):
            if range_.first_offset <= record.offset < range_.end_offset:
                size = self._size_of(record)
                if len(self) and self._byte_count + size > BYTES_PER_ARROW_BATCH:
                    yield self.flush()
                for column, value in zip(self._columns, self._values(range_, record, kind), strict=True):
                    column.append(value)
                self._byte_count += size
                if len(self) >= ROWS_PER_ARROW_BATCH:
                    yield self.flush()

    def _size_of(self, record: Record) -> int:
        """Bytes of what has no bound but that of a record's size."""
        size = len(record.key or b"") + len(record.value or b"")
        if self._headers:
            size += sum(len(key) + len(value or b"") for key, value in record.headers)
        return size

    def _values(self, range_: OffsetRange, record: Record, kind: int) -> Iterator[Any]:
        yield record.key
        yield record.value
        yield range_.topic_here
        yield range_.partition
        yield record.offset
        yield record.timestamp_ms * 1000
        yield kind
        if self._headers:
            named = [{"key": _shown(key), "value": value} for key, value in record.headers]
            yield named or None
        if self._identity:
            yield identity_of(record)

    def flush(self) -> pa.RecordBatch:
        columns, self._columns = self._columns, [[] for _ in self._columns]
        self._byte_count = 0
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _shown(key: str) -> str:
    """A header's name for Java and Arrow, which have no letters for bytes that are not UTF-8."""
    return key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def identity_of(record: Record) -> dict[str, Any] | None:
    stamped = [value for key, value in record.headers if key == HEADER_KEY]
    if not stamped:
        return None
    try:
        told = decode_identity(stamped[-1])
    except InvalidIdentity:
        return None
    return {
        "stream": told.stream,
        "sequence": told.sequence,
        "created": told.created_ms * 1000,
        "producer": told.producer,
    }
