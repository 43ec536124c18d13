"""The offsets topic read anew: from runs of whole batches to what a coordinator keeps in memory.

`journal.py` calls `take` for one run after another and `memory` at the end, on a thread. Of each offset only
the last commit counts, so all others are passed over by compiled code (`protocol/offsets_kernels.py`) and one
look-up each; what is decoded is what is kept. Whatever is not a plain commit (groups, other versions, what
nobody can read) is decoded record by record, and counts where it stands in the log like the others.

Invariant: what comes of it is what decoding every record in order would give (a test holds it to that).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

from millrace.broker.errors import InvalidRecord, UnreadableRecord
from millrace.broker.groups.offsets import OffsetStore
from millrace.broker.groups.record_layout import (
    GroupKey,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_offset_key,
)
from millrace.broker.groups.values import GroupSnapshot
from millrace.broker.protocol.batch import BatchHeader, parse_header
from millrace.broker.protocol.control_records import ABORT, COMMIT, control_type
from millrace.broker.protocol.records import read_records, whole_batches
from millrace.broker.replication.off_loop import Pauses

COLUMN_SIZE = 16_384
"""Records gone through in one go of the compiled loop."""


@dataclass(slots=True)
class Memory:
    """What a partition of the offsets topic says: groups with members or a past, and offsets, by group."""

    snapshots: dict[str, GroupSnapshot] = field(default_factory=dict)
    offsets: dict[str, OffsetStore] = field(default_factory=dict)
    open_transactions: dict[int, set[str]] = field(default_factory=dict)
    """Which groups have pending offsets, by producer id."""
    unreadable: int = 0
    """Records whose bytes do not fit their layout."""
    unknown: int = 0
    """Records of versions that newer software writes; those of KIP-848's groups among them."""


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from millrace.broker.protocol import offsets_kernels

    return offsets_kernels


def warm_kernels() -> None:
    """Loads the compiled loop (from numba's cache, or compiles it once)."""
    _kernels()


Commit = tuple[int, bytes | None]
"""Where it stands in the log, and its value; None for a removal."""


class OffsetsReplay:
    """See the module. `end_offset` is the offset after the last batch."""

    def __init__(self) -> None:
        self.end_offset = 0
        self._memory = Memory()
        self._latest: dict[bytes, Commit] = {}
        self._pending: dict[int, dict[bytes, Commit]] = {}
        """By producer id: in the log, but their transaction is open."""
        self._columns: list[Any] = []

    # -- taking in

    def take(self, run: memoryview) -> None:
        """Takes in whole batches, which follow those taken before. Raises CorruptMessage, InvalidRecord."""
        import numpy

        if not self._columns:
            self._columns = [numpy.empty(COLUMN_SIZE, numpy.int64) for _ in range(7)]
        kernels, pauses = _kernels(), Pauses()
        data = bytes(run)
        array = numpy.frombuffer(data, "u1")
        position, outcome = 0, kernels.FULL
        while outcome != kernels.WHOLE and position < len(data):
            outcome, count, position = kernels.commits(array, position, *self._columns)
            if count:
                self._take_columns(data, [column[:count].tolist() for column in self._columns], pauses)
            if outcome == kernels.MUST_LOOK:
                header = parse_header(data, position)
                self._take_batch(memoryview(data)[position : position + header.size], header)
                position += header.size
            pauses.maybe()
        self.end_offset = max(self.end_offset, whole_batches(data, 2**63 - 1)[1])

    def _take_columns(self, data: bytes, columns: list[list[int]], pauses: Pauses) -> None:
        latest = self._latest
        rows = zip(*columns, strict=True)
        for number, (offset, key_at, key_end, value_at, value_end, producer_id, is_plain) in enumerate(rows):
            if not number & 0x3FF:
                pauses.maybe()
            if not is_plain:
                key = None if key_end < 0 else data[key_at:key_end]
                value = None if value_end < 0 else data[value_at:value_end]
                self._take_other(key, value, offset, producer_id)
            elif value_end < 0:
                self._remove(data[key_at:key_end], offset)
            elif producer_id >= 0:
                pending = self._pending.setdefault(producer_id, {})
                pending[data[key_at:key_end]] = offset, data[value_at:value_end]
            else:
                latest[data[key_at:key_end]] = offset, data[value_at:value_end]

    def _take_batch(self, batch: memoryview, header: BatchHeader) -> None:
        if header.is_control:
            self._end_transaction(batch, header)
            return
        producer_id = header.producer_id if header.is_transactional else -1
        for record in read_records(batch):
            self._take_other(record.key, record.value, record.offset, producer_id)

    def _take_other(self, key: bytes | None, value: bytes | None, offset: int, producer_id: int) -> None:
        memory = self._memory
        try:
            match decode_key(key) if key is not None else None:
                case OffsetKey(group_id, topic, partition):
                    known = encode_offset_key(group_id, topic, partition)
                    if value is None:
                        self._remove(known, offset)
                    elif decode_offset_value(value) is None:
                        memory.unknown += 1
                    elif producer_id >= 0:
                        self._pending.setdefault(producer_id, {})[known] = offset, value
                    else:
                        self._latest[known] = offset, value
                case GroupKey(group_id):
                    if value is None:
                        memory.snapshots.pop(group_id, None)
                    elif (snapshot := decode_group_value(value)) is None:
                        memory.unknown += 1
                    else:
                        memory.snapshots[group_id] = snapshot
                case None:
                    memory.unknown += 1
        except UnreadableRecord:
            memory.unreadable += 1

    def _remove(self, key: bytes, offset: int) -> None:
        self._latest[key] = offset, None
        for pending in self._pending.values():
            pending.pop(key, None)

    def _end_transaction(self, batch: memoryview, header: BatchHeader) -> None:
        """Take in a transaction's marker; control records of other kinds end no transaction."""
        try:
            kind = control_type(batch)
        except InvalidRecord:
            self._memory.unreadable += 1
            return
        if kind not in (ABORT, COMMIT):
            return
        pending = self._pending.pop(header.producer_id, {})
        if kind == COMMIT:
            for key, commit in pending.items():
                # A commit counts where it stands in the log, not where its marker does.
                if commit[0] >= self._latest.get(key, (-1, None))[0]:
                    self._latest[key] = commit

    # -- giving out

    def memory(self) -> Memory:
        """What the log remembers by now. To be called once."""
        memory, pauses = self._memory, Pauses()
        for key, (offset, value) in self._latest.items():
            pauses.maybe()
            if value is not None:
                self._put(key, offset, value, None)
        for producer_id, pending in self._pending.items():
            for key, (offset, value) in pending.items():
                pauses.maybe()
                if value is not None:
                    self._put(key, offset, value, producer_id)
        memory.offsets = {group: store for group, store in memory.offsets.items() if not store.is_empty}
        return memory

    def _put(self, key: bytes, offset: int, value: bytes, producer_id: int | None) -> None:
        decoded, committed = decode_key(key), decode_offset_value(value, offset)
        if not isinstance(decoded, OffsetKey) or committed is None:
            raise UnreadableRecord(
                f"the commit at offset {offset} of the offsets topic cannot be read after all"
            )
        store = self._memory.offsets.setdefault(decoded.group_id, OffsetStore())
        partition = decoded.topic, decoded.partition
        if producer_id is None:
            store.put(partition, committed)
        else:
            store.put_pending(producer_id, partition, committed)
            self._memory.open_transactions.setdefault(producer_id, set()).add(decoded.group_id)
