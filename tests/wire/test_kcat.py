"""kcat, the command-line client that Debian ships (an older librdkafka): produce, consume, list, query."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.wire.foreign_clients import CODECS, PATIENCE_S, Sent

NEW_YEAR_MS = 1_357_034_400_000


@pytest.fixture(scope="module")
def kcat() -> str:
    """Its absence is a failure: a client that is not tried is not supported."""
    for name in ("kcat", "kafkacat"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.fail("kcat is missing: apt-get install kcat (as root, `make test` does it)")


@pytest.fixture
def run(kcat, bootstrap):
    def call(*arguments: str, given: bytes = b"") -> bytes:
        done = subprocess.run(
            [kcat, "-b", bootstrap, *arguments],
            input=given,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    return call


@pytest.mark.parametrize("codec", CODECS)
def test_kcat_writes_what_all_others_read(run, readers, new_topic, codec):
    topic = new_topic()
    lines = [b"key %d:value %d" % (number, number) for number in range(200)]
    run("-P", "-t", topic, "-K:", "-z", codec, "-H", "origin=kcat", given=b"\n".join(lines) + b"\n")
    for reader in readers:
        received = reader.consume(topic, [0], len(lines))
        assert [b"%s:%s" % (record.key, record.value) for record in received] == lines, reader.name
        assert {record.headers for record in received} == {(("origin", b"kcat"),)}


@pytest.mark.parametrize("codec", CODECS)
def test_kcat_reads_what_others_write(run, client, new_topic, codec):
    topic = new_topic()
    records = [
        Sent(
            b"value %d" % number if number % 7 else None,
            b"key %d" % number,
            (("n", b"%d" % number),),
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
        assert line["headers"] == ["n", (sent.headers[0][1] or b"").decode()]
        assert line["ts"] == sent.timestamp_ms


def test_kcat_lists_the_cluster(run, bootstrap, new_topic):
    topic = new_topic(partitions=3)
    listed = json.loads(run("-L", "-J"))
    assert [broker["name"] for broker in listed["brokers"]] == [bootstrap]
    (shown,) = [entry for entry in listed["topics"] if entry["topic"] == topic]
    assert len(shown["partitions"]) == 3


def test_kcat_finds_an_offset_by_time(run, readers, new_topic):
    topic = new_topic()
    readers[0].produce(topic, [Sent(b"x", timestamp_ms=NEW_YEAR_MS + 1_000 * n) for n in range(10)])
    answer = run("-Q", "-t", f"{topic}:0:{NEW_YEAR_MS + 4_500}").decode()
    assert answer.split() == [topic, "[0]", "offset", "5"]


def test_kcat_reads_as_a_group_and_goes_on_after_its_commit(run, readers, new_topic, fresh_name):
    topic, group = new_topic(), fresh_name("group")
    readers[0].produce(topic, [Sent(b"%d" % number) for number in range(20)])

    def read(count: int) -> list[bytes]:
        options = ["-q", "-u", "-c", str(count), "-X", "auto.offset.reset=earliest"]
        return run("-G", group, *options, topic).split()

    assert read(12) == [b"%d" % number for number in range(12)]
    assert readers[0].committed(group, topic, 0) == 12
    assert read(8) == [b"%d" % number for number in range(12, 20)]
