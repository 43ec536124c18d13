"""kcat, the command-line client that Debian ships (an older librdkafka): produce, consume, list, query."""

from __future__ import annotations

import json
import random
import struct

import pytest

from millrace.broker.protocol.hot_fetch import PartitionFetch
from tests.waiting import patience
from tests.wire.foreign_clients import CODECS, PATIENCE_S, Refused, Sent, wait_until

NEW_YEAR_MS = 1_357_034_400_000

pytestmark = pytest.mark.usefixtures("coordinators")


@pytest.fixture
def run(kcat):
    return kcat.run


def first_batch(raw, topic: str) -> tuple[bool, bool]:
    """Whether the topic's first batch is part of a transaction, and whether a producer's id is in it."""
    (partition,) = raw.fetch(PartitionFetch(topic, 0, 0, 1 << 20)).partitions
    (attributes,) = struct.unpack_from(">h", partition.records, 21)
    (producer_id,) = struct.unpack_from(">q", partition.records, 43)
    return bool(attributes & 0x10), producer_id >= 0


@pytest.mark.parametrize(
    ("codec", "setting"),
    [
        ("none", "acks=0"),
        ("gzip", "acks=1"),
        ("snappy", "acks=all"),
        ("lz4", "enable.idempotence=true"),
        ("zstd", "transactional.id"),
    ],
)
def test_kcat_writes_what_all_others_read(run, raw, readers, new_topic, fresh_name, codec, setting):
    topic = new_topic()
    lines = [b"key %d:value %d" % (number, number) for number in range(200)]
    value = "" if "=" in setting else f"={fresh_name('transactional')}"
    headers = ("-H", "origin=kcat", "-H", "null", "-H", "empty=")
    run(
        *("-P", "-t", topic, "-K:", "-z", codec, "-X", setting + value, *headers),
        given=b"\n".join(lines) + b"\n",
    )
    for reader in readers:
        received = reader.consume(topic, [0], len(lines))
        assert [b"%s:%s" % (record.key, record.value) for record in received] == lines, reader.name
        assert {record.headers for record in received} == {
            (("origin", b"kcat"), ("null", None), ("empty", b""))
        }
    transactional, idempotent = setting == "transactional.id", "acks" not in setting
    assert first_batch(raw, topic) == (transactional, idempotent)


def test_kcat_writes_and_reads_a_large_message(run, readers, new_topic):
    topic = new_topic(max_message_bytes=4 << 20)
    value = random.Random(7).randbytes(3 << 19).hex().encode()
    run("-P", "-t", topic, "-X", f"message.max.bytes={4 << 20}", given=value + b"\n")
    assert run("-C", "-t", topic, "-o", "beginning", "-e", "-q") == value + b"\n"
    for reader in readers:
        assert [record.value for record in reader.consume(topic, [0], 1)] == [value], reader.name


def test_kcat_fences_and_is_fenced_and_reads_at_both_levels(kcat, readers, new_topic, fresh_name):
    """A transactional id goes from librdkafka's to kcat's producer and back; what either left is aborted."""
    topic, transactional_id = new_topic(), fresh_name("transactional")
    producing = ("-P", "-t", topic, "-X", f"transactional.id={transactional_id}")
    first = readers[0].transactional(transactional_id)
    second = None
    try:
        first.begin()
        assert first.send(topic, [Sent(b"left open"), Sent(b"left open")]) == [0, 1]
        kcat.run(*producing, given=b"by kcat\n" * 3)
        with pytest.raises(Refused) as refused:
            first.commit()
        assert refused.value.reason == "_FENCED"
        # Two markers: the first one's at 2, kcat's own at 6.
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 7), "kcat's marker")

        fenced = kcat.begin(*producing)
        try:
            assert fenced.stdin is not None
            # It reads whole pieces of its input: as much as it sends at once while there is more to come.
            fenced.stdin.write(b"never committed\n" * 2_000)
            fenced.stdin.flush()
            wait_until(lambda: readers[0].bounds(topic, 0)[1] > 7, "kcat's records")
            second = readers[0].transactional(transactional_id)
            _, said = fenced.communicate(timeout=patience(PATIENCE_S))
        finally:
            fenced.kill()
        assert fenced.returncode != 0
        assert b"fenced" in said, said
        wait_until(
            lambda: len({readers[0].bounds(topic, 0, committed=yes)[1] for yes in (True, False)}) == 1,
            "the marker of what kcat left",
        )

        def read(level: str) -> list[bytes]:
            options = ("-o", "beginning", "-e", "-q", "-X", f"isolation.level={level}", "-f", "%o %s\n")
            return kcat.run("-C", "-t", topic, *options).splitlines()

        by_kcat = [b"3 by kcat", b"4 by kcat", b"5 by kcat"]
        assert read("read_committed") == by_kcat
        everything = read("read_uncommitted")
        assert everything[:6] == [b"0 left open", b"1 left open", *by_kcat, b"7 never committed"]
        assert {line.partition(b" ")[2] for line in everything[5:]} == {b"never committed"}
        for reader in readers:
            assert [r.offset for r in reader.drain(topic, committed=True)] == [3, 4, 5], reader.name
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.parametrize("codec", CODECS)
def test_kcat_reads_what_others_write(run, client, new_topic, codec):
    topic = new_topic()
    nothing: tuple[tuple[str, bytes | None], ...] = (("null", None),) if client.sends_null_headers else ()
    records = [
        Sent(
            b"value %d" % number if number % 7 else None,
            b"key %d" % number,
            (("n", b"%d" % number), *nothing),
            NEW_YEAR_MS + number,
        )
        for number in range(100)
    ]
    client.produce(topic, records, codec)
    output = run("-C", "-t", topic, "-o", "beginning", "-e", "-q", "-J")
    read = [json.loads(line) for line in output.splitlines()]
    assert [line["offset"] for line in read] == list(range(100))
    for line, sent in zip(read, records, strict=True):
        assert line["payload"] == (None if sent.value is None else sent.value.decode())
        assert line["key"] == (sent.key or b"").decode()
        assert line["headers"] == [
            "n",
            (sent.headers[0][1] or b"").decode(),
            *(n for h in nothing for n in h),
        ]
        assert line["ts"] == sent.timestamp_ms


def test_kcat_lists_the_cluster(run, bootstrap, new_topic):
    topic = new_topic(partitions=3)
    listed = json.loads(run("-L", "-J"))
    assert [broker["name"] for broker in listed["brokers"]] == [bootstrap]
    (shown,) = [entry for entry in listed["topics"] if entry["topic"] == topic]
    assert len(shown["partitions"]) == 3


def test_kcat_finds_an_offset_by_time_and_reads_from_there(run, readers, new_topic):
    topic = new_topic()
    readers[0].produce(topic, [Sent(b"x", timestamp_ms=NEW_YEAR_MS + 1_000 * n) for n in range(10)])
    answer = run("-Q", "-t", f"{topic}:0:{NEW_YEAR_MS + 4_500}").decode()
    assert answer.split() == [topic, "[0]", "offset", "5"]
    start = ("-p", "0", "-o", f"s@{NEW_YEAR_MS + 4_500}")
    assert run("-C", "-t", topic, *start, "-e", "-q", "-f", "%o ").split() == [b"5", b"6", b"7", b"8", b"9"]


def test_kcat_reads_as_a_group_and_goes_on_after_its_commit(run, readers, new_topic, fresh_name):
    topic, group = new_topic(), fresh_name("group")
    readers[0].produce(topic, [Sent(b"%d" % number) for number in range(20)])

    def read(count: int) -> list[bytes]:
        options = ["-q", "-u", "-c", str(count), "-X", "auto.offset.reset=earliest"]
        return run("-G", group, *options, topic).split()

    assert read(12) == [b"%d" % number for number in range(12)]
    assert readers[0].committed(group, topic, 0) == 12
    assert read(8) == [b"%d" % number for number in range(12, 20)]


def test_kcat_members_share_and_take_over(kcat, readers, new_topic, fresh_name, tmp_path):
    """Eager ones: its answer to a rebalance is to everything or nothing, whatever the strategy."""
    topic, group = new_topic(partitions=4), fresh_name("group")
    first = kcat.member(tmp_path, "first", group, topic)
    members = [first]
    try:
        wait_until(lambda: first.assigned == {0, 1, 2, 3}, "everything is the first one's")
        second = kcat.member(tmp_path, "second", group, topic)
        members.append(second)
        wait_until(lambda: len(first.assigned) == len(second.assigned) == 2, "two partitions each")
        assert first.assigned | second.assigned == {0, 1, 2, 3}
        write(readers[0], topic, 0, 25)
        wait_until(lambda: len(first.read) + len(second.read) >= 100, "all records")
        assert sorted(first.read + second.read) == sorted(b"%d" % number for number in range(100))
        assert len(first.read) == len(second.read) == 50
        second.leave()
        wait_until(lambda: first.assigned == {0, 1, 2, 3}, "everything is the first one's again")
        assert len(first.rebalances) >= 5  # all taken, given back, two taken, given back, all taken
        write(readers[0], topic, 100, 25)
        wait_until(lambda: set(map(int, first.read)) >= set(range(100, 200)), "what came later")
    finally:
        for member in members:
            member.leave()


def test_kcat_of_a_static_name_comes_back_to_its_partitions(kcat, readers, new_topic, fresh_name, tmp_path):
    topic, group = new_topic(partitions=4), fresh_name("group")

    def member(name: str, host: int):
        static = ("-X", f"group.instance.id=host-{host}", "-X", "partition.assignment.strategy=range")
        return kcat.member(tmp_path, name, group, topic, *static)

    first, second = members = [member("first", 1), member("second", 2)]
    try:
        wait_until(lambda: len(first.assigned) == len(second.assigned) == 2, "two partitions each")
        before, rebalances = second.assigned, second.rebalances
        first.leave()
        members.append(back := member("back", 1))
        wait_until(lambda: back.assigned == {0, 1, 2, 3} - before, "it has what it had")
        write(readers[0], topic, 0, 25)
        wait_until(lambda: len(back.read) == len(second.read) == 50, "all records")
        assert second.rebalances == rebalances, "the other was disturbed"
    finally:
        for each in members:
            each.leave()


def write(client, topic: str, start: int, count: int) -> None:
    """`count` numbered records to each of four partitions."""
    for partition in range(4):
        first = start + partition * count
        client.produce(topic, [Sent(b"%d" % n, partition=partition) for n in range(first, first + count)])
