"""What auditing costs a producer, in time and in bytes.

    python -m tests.benchmarks.audit.bench_producer [--rounds N] [--records 200K] [--only time|bytes]

Time: microseconds of the application's thread per record, in `produce` and in the polling that serves its
callbacks, and records per second until all is delivered to a broker on the same machine. Every round runs all
ways once, in changing order, and ratios are taken within a round: the machine's mood cancels.

Bytes: what a record takes in the log, plain and audited, with each codec, beside the 9 bytes of overhead
per message that the Kafka paper (section 5) counts.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from millrace.audit.contract.header import HEADER_KEY
from millrace.audit.producer import AuditedProducer
from tests.servers import BrokerProcess, ZooKeeper

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PAPER_OVERHEAD = 9
BATCH = 1000
POLL_EVERY = 100
VALUE_SIZE = 200
NAME = "flights-gateway@ewr-app-07.example.net"

Way = Callable[[str, list[bytes], Path], tuple[float, float, float]]


@contextmanager
def one_broker() -> Iterator[BrokerProcess]:
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        zookeeper = ZooKeeper(folder / "zookeeper").start()
        broker = BrokerProcess(zookeeper.chroot(), folder / "broker")
        try:
            yield broker.start()
        finally:
            broker.kill()
            zookeeper.stop()


def values_like_events(count: int) -> list[bytes]:
    """JSON events of 200 bytes that differ as events do: what a codec meets in the field."""
    dice = random.Random(1)
    rows = []
    for number in range(count):
        row = (
            f'{{"flight":"UA{dice.randrange(1, 3000)}","tail":"N{dice.randrange(10000, 99999)}","from":"EWR",'
            f'"to":"{dice.choice(("SFO", "ORD", "IAH", "LAX", "BOS"))}","delay":{dice.randrange(-20, 240)},'
            f'"distance":{dice.randrange(80, 4900)},"number":{number}'
        )
        rows.append((row + ',"note":"' + "x" * max(0, VALUE_SIZE - len(row) - 11) + '"}').encode())
    return rows


def settings(bootstrap: str, audited: bool, **more: Any) -> dict[str, Any]:
    own = {"millrace.producer": NAME} if audited else {"acks": "all", "enable.idempotence": True}
    return {
        "bootstrap.servers": bootstrap,
        "linger.ms": 20,
        "queue.buffering.max.messages": 1_000_000,
        "queue.buffering.max.kbytes": 1_000_000,
        **own,
        **{key.replace("_", "."): value for key, value in more.items()},
    }


def told(error: Any, message: Any) -> None:
    """The application's own callback."""


def timed(producer: Producer, count: int, produce: Callable[[], None]) -> tuple[float, float, float]:
    """(µs a record until all are queued, µs a record in polling after that, records/s until the end)."""
    gc.collect()
    began, thread = time.perf_counter(), time.thread_time()
    produce()
    producing = time.thread_time() - thread
    thread = time.thread_time()
    while len(producer):
        producer.poll(0.05)
    polling = time.thread_time() - thread
    elapsed = time.perf_counter() - began
    producer.close()
    return producing / count * 1e6, polling / count * 1e6, count / elapsed


def one_by_one(
    callback: Any = None, poll_every: int = POLL_EVERY, **details: Any
) -> Callable[[Producer, str, list[bytes]], None]:
    def run(producer: Producer, topic: str, values: list[bytes]) -> None:
        produce = producer.produce
        for start in range(0, len(values), poll_every):
            for value in values[start : start + poll_every]:
                produce(topic, value, on_delivery=callback, **details)
            producer.poll(0)

    return run


def in_batches(callback: Any = None) -> Callable[[Producer, str, list[bytes]], None]:
    def run(producer: Producer, topic: str, values: list[bytes]) -> None:
        for start in range(0, len(values), BATCH):
            messages = [{"value": value} for value in values[start : start + BATCH]]
            producer.produce_batch(topic, messages, on_delivery=callback)
            producer.poll(0)

    return run


WAYS: dict[str, tuple[bool, dict[str, Any], Any]] = {
    "plain, no callback": (False, {}, one_by_one()),
    "plain, callback": (False, {}, one_by_one(told)),
    "plain, callback and a header": (False, {}, one_by_one(told, headers=[(HEADER_KEY, b"x" * 60)])),
    "plain, produce_batch": (False, {}, in_batches()),
    "audited, no callback": (True, {}, one_by_one()),
    "audited, callback": (True, {}, one_by_one(told)),
    "audited, produce_batch": (True, {}, in_batches()),
    "audited, journal": (True, {"millrace_journal": True}, one_by_one()),
    "audited, content digest": (True, {"millrace_content_digest": True}, one_by_one()),
    "plain, polled each": (False, {}, one_by_one(told, 1)),
    "audited, polled each": (True, {}, one_by_one(told, 1)),
    "audited, journal, polled each": (True, {"millrace_journal": True}, one_by_one(told, 1)),
}
BASE = "plain, callback"
POLLED_BASE = "plain, polled each"


def run_way(
    name: str, broker: BrokerProcess, values: list[bytes], folder: Path
) -> tuple[float, float, float]:
    audited, more, run = WAYS[name]
    if "millrace_journal" in more:
        more = {"millrace_journal": folder / f"journal-{time.monotonic_ns()}"}
    kind = AuditedProducer if audited else Producer
    producer = kind(settings(broker.bootstrap, audited, **more))
    topic = "time"
    producer.list_topics(topic, timeout=30)
    producer.produce(topic, b"first")
    producer.flush()
    return timed(producer, len(values), lambda: run(producer, topic, values))


def bench_time(broker: BrokerProcess, rounds: int, count: int) -> None:
    values = values_like_events(count)
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="millrace-journals-") as folder:
        for number in range(rounds):
            order = list(WAYS)
            random.Random(number).shuffle(order)
            for name in order:
                samples[name].append(run_way(name, broker, values, Path(folder)))
    print(f"{'':<30} {'produce':>9} {'poll':>9} {'sum µs':>9} {'records/s':>12}   sum, beside '{BASE}',")
    print(f"{'':<30} {'':>9} {'':>9} {'':>9} {'':>12}   or, where polled for each, '{POLLED_BASE}'")
    for name, taken in samples.items():
        bases = samples[POLLED_BASE if "polled each" in name else BASE]
        ratios = [sum(own[:2]) / sum(base[:2]) for own, base in zip(taken, bases, strict=True)]
        producing, polling, rate = (statistics.median(column) for column in zip(*taken, strict=True))
        both = statistics.median(sum(row[:2]) for row in taken)
        print(
            f"{name:<30} {producing:>9.2f} {polling:>9.2f} {both:>9.2f} {rate:>12,.0f}   "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


def log_bytes(broker: BrokerProcess, topic: str) -> int:
    return sum(path.stat().st_size for path in broker.data.glob(f"{topic}-*/*.log"))


def bench_bytes(broker: BrokerProcess, count: int) -> None:
    values = values_like_events(count)
    print(f"\nbytes a record in the log, values of {VALUE_SIZE} bytes, a name of {len(NAME)} bytes, "
          f"batches of {BATCH}; the paper: {PAPER_OVERHEAD}")  # fmt: skip
    print(f"{'':<8} {'plain':>8} {'audited':>8} {'compact':>8} {'audited adds':>14} {'compact adds':>14}")
    for codec in CODECS:
        sizes = []
        for identity in (None, "full", "compact"):
            topic = f"bytes-{codec}-{identity}"
            more = {"compression_type": codec, "linger_ms": 1000, "batch_num_messages": BATCH}
            if identity is not None:
                more["millrace_identity"] = identity
            kind = Producer if identity is None else AuditedProducer
            producer = kind(settings(broker.bootstrap, identity is not None, **more))
            for value in values:
                producer.produce(topic, value)
            producer.flush()
            producer.close()
            sizes.append(log_bytes(broker, topic) / count)
        plain, full, compact = sizes
        print(
            f"{codec:<8} {plain:>8.1f} {full:>8.1f} {compact:>8.1f} {full - plain:>14.1f} "
            f"{compact - plain:>14.1f}"
        )


def number_of(text: str) -> int:
    return int(text[:-1]) * 1000 if text.upper().endswith("K") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--records", type=number_of, default=100_000)
    parser.add_argument("--only", choices=("time", "bytes"))
    options = parser.parse_args()
    with one_broker() as broker:
        if options.only != "bytes":
            bench_time(broker, options.rounds, options.records)
        if options.only != "time":
            bench_bytes(broker, min(options.records, 50_000))


if __name__ == "__main__":
    main()
