"""Applications of the end-to-end tests: audited producers of every kind, each with a stream of its own.

They send records `<producer>#<number>|<padding>` and tell a `Truth` what became of them as an application
knows it: by delivery callbacks and ended transactions.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from millrace.audit.producer import AuditedProducer
from millrace.audit.stream_reporter import StreamReporter
from tests.spark.end_to_end_truth import WINDOW_MS, Stream, Truth
from tests.spark.end_to_end_world import DEADLINE_S, EVENTS_TOPIC, World, until
from tests.waiting import patience

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NEVER_MS = 3_600_000


class Sender:
    """An AuditedProducer. `start_ms` None: creation times are the producer's own, by its clock."""

    def __init__(
        self,
        world: World,
        truth: Truth,
        source: str,
        producer: str,
        rng: random.Random,
        *,
        start_ms: int | None,
        step_ms: int = 50,
        transactional: bool = False,
        **settings: Any,
    ) -> None:
        self.truth, self.rng = truth, rng
        self.stream = truth.streams[producer] = Stream(producer, source)
        self.transactional = transactional
        self._start_ms, self._step_ms = start_ms, step_ms
        self._number = 0
        self._delivered: set[int] = set()
        self._producer = AuditedProducer(
            {
                **producer_settings(world.bootstrap(source), producer, rng),
                **({"transactional.id": f"{truth.topic}-{producer}"} if transactional else {}),
                "millrace.content.digest": truth.content,
                **settings,
            }
        )
        if transactional:
            self._producer.init_transactions(patience(DEADLINE_S))

    @property
    def number(self) -> int:
        """Of the last record."""
        return self._number

    def send(self, count: int, partitions: int, *, size: int = 0) -> None:
        """Send and wait until the cluster has them."""
        if not self.transactional:
            self._send(count, partitions, size)
            self.stream.acknowledged |= self._delivered
            return
        while count > 0:
            part = min(count, self.rng.randint(5, 25))
            count -= part
            first = self._number + 1
            self._producer.begin_transaction()
            self._send(part, partitions, size)
            sequences = set(range(first, self._number + 1))
            if self.rng.random() < 0.4:
                self._producer.abort_transaction(patience(DEADLINE_S))
                self.stream.failed |= sequences
            else:
                self._producer.commit_transaction(patience(DEADLINE_S))
                self.stream.acknowledged |= sequences & self._delivered

    def _send(self, count: int, partitions: int, size: int) -> None:
        for _ in range(count):
            self._number += 1
            self._producer.produce(
                self.truth.topic,
                value_of(self.stream.producer, self._number, self.rng, size),
                key=b"k%d" % self.rng.randrange(9),
                partition=self.rng.randrange(partitions),
                timestamp=0 if self._start_ms is None else self._start_ms + self._number * self._step_ms,
                on_delivery=self._told(self._number),
            )
            self._producer.poll(0)
        assert self._producer.flush(patience(DEADLINE_S)) == 0
        self.stream.last_assigned = self._number

    def _told(self, sequence: int) -> Callable[[Any, Any], None]:
        def on_delivery(error: Any, message: Any) -> None:
            self.stream.created[sequence] = message.timestamp()[1]
            if error is None:
                self._delivered.add(sequence)

        return on_delivery

    def report(self) -> None:
        """Tell everything so far, and live on."""
        self._producer.report()
        assert self._producer.flush(patience(DEADLINE_S)) == 0
        self.stream.alive = True

    def close(self) -> None:
        assert self._producer.close(patience(DEADLINE_S))
        self.stream.alive = False


class CountingSender:
    """A producer that cannot number its records: the plain stream API around librdkafka's producer."""

    def __init__(self, world: World, truth: Truth, source: str, producer: str, rng: random.Random) -> None:
        self.truth, self.rng = truth, rng
        self.stream = truth.streams[producer] = Stream(producer, source, counted=True)
        self._reporter = StreamReporter(
            {"millrace.producer": producer, "millrace.window.ms": WINDOW_MS}, sequenced=False
        )
        self._client = Producer({"bootstrap.servers": world.bootstrap(source), "acks": "all"})

    def send(self, count: int, partitions: int, start_ms: int, step_ms: int) -> None:
        for number in range(1, count + 1):
            stamp = self._reporter.stamp(self.truth.topic, start_ms + number * step_ms)
            value = value_of(self.stream.producer, number, self.rng)
            self.stream.created[number] = stamp.created_ms

            def on_delivery(error: Any, message: Any, stamp: Any = stamp, number: int = number) -> None:
                assert error is None
                stamp.acknowledged(len(message))
                self.stream.acknowledged.add(number)

            self._client.produce(
                self.truth.topic,
                value,
                partition=self.rng.randrange(partitions),
                headers=[stamp.header],
                timestamp=stamp.created_ms,
                on_delivery=on_delivery,
            )
        assert self._client.flush(patience(DEADLINE_S)) == 0

    def close(self) -> None:
        events = self._reporter.close()
        for event in events:
            self._client.produce(
                EVENTS_TOPIC, event.value, event.key, 0, lambda *_, told=event: told.delivered()
            )
        assert self._client.flush(patience(DEADLINE_S)) == 0
        for event in events:
            event.delivered()
        self._reporter.finish()


_MORTAL = """
import json, sys, time
from millrace.audit.producer import AuditedProducer

settings, topic, first, confirmed, last, partitions, start_ms = json.loads(sys.argv[1])
producer = AuditedProducer(settings)

def send(numbers):
    for number in numbers:
        value = f"{settings['millrace.producer']}#{number}|".encode()
        producer.produce(topic, value, partition=number % partitions, timestamp=start_ms + 50 * number)

send(range(1, first + 1))
assert producer.flush(60) == 0
print("first", flush=True)
sys.stdin.readline()
send(range(first + 1, confirmed + 1))
assert producer.flush(60) == 0
send(range(confirmed + 1, last + 1))
print("ready", flush=True)
time.sleep(600)
"""


class MortalSender:
    """A producer in a process of its own, killed with SIGKILL while records are under way whose fate it never
    learnt. With a journal the next start tells what it knew."""

    def __init__(
        self,
        world: World,
        truth: Truth,
        source: str,
        producer: str,
        rng: random.Random,
        *,
        partitions: int,
        start_ms: int,
        journal: Path | None,
    ) -> None:
        self.world, self.truth = world, truth
        self.stream = truth.streams[producer] = Stream(producer, source)
        first = rng.randint(10, 30)
        self.confirmed, self.last = rng.randint(40, 80), rng.randint(81, 95)
        self.settings = producer_settings(world.bootstrap(source), producer, rng)
        self.settings["millrace.content.digest"] = truth.content
        if journal is not None:
            self.settings["millrace.journal"] = str(journal)
        self._has_journal = journal is not None
        self.stream.created = {number: start_ms + 50 * number for number in range(1, self.last + 1)}
        given = [self.settings, truth.topic, first, self.confirmed, self.last, partitions, start_ms]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MORTAL, json.dumps(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def die(self) -> None:
        """Kill it; with a journal start again, and learn from the events what was told in the end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        assert self.process.stdout.readline() == b"first\n"
        # Its first report is out: it will not speak of what it sends from here on.
        until(self._told, lambda: f"{self.stream.producer} has told nothing")
        self.process.stdin.write(b"go on\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"ready\n"
        self.process.kill()
        self.process.wait(patience(DEADLINE_S))
        self.process.stdin.close()
        self.process.stdout.close()
        if self._has_journal:
            again = AuditedProducer(self.settings)
            again.report()
            assert again.close(patience(DEADLINE_S))

    def _told(self) -> list[dict[str, Any]]:
        """Its events, once it has sent one of the stream: that one follows the counts."""
        mine = _events_of(self.world, self.stream, self.truth.topic)
        return mine if any(event["type"] == "stream" for event in mine) else []

    def learn(self) -> None:
        """What the events say, read by the words of EVENTS.md."""
        told_by_events(self.world, self.stream, self.truth.topic)
        if self._has_journal:
            confirmed = set(range(1, self.confirmed + 1))
            assert confirmed <= self.stream.acknowledged and not self.stream.silent
        else:
            assert self.stream.silent


def _events_of(world: World, stream: Stream, topic: str) -> list[dict[str, Any]]:
    """The newest event of every key of a stream, as its source holds them."""
    found = world.events(stream.source).values()
    return [each for each in found if (each.get("producer"), each.get("topic")) == (stream.producer, topic)]


def told_by_events(world: World, stream: Stream, topic: str) -> None:
    """Put what the events say of a stream into it, read by the words of EVENTS.md."""
    for event in _events_of(world, stream, topic):
        if event["type"] == "count":
            stream.told_windows.add(event["window_start_ms"])
            stream.acknowledged |= _numbers(event["acknowledged"])
            stream.ambiguous |= _numbers(event["ambiguous"])
        elif event["type"] == "stream":
            stream.last_assigned = event["last_assigned"]
            stream.silent = event["state"] != "closed"


def _numbers(ranges: list[list[int]]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}


def producer_settings(bootstrap: str, producer: str, rng: random.Random) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap,
        "compression.type": rng.choice(CODECS),
        "linger.ms": rng.choice([0, 2, 5]),
        "batch.num.messages": rng.choice([7, 40, 1000]),
        "message.max.bytes": 2_000_000,
        "log_level": 2,
        "millrace.producer": producer,
        "millrace.datacenter": producer.partition("@")[2],
        "millrace.window.ms": WINDOW_MS,
        "millrace.report.interval.ms": NEVER_MS,
    }


def value_of(producer: str, number: int, rng: random.Random, size: int = 0) -> bytes:
    return f"{producer}#{number}|".encode() + rng.randbytes(size or rng.randint(1, 120))
