"""Mishaps of the end-to-end scenarios that go with any other: identities that cannot be read, count events
that are gone, clocks that are wrong.

Called by `end_to_end_scenario`. `mishaps_of(seed)` draws them by a rule of its own, so that the main faults
of a seed stay what they are. What must be told of them is derived here, from the words of EVENTS.md and the
verdict table; nothing of the audit's code decides it.

- *corrupt-identity*: the mirror spoils the header of some records, a stranger writes records with spoilt
  headers into the source. A record whose header cannot be read has not arrived: it is lost on the hop, and
  counted as not to be trusted. One under another producer's name arrives, and its stream proves nothing more.
- *lost-counts*: the topic of the events loses everything that it holds, in the source and in the aggregate,
  after a producer has told its first counts there. It goes on; nobody tells of those records again.
- *skewed-clocks*: one producer's clock is a day ahead, another's hours behind and set back under way, behind
  what it has promised: records keep the times of the clock, in a second stream.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Producer

from tests.spark.end_to_end_senders import Sender, producer_settings, told_by_events
from tests.spark.end_to_end_truth import Stream, Truth
from tests.spark.end_to_end_world import AGGREGATE, ALIASES, DEADLINE_S, EVENTS_TOPIC, World
from tests.waiting import patience

MISHAPS = ("corrupt-identity", "lost-counts", "skewed-clocks")
OTHER_NAME = "ZZ@elsewhere"
FUTURE, IMPOSSIBLE = "header of an unknown version", "header cut short or impossible"
UNREADABLE = {"future": FUTURE, "cut": IMPOSSIBLE, "huge": IMPOSSIBLE}
"""What the mirror does to a header, and under which name it is counted; `bare` takes it away, `name` puts
another producer's name into it."""
HOWS = (*UNREADABLE, "bare", "name")
STRANGE_HEADERS = {FUTURE: b"\x07" + bytes(30), IMPOSSIBLE: b"\x01" + bytes(8)}
DAY_MS = 86_400_000
SAME_STREAM = "two producers use one stream id: "


def mishaps_of(seed: int) -> set[str]:
    rng = random.Random(f"further {seed}")
    return {kind for kind in MISHAPS if rng.random() < 0.4}


def choose_spoilt(numbered: list[str], rng: random.Random) -> dict[str, str]:
    """{name: how} of three records, taken out of `numbered`."""
    return {numbered.pop(): how for how in rng.sample(HOWS, 3)}


# --- a stranger in the source --------------------------------------------------------------------


def write_strange_records(
    world: World, truth: Truth, source: str, partitions: int, rng: random.Random
) -> None:
    """Records with headers that no reader of today understands."""
    client = Producer({"bootstrap.servers": world.bootstrap(source), "acks": "all"})
    for reason, header in STRANGE_HEADERS.items():
        for _ in range(rng.randint(1, 2)):
            name = f"stranger#{len(truth.strange) + 1}"
            truth.strange[name] = reason
            client.produce(
                truth.topic,
                f"{name}|".encode(),
                partition=rng.randrange(partitions),
                headers=[("_mr", header)],
            )
    assert client.flush(patience(DEADLINE_S)) == 0


def untrusted(truth: Truth) -> dict[str, int]:
    """{what: how many} could not be read, by cluster, of all that the audit can have seen by now."""
    found: Counter[str] = Counter()
    copies = truth.arrivals()
    for source, partitions in truth.logs.items():
        old = [partition for name, partition in truth.old if name == source]
        for partition in (*partitions.values(), *old):
            for offset in partition.kept | partition.readable():
                if reason := truth.strange.get(partition.records[offset].name):
                    found[f"{reason}, in {source}, topic {truth.topic}"] += 1
    reasons = {**truth.strange, **{name: UNREADABLE.get(how, "") for name, how in truth.spoilt.items()}}
    for name, reason in reasons.items():
        if reason:
            found[f"{reason}, in {AGGREGATE}, topic {truth.topic}"] += copies[name]
    return dict(+found)


def unaudited(truth: Truth) -> dict[str, int]:
    """{tier: records without a header}"""
    copies = truth.arrivals()
    return dict(+Counter({AGGREGATE: sum(copies[n] for n, how in truth.spoilt.items() if how == "bare")}))


def compare_doubts(summary: Mapping[str, Any], truth: Truth) -> bool:
    """That the summary tells of exactly these; gives whether there are any.

    A second name under a stream's id is told with the stream, and once more with the records where both names
    lie in one cell, which is the audit's affair.
    """
    said = {each["what"]: each["count"] for each in summary["untrusted"]}
    assert not any(each.get("waived") for each in summary["untrusted"])
    named = [what for what in said if what.startswith(SAME_STREAM)]
    assert {what: count for what, count in said.items() if what not in named} == untrusted(truth)
    doubted = {stream.producer for stream in truth.streams.values() if truth.is_doubted(stream)}
    known_as = {f"it is known as {name}, record headers name {OTHER_NAME}" for name in doubted}
    pairs = {" and ".join(sorted((name, OTHER_NAME))) for name in doubted}
    told = {what.removeprefix(SAME_STREAM).partition(": stream ")[0] for what in named}
    assert known_as <= told, (known_as, told)
    assert {each.partition(", in ")[0] for each in told - known_as} <= pairs, (pairs, told)
    assert summary["unaudited"] == unaudited(truth)
    if said:
        assert "PROVEN" != summary["verdict"] != "COUNT_MATCH", "nothing is proven beside it"
    return bool(said)


# --- events that are gone ------------------------------------------------------------------------


class UntoldSender:
    """A producer whose first counts the events topic loses."""

    def __init__(
        self, world: World, truth: Truth, rng: random.Random, partitions: int, start_ms: int
    ) -> None:
        """Send, tell, and lose what was told; before anybody else has told anything that matters."""
        self._world, self._partitions = world, partitions
        self._sender = Sender(world, truth, "ewr", "untold@ewr", rng, start_ms=start_ms)
        self._sender.send(rng.randint(30, 70), partitions)
        self._sender.report()
        world.wait_until_carried(EVENTS_TOPIC, ["ewr"])
        for cluster in ("ewr", AGGREGATE):
            for number, end in world.readers[cluster].ends(EVENTS_TOPIC).items():
                world.expire(cluster, EVENTS_TOPIC, number, end)

    def go_on(self) -> None:
        """More records, and the end; what it has acknowledged to its name is what the events tell now."""
        stream = self._sender.stream
        self._sender.send(30, self._partitions)
        self._sender.close()
        sent, stream.acknowledged = stream.acknowledged, set()
        told_by_events(self._world, stream, self._sender.truth.topic)
        assert stream.acknowledged < sent, "nothing was lost"


# --- clocks --------------------------------------------------------------------------------------

_SKEWED = """
import json, sys, time

settings, topic, names, skew_ms, set_back_ms, partitions = json.loads(sys.argv[1])
real_ns, skew_ns = time.time_ns, [skew_ms * 1_000_000]
time.time_ns = lambda: real_ns() + skew_ns[0]

from millrace.audit.producer import AuditedProducer

producer = AuditedProducer(settings)
found = [{"created": {}, "acknowledged": []} for _ in names]

def told(stream, number):
    def on_delivery(error, message):
        stream["created"][number] = message.timestamp()[1]
        if error is None:
            stream["acknowledged"].append(number)
    return on_delivery

sent = 0
for stream, (name, count) in zip(found, names):
    for number in range(1, count + 1):
        skew_ns[0] += 50_000_000
        sent += 1
        value = f"{name}#{number}|".encode()
        producer.produce(topic, value, partition=sent % partitions, on_delivery=told(stream, number))
    assert producer.flush(60) == 0  # what is under way holds back the promise
    producer.report()
    skew_ns[0] -= set_back_ms * 1_000_000
assert producer.close(60)
print(json.dumps(found))
"""


class SkewedSender:
    """A producer in a process of its own, by the clock of which it creates and reports."""

    def __init__(
        self,
        world: World,
        truth: Truth,
        producer: str,
        rng: random.Random,
        *,
        partitions: int,
        skew_ms: int,
        set_back_ms: int = 0,
    ) -> None:
        self._world, self._topic = world, truth.topic
        settings = producer_settings(world.bootstrap("ewr"), producer, rng)
        settings["millrace.content.digest"] = truth.content
        count = rng.randint(40, 80)
        counts = [count // 2, count - count // 2] if set_back_ms else [count]
        self._names = [(f"{producer}{' again' * number}", each) for number, each in enumerate(counts)]
        self._streams = [Stream(name, "ewr", ahead=skew_ms > 0) for name, _ in self._names]
        truth.streams.update({stream.producer: stream for stream in self._streams})
        given = [settings, truth.topic, self._names, skew_ms, set_back_ms, partitions]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SKEWED, json.dumps(given)], stdout=subprocess.PIPE, text=True
        )

    def learn(self) -> None:
        """Wait for its end; what it was told of its records."""
        told, _ = self._process.communicate(timeout=patience(DEADLINE_S))
        assert self._process.returncode == 0
        messages = self._world.readers["ewr"].messages(self._topic)
        ids = {(_name(message), dict(message.headers() or ()).get("_mr", b"")[1:9]) for message in messages}
        for stream, (name, count), found in zip(self._streams, self._names, json.loads(told), strict=True):
            stream.created = {int(number): created_ms for number, created_ms in found["created"].items()}
            stream.acknowledged = set(found["acknowledged"])
            stream.last_assigned = count
            assert stream.acknowledged == set(range(1, count + 1))
            (id_,) = (id_.hex() for named, id_ in ids if named == name)
            assert id_ not in ALIASES, "after a clock was set back, records are in a stream of their own"
            ALIASES[id_] = name


def _name(message: Any) -> str:
    """The part of a record's value that says whose it is."""
    return str(message.value().partition(b"#")[0].decode("latin-1"))


def start_skewed(world: World, truth: Truth, rng: random.Random, partitions: int) -> list[SkewedSender]:
    ahead = SkewedSender(world, truth, "ahead@ewr", rng, partitions=partitions, skew_ms=DAY_MS)
    behind = SkewedSender(
        world, truth, "behind@ewr", rng, partitions=partitions, skew_ms=-DAY_MS // 12, set_back_ms=1700
    )
    return [ahead, behind]


def learn_all(senders: Iterable[SkewedSender]) -> None:
    for sender in senders:
        sender.learn()
