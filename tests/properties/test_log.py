"""The log against a list of batches: appends, reads, rolls, flushes, clean and torn ends, truncation.

The model is the list of batches that were appended, as (base offset, last offset, bytes). A crash is played
by copying what is in the files, cutting or flipping bytes beyond the recovery point, and opening again: what
comes back must be a prefix of the model, hold all that had been flushed, and reach up to the first damage.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.broker.errors import OffsetOutOfRange
from millrace.broker.protocol.batch import iterate_batches, verify_crc
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from tests.stored_batches import batches_of

CONFIG = LogConfig(segment_bytes=1200, index_interval_bytes=150, segment_ms=1000, retention_ms=-1)
EPOCH_BYTES = slice(12, 16)  # outside every checksum: a flip there cannot be seen


class LogAgainstList(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="log-property-"))
        self.now_ms = 0
        self.batches: list[tuple[int, int, bytes]] = []
        self.start_offset = 0
        self.sent: list[tuple[int, int, int]] = []  # producer id, next sequence, last offset
        self.log = Log.open(self.folder / "t-0", CONFIG, recovery_point=None, now_ms=0)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def end_offset(self) -> int:
        return self.batches[-1][1] + 1 if self.batches else self.start_offset

    @rule(
        count=st.integers(1, 6),
        size=st.integers(0, 120),
        step_ms=st.integers(-50, 300),
        producer_id=st.sampled_from([-1, -1, 5, 6]),
        compression=st.sampled_from([0, 0, 1, 2, 3, 4]),
    )
    def append(self, count: int, size: int, step_ms: int, producer_id: int, compression: int) -> None:
        self.now_ms = max(0, self.now_ms + step_ms)
        records = [
            Record(b"k%d" % n, bytes(random.Random(n + size).randbytes(size)), (), self.now_ms + n)
            for n in range(count)
        ]
        sequence = self._next_sequence(producer_id) if producer_id >= 0 else -1
        batch = build_batch(
            records,
            compression=compression,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence,
        )
        result = self.log.append(memoryview(batch), leader_epoch=1, now_ms=self.now_ms)
        assert result == (self.end_offset, self.end_offset + count - 1, -1, False)
        if producer_id >= 0:
            self.sent.append((producer_id, sequence + count, result.last_offset))
            again = self.log.append(memoryview(bytes(batch)), leader_epoch=1, now_ms=self.now_ms)
            assert again == (result.base_offset, result.last_offset, -1, True)
        self.batches.append((result.base_offset, result.last_offset, bytes(batch)))

    @rule()
    def flush(self) -> None:
        self.log.flush(self.now_ms)
        assert self.log.recovery_point == self.log.end_offset

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start_offset + 1, self.end_offset))
        self.log.truncate_to(offset, self.now_ms)
        self.batches = [batch for batch in self.batches if batch[1] < offset]
        self._forget_sequences()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def delete_records(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start_offset, self.end_offset))
        self.log.advance_start_offset(offset)
        self.log.delete_old_segments(self.now_ms)
        self.start_offset = offset
        assert self.log.start_offset == offset
        self.batches = [batch for batch in self.batches if batch[1] >= offset]

    @rule()
    def close_and_open(self) -> None:
        self.log.close(self.now_ms)
        self._open(recovery_point=None)
        assert not self.log.notes, "a clean close leaves nothing to repair"
        assert self.log.end_offset == self.end_offset

    @rule(seed=st.integers(0, 2**32))
    def close_hurt_indexes_and_open(self, seed: int) -> None:
        self.log.close(self.now_ms)
        self._damage("index", random.Random(seed), self.end_offset)
        self._open(recovery_point=None)
        assert self.log.end_offset == self.end_offset

    @rule(damage=st.sampled_from(["none", "cut", "flip", "index"]), seed=st.integers(0, 2**32))
    def crash_and_open(self, damage: str, seed: int) -> None:
        rng = random.Random(seed)
        flushed = self.log.recovery_point
        first_damage = self._damage(damage, rng, flushed)
        kept = self.end_offset
        for base, last, _ in self.batches:
            if first_damage is not None and last >= first_damage:
                kept = base
                break
        # What was deleted stays deleted, and its offsets are not given again.
        kept = max(kept, self.start_offset)
        self._open(recovery_point=flushed)
        assert self.log.end_offset == kept >= flushed
        self.batches = [batch for batch in self.batches if batch[1] < kept]
        self._forget_sequences()

    def _damage(self, damage: str, rng: random.Random, flushed: int) -> int | None:
        """Hurts the files beyond the recovery point; the offset of the first batch that is hurt."""
        directory = self.log.directory
        if damage == "index":
            for path in directory.glob("*.*index"):
                if rng.random() < 0.5:
                    path.unlink()
                elif path.stat().st_size:
                    content = bytearray(path.read_bytes())
                    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                    if path.suffix == ".index":
                        # Not for a time index: one that lost exactly whole entries looks sound.
                        content = content[: rng.randrange(1, len(content) + 1)]
                    path.write_bytes(content)
        if damage not in ("cut", "flip"):
            return None
        places = []
        for path in sorted(directory.glob("*.log")):
            content = path.read_bytes()
            places += [
                (path, position, header)
                for position, header in iterate_batches(content)
                if header.base_offset >= flushed
            ]
        if not places:
            return None
        path, position, header = rng.choice(places)
        content = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(content[: position + rng.randrange(header.size)])
        else:
            at = rng.choice([n for n in range(header.size) if n not in range(*EPOCH_BYTES.indices(61))])
            content[position + at] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        return header.base_offset

    def _open(self, recovery_point: int | None) -> None:
        self.log = Log.open(
            self.log.directory,
            CONFIG,
            recovery_point=recovery_point,
            start_offset=self.start_offset,
            now_ms=self.now_ms,
        )

    def _next_sequence(self, producer_id: int) -> int:
        return next((sequence for sent, sequence, _ in reversed(self.sent) if sent == producer_id), 0)

    def _forget_sequences(self) -> None:
        """After the log lost its end, a producer goes on where the rest of it ends."""
        self.sent = [sent for sent in self.sent if sent[2] < self.log.end_offset]

    @invariant()
    def reading_gives_the_list_back(self) -> None:
        if not hasattr(self, "log"):
            return
        assert (self.log.start_offset, self.log.end_offset) == (self.start_offset, self.end_offset)
        expected = [data for _, last, data in self.batches if last >= self.start_offset]
        found = [bytes(batch) for batch in batches_of(self.log)]
        assert [batch[16:] for batch in found] == [batch[16:] for batch in expected]
        assert [batch[:8] for batch in found] == [base.to_bytes(8) for base, _, _ in self.batches]
        for batch in found:
            verify_crc(batch, 0, next(iterate_batches(batch))[1])

    @invariant()
    def any_offset_and_any_time_is_found(self) -> None:
        if not hasattr(self, "log") or not self.batches:
            return
        rng = random.Random(self.end_offset)
        offset = rng.randrange(self.start_offset, self.end_offset + 1)
        read = self.log.read(offset, rng.randrange(1, 600))
        if offset < self.end_offset:
            first = next(iterate_batches(read.data))[1]
            assert first.base_offset <= offset <= first.last_offset
        else:
            assert not read.data
        for beyond in (self.start_offset - 1, self.end_offset + 1):
            try:
                self.log.read(beyond, 100)
            except OffsetOutOfRange:
                continue
            raise AssertionError(f"offset {beyond} was read")
        records = [
            record
            for batch in batches_of(self.log)
            for record in read_records(batch)
            if record.offset >= self.start_offset
        ]
        wanted = rng.choice(records).timestamp_ms if records else 0
        at_least = [(r.offset, r.timestamp_ms) for r in records if r.timestamp_ms >= wanted]
        assert self.log.offset_for_time(wanted) == (at_least[0] if at_least else None)
        assert self.log.offset_for_time(2**40) is None


LogAgainstList.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLogAgainstList = LogAgainstList.TestCase
