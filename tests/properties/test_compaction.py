"""Compaction against a dictionary: last value of each key, transactions, tombstones, codecs, crashes.

The model keeps every record that was ever appended, by offset, and each transaction's end. What a consumer
of committed data reads out of the compacted log (with the list of aborted transactions that a fetch carries)
must be records as they were appended, and applying them in order must give the dictionary that applying all
of them gives. A crash is played by copying the files after each file system call of a run and opening one
of the copies.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.broker.protocol.batch import iterate_batches, parse_header, verify_crc
from millrace.broker.protocol.control_records import build_marker, control_type
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage.cleaner import Cleaner, CleanerConfig, view_segments
from millrace.broker.storage.compaction_plan import plan_log
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from tests.stored_batches import batches_of

RETENTION_MS = 1000
CONFIG = LogConfig(
    segment_bytes=900,
    index_interval_bytes=100,
    cleanup_policy=frozenset({"compact"}),
    delete_retention_ms=RETENTION_MS,
    min_cleanable_dirty_ratio=0.0,
)
KEYS = [b"a", b"b", b"c", b"d", b"e" * 20]


@dataclass
class Model:
    """What was appended: offset -> record and its transaction (None outside of one)."""

    records: dict[int, tuple[Record, int | None]] = field(default_factory=dict)
    ends: dict[int, bool] = field(default_factory=dict)  # transaction -> committed

    def is_committed(self, transaction: int | None) -> bool:
        return transaction is None or self.ends.get(transaction, False)

    def dictionary(self, below: int) -> dict[bytes, bytes | None]:
        """Key -> last value of what was committed below an offset; deleted keys are not in it."""
        found: dict[bytes, bytes | None] = {}
        for offset in sorted(self.records):
            record, transaction = self.records[offset]
            if offset < below and self.is_committed(transaction):
                _apply(found, record)
        return found


def _apply(dictionary: dict[bytes, bytes | None], record: Record) -> None:
    assert record.key is not None
    if record.value is None:
        dictionary.pop(record.key, None)
    else:
        dictionary[record.key] = record.value


def read_committed(log: Log, end_offset: int, max_bytes: int = 500) -> Iterator[Record]:
    """What a consumer of committed data gets, fetch by fetch, as the Java client filters it."""
    offset = log.start_offset
    while offset < end_offset:
        found = log.read(offset, max_bytes, end_offset=end_offset)
        if not found.data:
            return
        coming = sorted(log.aborted_transactions(offset, found.next_offset), key=lambda pair: pair[1])
        aborted: set[int] = set()
        for position, header in iterate_batches(found.data):
            batch = found.data[position : position + header.size]
            while coming and coming[0][1] <= header.last_offset:
                aborted.add(coming.pop(0)[0])
            if header.is_control:
                if header.record_count and control_type(batch) == 0:
                    aborted.discard(header.producer_id)
                continue
            if header.is_transactional and header.producer_id in aborted:
                continue
            yield from (record for record in read_records(batch) if record.offset >= offset)
        offset = found.next_offset


def check_log(log: Log, model: Model, *, cleaned_to: int) -> None:
    """The log tells no lies and lacks nothing, up to its last stable offset."""
    stable = log.last_stable_offset(log.end_offset)
    found: dict[bytes, bytes | None] = {}
    seen: list[int] = []
    for record in read_committed(log, stable):
        original, transaction = model.records[record.offset]
        assert model.is_committed(transaction), f"an aborted record is visible at {record.offset}"
        assert (record.key, record.value, record.headers, record.timestamp_ms) == (
            original.key,
            original.value,
            original.headers,
            original.timestamp_ms,
        )
        seen.append(record.offset)
        _apply(found, record)
    assert seen == sorted(set(seen))
    assert found == model.dictionary(stable)
    ends = [(parse_header(batch).base_offset, parse_header(batch).last_offset) for batch in batches_of(log)]
    assert all(before[1] < after[0] for before, after in pairwise(ends))
    for batch in batches_of(log):
        verify_crc(batch, 0, parse_header(batch))
    keys = [model.records[offset][0].key for offset in seen if offset < cleaned_to]
    assert len(keys) == len(set(keys)), "two records of a key are left where compaction has been"


def clean(log: Log, now_ms: int, *, map_size: int = 1 << 20) -> int:
    """One run up to the last stable offset; where the next one begins."""
    plan = plan_log(
        view_segments(log.segments, log.end_offset),
        log.config,
        cleaned_offset=log.cleaned_offset,
        start_offset=log.start_offset,
        stable_offset=log.last_stable_offset(log.end_offset),
        now_ms=now_ms,
    )
    if plan.is_due:
        return Cleaner(CleanerConfig(map_size=map_size)).clean(log, plan, now_ms).end_offset
    return log.cleaned_offset


@contextmanager
def after_each_file_operation(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` after every call that changes what a directory or a file of it holds."""

    def spied(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            act()
            return result

        return call

    names = ("rename", "replace", "unlink", "pwrite", "ftruncate", "truncate", "utime")
    with mock.patch.multiple(os, **{name: spied(getattr(os, name)) for name in names}):
        yield


class CompactionAgainstDictionary(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="compaction-"))
        self.now_ms = 1_000_000
        self.model = Model()
        self.cleaned_to = 0
        self.next_sequence: dict[int, int] = {}
        self.open_transactions: dict[int, int] = {}  # producer -> transaction
        self.transaction_count = 0
        self.log = Log.open(self.folder / "t-0", CONFIG, recovery_point=None, now_ms=self.now_ms)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @rule(
        records=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 5)), min_size=1, max_size=5),
        producer=st.sampled_from([None, None, 1, 2, 11, 12]),
        compression=st.sampled_from([0, 0, 1, 2, 3, 4]),
        seed=st.integers(0, 99),
    )
    def append(
        self, records: list[tuple[bytes, int]], producer: int | None, compression: int, seed: int
    ) -> None:
        self.now_ms += 10
        batch_records = [
            Record(
                key,
                None if kind == 0 else random.Random(seed + kind).randbytes(kind * 15),
                ((("h", None), ("h", b"x")) if kind == 3 else ()),
                self.now_ms - kind,
            )
            for key, kind in records
        ]
        transaction = None
        if producer is not None and producer > 10:
            if producer not in self.open_transactions:
                self.transaction_count += 1
                self.open_transactions[producer] = self.transaction_count
            transaction = self.open_transactions[producer]
        sequence = self.next_sequence.get(producer, 0) if producer is not None else -1
        batch = build_batch(
            batch_records,
            compression=compression,
            producer_id=-1 if producer is None else producer,
            producer_epoch=-1 if producer is None else 0,
            base_sequence=sequence,
            transactional=transaction is not None,
        )
        result = self.log.append(batch, leader_epoch=0, now_ms=self.now_ms)
        if producer is not None:
            self.next_sequence[producer] = sequence + len(records)
        for number, record in enumerate(batch_records):
            self.model.records[result.base_offset + number] = (record, transaction)

    @precondition(lambda self: self.open_transactions)
    @rule(number=st.integers(0, 1), committed=st.booleans())
    def end_transaction(self, number: int, committed: bool) -> None:
        producer = sorted(self.open_transactions)[number % len(self.open_transactions)]
        self.model.ends[self.open_transactions.pop(producer)] = committed
        marker = build_marker(producer, 0, 0, committed, self.now_ms)
        self.log.append(marker, leader_epoch=0, now_ms=self.now_ms, origin="internal")

    @rule(wait_ms=st.sampled_from([0, 0, RETENTION_MS + 100]), slots=st.sampled_from([5, 1 << 16]))
    def compact(self, wait_ms: int, slots: int) -> None:
        """Five slots take three keys of the five."""
        self.now_ms += wait_ms
        with mock.patch("millrace.broker.storage.key_map._LEAST_SLOTS", 5):
            self.cleaned_to = clean(self.log, self.now_ms, map_size=slots * 24)

    @rule(wait_ms=st.sampled_from([0, RETENTION_MS + 100]), seed=st.integers(0, 2**32))
    def crash_while_compacting(self, wait_ms: int, seed: int) -> None:
        """The files after some operation of a run are what is found at the next start."""
        self.now_ms += wait_ms
        copies: list[Path] = []
        self.log.flush(self.now_ms)

        def copy() -> None:
            target = self.folder / f"copy{len(copies)}" / "t-0"
            copies.append(target)
            with mock.patch.multiple(os, **ORIGINALS):
                shutil.copytree(self.log.directory, target)

        with after_each_file_operation(copy):
            clean(self.log, self.now_ms)
        recovery_point = self.log.recovery_point
        if copies:
            shutil.rmtree(self.log.directory)
            random.Random(seed).choice(copies).rename(self.log.directory)
            for other in self.folder.glob("copy*"):
                shutil.rmtree(other)
            end_offset, cleaned_to = self.log.end_offset, self.cleaned_to
            self.log = self._open(random.Random(seed).choice([recovery_point, 0]), cleaned_to)
            assert self.log.end_offset == end_offset

    @rule(crash=st.booleans())
    def open_again(self, crash: bool) -> None:
        end_offset = self.log.end_offset
        if not crash:
            self.log.close(self.now_ms)
        self.log = self._open(0 if crash else None, self.cleaned_to)
        assert self.log.end_offset == end_offset

    def _open(self, recovery_point: int | None, cleaned_to: int) -> Log:
        return Log.open(
            self.log.directory,
            CONFIG,
            recovery_point=recovery_point,
            cleaned_offset=cleaned_to,
            now_ms=self.now_ms,
        )

    @invariant()
    def consumers_see_the_dictionary(self) -> None:
        if hasattr(self, "log"):
            check_log(self.log, self.model, cleaned_to=self.cleaned_to)

    @invariant()
    def producers_are_remembered(self) -> None:
        if not hasattr(self, "log"):
            return
        entries = self.log.producers.entries
        assert {pid: entry.last_sequence + 1 for pid, entry in entries.items()} == self.next_sequence
        is_open = {pid for pid, entry in entries.items() if entry.transaction_start_offset >= 0}
        assert is_open == set(self.open_transactions)


ORIGINALS = {
    name: getattr(os, name)
    for name in ("rename", "replace", "unlink", "pwrite", "ftruncate", "truncate", "utime")
}

CompactionAgainstDictionary.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCompactionAgainstDictionary = CompactionAgainstDictionary.TestCase
