"""Replays one datacenter's feeds into its cluster: one process, one audited producer a feed.

Started by the demo as `python -m millrace.deploy.demo.replay PLAN`, where PLAN is a `ReplayPlan` in JSON.
Events go out in the order of their creation, the feeds of a datacenter interleaved as they were, spread over
the time the plan gives (a clock shared by all datacenters, so a year passes everywhere alike).

Progress goes to standard output, one JSON object a line: `{"published": n}`. The times at which each event
was handed to its producer and acknowledged by the source go to a file (`SentTimes`) for the latency figures.
Ends with status 0 when every event is acknowledged, 1 when one is not.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from millrace.deploy.demo.events import Events, EventSource, Feed

if TYPE_CHECKING:
    from millrace.audit.producer import AuditedProducer

PROGRESS_INTERVAL_S = 0.25
PACING_STRIDE = 64
FLUSH_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What one replay process is told. `begin_at` and `seconds` are the shared clock, in Unix seconds."""

    source: EventSource
    datacenter: str
    bootstrap: str
    window_ms: int
    begin_at: float
    seconds: float
    sent_times: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ReplayPlan:
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "source": EventSource(**content["source"])})


class SentTimes:
    """When each event was handed to its producer and when its source acknowledged it: (2, count) Unix
    milliseconds by producer; in the second row NaN where that is not known."""

    def __init__(self, times: dict[str, NDArray[np.float64]]):
        self._times = times

    def at(self, producer: str, sequence: int) -> tuple[float, float] | None:
        """(sent, acknowledged); None for what was not sent here."""
        times = self._times.get(producer)
        if times is None or not 0 < sequence <= times.shape[1]:
            return None
        return float(times[0, sequence - 1]), float(times[1, sequence - 1])

    def write(self, path: Path) -> None:
        names = sorted(self._times)
        arrays = {f"t{index}": self._times[name] for index, name in enumerate(names)}
        np.savez(path, names=np.array(names), **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> SentTimes:
        with np.load(path) as stored:
            return cls({str(name): stored[f"t{index}"] for index, name in enumerate(stored["names"])})


class Acknowledgements:
    """Takes the delivery reports of one producer, in the order of sending: its key is one partition's.

    What a report says of the time is from `produce` to the answer; the report itself is served later.
    """

    def __init__(self, replay: Replay, times: NDArray[np.float64]):
        self._replay = replay
        self._times = times
        self._count = 0

    def __call__(self, error: Any, message: Any) -> None:
        self._replay.delivered(error)
        if error is None and (took_s := message.latency()) is not None:
            self._times[1, self._count] = self._times[0, self._count] + took_s * 1000.0
        self._count += 1


class Replay:
    """Sends the feeds of one datacenter."""

    def __init__(self, plan: ReplayPlan, events: Events):
        self._plan = plan
        self._events = events
        self._feeds = events.feeds_of(plan.datacenter)
        self._published = 0
        self._refused: list[str] = []
        self._next_progress = 0.0

    def run(self) -> int:
        """Sends everything, closes the streams; the exit status."""
        producers = [self._producer(feed) for feed in self._feeds]
        feed_numbers, rows = self._in_order()
        sent = [np.full((2, len(self._events.feeds[feed])), np.nan) for feed in self._feeds]
        self._send_all(producers, feed_numbers, rows, sent)
        for producer in producers:
            producer.flush(FLUSH_TIMEOUT_S)
            producer.close(FLUSH_TIMEOUT_S)
        self._report(force=True)
        SentTimes({feed.producer: times for feed, times in zip(self._feeds, sent, strict=True)}).write(
            Path(self._plan.sent_times)
        )
        missing = len(rows) - self._published
        if missing:
            reason = self._refused[0] if self._refused else "no answer in time"
            print(f"{missing} of {len(rows)} events were not acknowledged: {reason}", file=sys.stderr)
        return 1 if missing else 0

    def _send_all(
        self,
        producers: list[AuditedProducer],
        feed_numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        sent: list[NDArray[np.float64]],
    ) -> None:
        topic = self._events.topic
        keys = [feed.producer.encode() for feed in self._feeds]
        positions = [0] * len(producers)
        due = self._due_times(rows)
        told = [Acknowledgements(self, times) for times in sent]
        created = self._events.created_ms
        values = self._events.values.take(rows)
        numbers, row_list = feed_numbers.tolist(), rows.tolist()
        for index, (number, row, value) in enumerate(zip(numbers, row_list, values, strict=True)):
            if index % PACING_STRIDE == 0:
                self._wait_until(due[index], producers)
            now_ms = time.time() * 1000.0
            created_ms = int(now_ms) if created is None else int(created[row])
            producer = producers[number]
            while True:
                try:
                    producer.produce(
                        topic, value, keys[number], timestamp=created_ms, on_delivery=told[number]
                    )
                    break
                except BufferError:
                    producer.poll(0.05)
            sent[number][0, positions[number]] = now_ms
            positions[number] += 1

    def _wait_until(self, due_at: float, producers: list[AuditedProducer]) -> None:
        """Serves delivery reports until the events that follow are due."""
        while True:
            for producer in producers:
                producer.poll(0)
            self._report()
            wait_s = due_at - time.time()
            if wait_s <= 0:
                return
            time.sleep(min(wait_s, 0.02))

    def _due_times(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """When each event is sent: its place in the file's span of time, squeezed into the plan's seconds."""
        begin, seconds = self._plan.begin_at, self._plan.seconds
        created = self._events.created_ms
        if created is None:
            fractions = rows / max(1, self._events.count - 1)
        else:
            fractions = (created[rows] - created.min()) / max(1, int(np.ptp(created)))
        return np.asarray(begin + fractions * seconds, np.float64)

    def _in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(feed number, row) of every event of this datacenter, in the order of sending."""
        rows = np.concatenate([self._events.feeds[feed] for feed in self._feeds])
        numbers = np.concatenate(
            [np.full(len(self._events.feeds[feed]), number) for number, feed in enumerate(self._feeds)]
        )
        created = self._events.created_ms
        # Stable, and by row where nothing else decides, so that each feed keeps its own order.
        order = np.argsort(rows, kind="stable") if created is None else np.lexsort((rows, created[rows]))
        return numbers[order], rows[order]

    def _producer(self, feed: Feed) -> AuditedProducer:
        from millrace.audit.producer import AuditedProducer

        return AuditedProducer(
            {
                "bootstrap.servers": self._plan.bootstrap,
                "client.id": feed.producer,
                "compression.type": "lz4",
                "linger.ms": 10,
                "millrace.producer": feed.producer,
                "millrace.application": "demo-replay",
                "millrace.datacenter": feed.datacenter,
                "millrace.window.ms": self._plan.window_ms,
                "millrace.report.interval.ms": 5_000,
            }
        )

    def delivered(self, error: Any) -> None:
        if error is None:
            self._published += 1
        elif len(self._refused) < 10:
            self._refused.append(str(error))

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._next_progress:
            self._next_progress = now + PROGRESS_INTERVAL_S
            print(json.dumps({"published": self._published}), flush=True)


def main() -> int:
    plan = ReplayPlan.read(Path(sys.argv[1]))
    return Replay(plan, plan.source.load()).run()


if __name__ == "__main__":
    sys.exit(main())
