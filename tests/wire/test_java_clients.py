"""Java's producers and consumers, by the programs that Apache Kafka has for them."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from millrace.deploy.processes import spawn
from tests.waiting import patience
from tests.wire.foreign_clients import Sent, wait_until
from tests.wire.java_tools import together

NEW_YEAR_MS = 1_357_034_400_000

pytestmark = pytest.mark.usefixtures("coordinators")


def test_console_producer_writes_what_all_others_read(java, readers, new_topic):
    """Every codec, every acks, null headers, a large message; the console consumer reads all of it, too.

    It begins at a time, an hour ago: of a further topic, which has older records, it reads the newer ones.
    """
    ways = {"gzip": ("1", False), "snappy": ("0", False), "lz4": ("all", False), "zstd": ("all", True)}
    topics = {codec: new_topic(max_message_bytes=4 << 20) for codec in ways}
    large = random.Random(7).randbytes(700_000).hex()
    headers = "n:{n},null:NULL,twice:1,twice:2"
    values = {**{n: f"value {n}" for n in range(100)}, 100: "NULL", 101: large}
    lines = [f"{headers.format(n=n)}\tkey {n}|{value}" for n, value in values.items()]
    outcomes = together(
        {
            codec: lambda codec=codec, topic=topic: java.run(
                "console-producer",
                *("--topic", topic, "--compression-codec", codec),
                *("--property", "parse.key=true", "--property", "key.separator=|"),
                *("--property", "parse.headers=true", "--property", "null.marker=NULL"),
                *("--producer-property", f"acks={ways[codec][0]}"),
                *("--producer-property", f"enable.idempotence={str(ways[codec][1]).lower()}"),
                *("--producer-property", f"max.request.size={4 << 20}"),
                given="\n".join(lines) + "\n",
            )
            for codec, topic in topics.items()
        }
    )
    expected = [
        (
            b"key %d" % n,
            value.encode() if value != "NULL" else None,
            (("n", b"%d" % n), ("null", None), ("twice", b"1"), ("twice", b"2")),
        )
        for n, value in values.items()
    ]
    for codec, topic in topics.items():
        outcomes[codec].checked()
        # With acks=0 the tool is gone before the broker has everything.
        wait_until(lambda: readers[0].bounds(topic, 0) == (0, len(lines)), f"all records in {codec}")  # noqa: B023
        for reader in readers:
            received = reader.drain(topic)
            same = [(r.key, r.value, r.headers) for r in received] == expected
            assert same, (codec, reader.name)  # said in short: there is more than 1 MB of it
            assert [r.offset for r in received] == list(range(len(lines)))

    aged = new_topic()
    now_ms = int(time.time() * 1000)
    for age_ms, value in ((7_200_000, b"too old"), (0, b"new")):
        readers[0].produce(aged, [Sent(value, b"key", timestamp_ms=now_ms - age_ms) for _ in range(3)])
    shown = ("print.headers=true", "print.key=true", "null.literal=NULL")
    read = java.run(
        "console-consumer",
        *("--include", "|".join((*topics.values(), aged)), "--timeout-ms", "20000"),
        *("--max-messages", str(len(topics) * len(lines) + 3)),
        *("--consumer-property", "auto.offset.reset=by_duration:PT1H"),
        *(word for each in shown for word in ("--property", each)),
    ).checked()
    every = Counter({line.replace("|", "\t"): len(topics) for line in lines})
    same = Counter(read.lines) == every + Counter({"NO_HEADERS\tkey\tnew": 3})
    assert same, [line[:80] for line in read.lines]


def test_java_producer_is_fenced_by_a_second_one(java, readers, new_topic, fresh_name, tmp_path):
    """The performance tool in a transaction without end; what it wrote is aborted."""
    topic, transactional_id = new_topic(), fresh_name("transactional")
    log = tmp_path / "performance.log"
    fenced = spawn(
        java.command(
            "producer-performance",
            *("--topic", topic, "--num-records", "1000000", "--record-size", "10", "--throughput", "50"),
            *("--transactional-id", transactional_id, "--transaction-duration-ms", "600000"),
            *("--producer-props", f"bootstrap.servers={java.bootstrap}"),
        ),
        log=log,
        die_with_parent=True,
    )
    try:
        wait_until(lambda: readers[0].bounds(topic, 0)[1] > 0, "the tool's records")
        second = readers[0].transactional(transactional_id)
        # It goes on sending, and says of every record why it was refused.
        told = re.compile("ProducerFencedException|InvalidProducerEpochException")
        wait_until(lambda: told.search(log.read_text()) is not None, "the tool is told")
    finally:
        fenced.kill()
        fenced.wait()
    second.begin()
    (offset,) = second.send(topic, [Sent(b"second")])
    second.commit()
    wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, offset + 2), "the second's marker")
    for reader in readers:
        assert [(r.offset, r.value) for r in reader.drain(topic, committed=True)] == [(offset, b"second")]
    second.close()


def test_console_consumer_reads_what_others_write(java, readers, new_topic, fresh_name):
    """By group from the beginning, from an offset of one partition, and committed records alone."""
    topic, group = new_topic(partitions=2), fresh_name("group")
    records = [
        Sent(
            b"value %d" % n if n % 3 else None,
            b"key %d" % n,
            (("n", b"%d" % n), ("null", None)),
            NEW_YEAR_MS + n,
            n % 2,
        )
        for n in range(20)
    ]
    readers[0].produce(topic, records, "zstd")
    producer = readers[0].transactional(fresh_name("transactional"))
    for value, fate in ((b"aborted", "abort"), (b"committed", "commit")):
        producer.begin()
        producer.send(topic, [Sent(value, b"key", (), NEW_YEAR_MS + 99)])
        getattr(producer, fate)()
    producer.close()
    wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 14), "the markers")

    shown = [f"print.{what}=true" for what in ("timestamp", "partition", "offset", "headers", "key")]
    properties = [word for each in (*shown, "null.literal=NULL") for word in ("--property", each)]
    outcomes = together(
        {
            "group": lambda: java.run(
                "console-consumer",
                *("--topic", topic, "--group", group, "--from-beginning", "--max-messages", "21"),
                *("--isolation-level", "read_committed", "--timeout-ms", "20000"),
                *properties,
            ),
            "partition": lambda: java.run(
                "console-consumer",
                *("--topic", topic, "--partition", "0", "--offset", "7", "--max-messages", "5"),
                *("--timeout-ms", "20000"),
                *properties,
            ),
        }
    )

    def line(n: int) -> str:
        value = f"value {n}" if n % 3 else "NULL"
        head = f"CreateTime:{NEW_YEAR_MS + n}\tPartition:{n % 2}\tOffset:{n // 2}"
        return f"{head}\tn:{n},null:NULL\tkey {n}\t{value}"

    def marked(offset: int, value: str) -> str:
        return f"CreateTime:{NEW_YEAR_MS + 99}\tPartition:0\tOffset:{offset}\tNO_HEADERS\tkey\t{value}"

    by_group = outcomes["group"].checked().lines
    assert sorted(by_group) == sorted([*map(line, range(20)), marked(12, "committed")])
    from_seven = outcomes["partition"].checked().lines
    assert from_seven == [
        *map(line, (14, 16, 18)),
        marked(10, "aborted"),
        marked(12, "committed"),
    ]
    assert readers[0].committed(group, topic, 0) == 14, "past the marker: the Java client steps over it"
    assert readers[0].committed(group, topic, 1) == 10


def test_java_client_copies_in_transactions(java, readers, new_topic, fresh_name):
    """Consume, transform, produce: with aborts on the way, every record is there exactly once."""
    source, target, group = new_topic(), new_topic(), fresh_name("group")
    readers[0].produce(source, [Sent(b"%d" % n, timestamp_ms=NEW_YEAR_MS + n) for n in range(200)])
    done = java.raw(
        "transactional-copier",
        *("--broker-list", java.bootstrap, "--input-topic", source, "--input-partition", "0"),
        *("--output-topic", target, "--max-messages", "200", "--consumer-group", group),
        *("--transaction-size", "20", "--transactional-id", fresh_name("transactional")),
        *("--enable-random-aborts",),
    ).checked()
    last = json.loads(done.lines[-1])
    assert last["stage"] == "ShutdownComplete"
    assert last["remaining"] == 0
    for reader in readers:
        assert [r.value for r in reader.drain(target, committed=True)] == [b"%d" % n for n in range(200)]
    assert readers[0].committed(group, source, 0) == 200


@pytest.mark.parametrize(
    "assignor",
    [
        pytest.param("RangeAssignor", id="eager", marks=pytest.mark.long),
        pytest.param("CooperativeStickyAssignor", id="cooperative"),
    ],
)
def test_java_members_share_with_each_other(java, readers, new_topic, fresh_name, assignor):
    """Two Java members, static ones, and their records: every partition is read by one of them. A third that
    comes with the name of the first has its partitions, the first is told, the second is not disturbed."""
    topic, group = new_topic(partitions=4), fresh_name("group")
    folder = Path(java._logging).parent
    logs = [folder / f"{group}-{n}.log" for n in range(3)]

    def member(number: int, name: int) -> subprocess.Popen[bytes]:
        return spawn(
            java.command(
                "verifiable-consumer",
                *("--bootstrap-server", java.bootstrap, "--topic", topic, "--group-id", group),
                *("--group-instance-id", f"static-{name}", "--session-timeout", "6000"),
                *("--assignment-strategy", f"org.apache.kafka.clients.consumer.{assignor}"),
                *("--reset-policy", "earliest", "--verbose"),
            ),
            log=logs[number],
            die_with_parent=True,
        )

    members = [member(number, number) for number in range(2)]

    def events(number: int) -> list[dict[str, object]]:
        return [json.loads(line) for line in logs[number].read_text().splitlines() if line.startswith("{")]

    def held(number: int) -> set[int]:
        parts: set[int] = set()
        for event in events(number):
            names = {p["partition"] for p in event.get("partitions", []) if "partition" in p}
            if event["name"] == "partitions_assigned":
                parts |= names
            elif event["name"] == "partitions_revoked":
                parts -= names
        return parts

    try:
        wait_until(
            lambda: held(0) | held(1) == {0, 1, 2, 3} and len(held(0)) == len(held(1)) == 2,
            "two partitions each",
            60,
        )
        for partition in range(4):
            readers[0].produce(topic, [Sent(b"%d" % n, partition=partition) for n in range(25)])

        def read() -> list[tuple[int, int]]:
            return [
                (e["partition"], e["offset"])
                for n in range(2)
                for e in events(n)
                if e["name"] == "record_data"
            ]

        wait_until(lambda: len(read()) >= 100, "all records")
        assert sorted(read()) == [(partition, offset) for partition in range(4) for offset in range(25)]
        wait_until(lambda: all(readers[0].committed(group, topic, n) == 25 for n in range(4)), "all commits")

        undisturbed = held(1), [e["name"] for e in events(1) if e["name"].startswith("partitions_")]
        members.append(member(2, 0))
        wait_until(lambda: held(2) == {0, 1, 2, 3} - held(1), "the third has the first one's partitions", 60)
        wait_until(lambda: "FencedInstanceIdException" in logs[0].read_text(), "the first is told", 60)
        for partition in range(4):
            readers[0].produce(topic, [Sent(b"%d" % n, partition=partition) for n in range(5)])
        wait_until(lambda: all(readers[0].committed(group, topic, n) == 30 for n in range(4)), "all commits")
        assert (held(1), [e["name"] for e in events(1) if e["name"].startswith("partitions_")]) == undisturbed
    finally:
        for member in members:
            member.terminate()
        for member in members:
            member.wait(patience(120))


def test_java_client_finds_every_feature_that_it_looks_for(java, server, fresh_name):
    """Apache Kafka's own test of a broker's compatibility, as it is run against older brokers. It gives what
    it produced ten seconds to come back, however busy the machine is, and is asked again for that alone."""
    features = {
        "offsets-for-times": "true",
        "cluster-id": "true",
        "create-topics": "true",
        "describe-configs": "true",
        "idempotent-producer": "true",
    }
    supported = [word for name, yes in features.items() for word in (f"--{name}-supported", yes)]
    for _ in range(3):
        done = java.run(
            "compatibility",
            *("--topic", fresh_name("compat"), "--num-cluster-nodes", "1", *supported),
            *("--describe-acls-supported", server.outcome("acls", kafka="true", millrace="false")),
            *("--expect-record-too-large-exception", "false"),
        )
        if "Timed out after 10000 ms" not in done.err:
            break
    assert done.status == 0, done.out[-2000:] + done.err[-2000:]
