"""The audited part of the load: the product's own producer (`millrace.audit.producer`), one for each source.

Its records are judged like all others: every one has a number, and what the producer's delivery reports say
is what its journal says (acknowledged at an offset, or nothing known). The producer sends again what it is
not sure of, and the source's broker keeps each once (idempotence); so here, too, what the aggregate holds
twice was doubled by the mirror, or is a breach of the source's own, which would be as bad. What it counted
goes to the sources' events topics, by the mirror to the aggregate, and `audited_end.py` has it audited when
the run is over.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any

from millrace.audit.producer import AuditedProducer
from tests.cluster.faults.producers import CLIENT
from tests.cluster.mirror_faults.plan import SOURCES
from tests.cluster.mirror_faults.records import AUDITED, PARTITIONS_AUDITED, Journal, Stream, record_of
from tests.waiting import patience

PAUSE_S = 0.1
MOST_RECORDS = 20
WINDOW_MS = 1_000
CLOSE_TIMEOUT_S = 60.0


class AuditedLoad:
    """`journals`: one for each stream; `failure`: what no fault explains."""

    def __init__(self, bootstraps: Mapping[str, str], seed: int) -> None:
        self._writers = [_Writer(source, bootstraps[source], seed) for source in SOURCES]

    @property
    def journals(self) -> list[Journal]:
        return [journal for writer in self._writers for journal in writer.journals]

    @property
    def failure(self) -> str | None:
        return next((writer.failure for writer in self._writers if writer.failure), None)

    @property
    def record_count(self) -> int:
        """Acknowledged."""
        return sum(writer.record_count for writer in self._writers)

    def start(self) -> None:
        """Once the topics are there."""
        for writer in self._writers:
            writer.thread.start()

    def halt(self, *, in_order: bool = True) -> None:
        """Ends the producers: all is delivered and told, unless it need not be in order. Safe to repeat."""
        for writer in self._writers:
            writer.close_timeout_s = CLOSE_TIMEOUT_S if in_order else 0.0
            writer.halted.set()
        for writer in self._writers:
            if writer.thread.is_alive():
                writer.thread.join(patience(2 * CLOSE_TIMEOUT_S))


class _Writer:
    """A producer and its thread."""

    def __init__(self, source: str, bootstrap: str, seed: int) -> None:
        self.journals = [Journal(Stream(source, AUDITED, 0, number)) for number in range(PARTITIONS_AUDITED)]
        self.failure: str | None = None
        self.record_count = 0
        self.close_timeout_s = CLOSE_TIMEOUT_S
        self.halted = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"audited load of {source}", daemon=True)
        self._source, self._bootstrap = source, bootstrap
        self._draw = random.Random(f"audited load {source} {seed}")
        self._reported: list[tuple[Journal, int, int]] = []

    def _run(self) -> None:
        try:
            self._write()
        except Exception:
            self.failure = traceback.format_exc()

    def _write(self) -> None:
        producer = AuditedProducer(
            {
                **CLIENT,
                "bootstrap.servers": self._bootstrap,
                "linger.ms": 5,
                "retry.backoff.ms": 100,
                "millrace.producer": f"load@{self._source}",
                "millrace.datacenter": self._source,
                "millrace.window.ms": WINDOW_MS,
                "millrace.report.interval.ms": 1_000,
            }
        )
        while not self.halted.is_set():
            for journal in self.journals:
                self._send(producer, journal)
            until_s = time.monotonic() + PAUSE_S
            while time.monotonic() < until_s and not self.halted.is_set():
                producer.poll(until_s - time.monotonic())
            self._note_reports()
        delivered = producer.close(self.close_timeout_s)
        self._note_reports()
        if not delivered and self.close_timeout_s:
            self.failure = f"the audited producer of {self._source} could not deliver and tell everything"

    def _send(self, producer: AuditedProducer, journal: Journal) -> None:
        for number in journal.take(self._draw.randint(1, MOST_RECORDS)):
            record = record_of(journal.stream, number)
            producer.produce(
                AUDITED,
                record.value,
                record.key,
                journal.stream.partition,
                on_delivery=partial(self._delivered, journal, number),
                timestamp=record.timestamp_ms,
                headers=list(record.headers),
            )

    def _delivered(self, journal: Journal, number: int, error: Any, message: Any) -> None:
        if error is None:
            self._reported.append((journal, number, message.offset()))

    def _note_reports(self) -> None:
        """Neighbours in the source's log become one run of the journal, which is not touched again: who
        judges counts runs."""
        reported, self._reported = self._reported, []
        for journal in self.journals:
            numbers: list[int] = []
            first_offset = 0
            for _, number, offset in (each for each in reported if each[0] is journal):
                if numbers and (number, offset) != (numbers[-1] + 1, first_offset + len(numbers)):
                    journal.acknowledged(numbers, first_offset)
                    numbers = []
                if not numbers:
                    first_offset = offset
                numbers.append(number)
            if numbers:
                journal.acknowledged(numbers, first_offset)
        self.record_count += len(reported)
