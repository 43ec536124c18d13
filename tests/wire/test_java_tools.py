"""Apache Kafka's own commands: topics, settings, groups, offsets, transactions, and the dump of log files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import ConfigResource

from tests.raw_client import is_served
from tests.waiting import patience
from tests.wire.foreign_clients import PATIENCE_S, Sent, wait_until
from tests.wire.java_tools import together, words

NEW_YEAR_MS = 1_357_034_400_000

pytestmark = pytest.mark.usefixtures("coordinators")


def test_topic_and_config_commands(java, server, admin, fresh_name, new_topic):
    topic, other = fresh_name("topic"), new_topic()
    java.run(
        "topics",
        *("--create", "--topic", topic, "--partitions", "2", "--replication-factor", "1"),
        *("--config", "retention.ms=12345", "--config", "cleanup.policy=compact"),
    ).checked()
    wait_until(lambda: is_served(server.port, topic, 2), "two partitions are served")
    refusals = together(
        {
            "exists": lambda: java.run("topics", "--create", "--topic", topic),
            "too many replicas": lambda: java.run(
                "topics", "--create", "--topic", fresh_name("topic"), "--replication-factor", "3"
            ),
            "invalid config": lambda: java.run(
                "topics", "--create", "--topic", fresh_name("topic"), "--config", "retention.ms=soon"
            ),
            "fewer partitions": lambda: java.run("topics", "--alter", "--topic", other, "--partitions", "1"),
            "unknown": lambda: java.run("topics", "--describe", "--topic", fresh_name("unknown")),
            "unknown config": lambda: java.run(
                "configs",
                *("--alter", "--entity-type", "topics", "--entity-name", other, "--add-config", "no.such=1"),
            ),
        }
    )
    assert {name: outcome.status for name, outcome in refusals.items()} == dict.fromkeys(refusals, 1)
    errors = {name: set(re.findall(r"\w+Exception", o.out + o.err)) for name, o in refusals.items()}
    assert "TopicExistsException" in errors["exists"]
    assert "InvalidReplicationFactorException" in errors["too many replicas"]
    assert errors["invalid config"] & {"InvalidConfigurationException", "ConfigException"}
    assert "InvalidPartitionsException" in errors["fewer partitions"]
    assert "InvalidConfigurationException" in errors["unknown config"]

    altered = together(
        {
            "partitions": lambda: java.run("topics", "--alter", "--topic", topic, "--partitions", "4"),
            "configs": lambda: java.run(
                "configs",
                *("--alter", "--entity-type", "topics", "--entity-name", topic),
                *("--add-config", "max.message.bytes=5000,cleanup.policy=[compact,delete]"),
                *("--delete-config", "retention.ms"),
            ),
        }
    )
    for outcome in altered.values():
        outcome.checked()
    # A broker may hear of a change after the controller has answered.
    wait_until(lambda: is_served(server.port, topic, 4), "four partitions are served")
    wait_until(lambda: setting(admin, topic, "max.message.bytes") == "5000", "the new settings")
    shown = together(
        {
            "topic": lambda: java.run("topics", "--describe", "--topic", topic),
            "configs": lambda: java.run(
                "configs", "--describe", "--entity-type", "topics", "--entity-name", topic
            ),
            "list": lambda: java.run("topics", "--list"),
            "broker": lambda: java.run(
                "configs", "--describe", "--entity-type", "brokers", "--entity-name", "1", "--all"
            ),
        }
    )
    head, *partitions = shown["topic"].checked().lines
    assert f"Topic: {topic}" in head
    assert "PartitionCount: 4\tReplicationFactor: 1" in head
    configs = dict(entry.split("=") for entry in re.findall(r"[\w.]+=[\w,]+(?=,[\w.]+=|$)", head))
    assert {k: v for k, v in configs.items() if k != "min.insync.replicas"} == {
        "max.message.bytes": "5000",
        "cleanup.policy": "compact,delete",
    }
    found = [re.findall(r"(Partition|Leader|Replicas|Isr): (\d+)", line) for line in partitions]
    assert [dict(entry) for entry in found] == [
        {"Partition": str(n), "Leader": "1", "Replicas": "1", "Isr": "1"} for n in range(4)
    ]
    assert {topic, other} <= set(shown["list"].checked().lines)
    described = shown["configs"].checked().out
    assert "max.message.bytes=5000 sensitive=false" in described
    assert "DYNAMIC_TOPIC_CONFIG:max.message.bytes=5000" in described
    assert "DEFAULT_CONFIG:message.max.bytes=1048588" in described
    assert "retention.ms=" not in described
    broker = shown["broker"].checked().out
    assert "log.retention.ms=-1 sensitive=false synonyms={STATIC_BROKER_CONFIG:log.retention.ms=-1" in broker
    java.run("topics", "--delete", "--topic", topic).checked()
    wait_until(lambda: topic not in admin.list_topics(timeout=PATIENCE_S).topics, "the topic is gone")


def test_client_quota_commands(java, fresh_name):
    client = fresh_name("client")
    named = ("configs", "--entity-type", "clients", "--entity-name", client)
    rates = "producer_byte_rate=1000000,consumer_byte_rate=2000000"
    java.run(*named, "--alter", "--add-config", rates).checked()

    def shown() -> dict[str, float]:
        """Rates by name; a broker may hear of them after the controller has answered."""
        out = java.run(*named, "--describe").checked().out
        return {name: float(rate) for name, rate in re.findall(r"(\w+_byte_rate)=([\d.E+]+)", out)}

    wait_until(
        lambda: shown() == {"producer_byte_rate": 1_000_000, "consumer_byte_rate": 2_000_000}, "both rates"
    )
    java.run(*named, "--alter", "--delete-config", "producer_byte_rate").checked()
    wait_until(lambda: shown() == {"consumer_byte_rate": 2_000_000}, "one rate is left")
    java.run(*named, "--alter", "--delete-config", "consumer_byte_rate").checked()
    wait_until(lambda: shown() == {}, "no rate is left")


def setting(admin, topic: str, name: str) -> str:
    (described,) = admin.describe_configs([ConfigResource("topic", topic)]).values()
    return str(described.result(patience(PATIENCE_S))[name].value)


def is_empty(admin, group: str) -> bool:
    described = admin.describe_consumer_groups([group])[group].result(patience(PATIENCE_S))
    return bool(described.state == ConsumerGroupState.EMPTY)


def test_group_commands(java, server, admin, readers, new_topic, fresh_name):
    topic, group, unknown = new_topic(partitions=2), fresh_name("group"), fresh_name("unknown")
    for partition in range(2):
        readers[0].produce(
            topic, [Sent(b"x", partition=partition, timestamp_ms=NEW_YEAR_MS + n) for n in range(10)]
        )
    member = readers[0].member(
        group, topic, client_id="the-client", session_timeout_ms=45_000, partition_assignment_strategy="range"
    )
    wait_until(lambda: readers[0].committed(group, topic, 1) == 10, "the member commits")
    wait_until(lambda: readers[0].committed(group, topic, 0) == 10, "the member commits")
    running = together(
        {
            "describe": lambda: java.run("consumer-groups", "--describe", "--group", group),
            "members": lambda: java.run(
                "consumer-groups", "--describe", "--group", group, "--members", "--verbose"
            ),
            "state": lambda: java.run("consumer-groups", "--describe", "--group", group, "--state"),
            "list": lambda: java.run("consumer-groups", "--list", "--state", "Stable"),
            "groups": lambda: java.run("groups", "--list"),
            "delete": lambda: java.run("consumer-groups", "--delete", "--group", group),
            "reset": lambda: java.run(
                "consumer-groups",
                *("--reset-offsets", "--group", group, "--topic", topic, "--to-earliest", "--execute"),
            ),
            "unknown": lambda: java.run("consumer-groups", "--describe", "--group", unknown),
        }
    )
    member.leave()
    wait_until(lambda: is_empty(admin, group), "the group is empty")
    rows = [row for row in words(running["describe"].checked().lines) if row[0] == group]
    assert [row[1:6] for row in sorted(rows, key=lambda row: row[2])] == [
        [topic, "0", "10", "10", "0"],
        [topic, "1", "10", "10", "0"],
    ]
    assert {row[7:9] == ["/127.0.0.1", "the-client"] for row in rows} == {True}
    (shown,) = [row for row in words(running["members"].checked().lines) if row[0] == group]
    assert shown[2:5] == ["/127.0.0.1", "the-client", "2"]
    assert f"{topic}(0,1)" in running["members"].out.replace(", ", ",") or f"{topic}:0,1" in running[
        "members"
    ].out.replace(", ", ",")
    (stated,) = [row for row in words(running["state"].checked().lines) if row[0] == group]
    assert "range" in stated
    assert "Stable" in stated
    assert stated[-1] == "1"
    assert [group, "Stable"] in words(running["list"].checked().lines)
    (listed,) = [row for row in words(running["groups"].checked().lines) if row[0] == group]
    assert listed == [group, "Classic", "consumer"]
    assert "GroupNotEmptyException" in running["delete"].out + running["delete"].err
    assert "Stable" in running["reset"].out + running["reset"].err, "only an empty group is reset"
    said = server.outcome("unknown-group", kafka="GroupIdNotFoundException", millrace="does not exist")
    assert said in running["unknown"].out

    moments = {"--to-offset": "4", "--to-datetime": "2013-01-01T10:00:00.007", "--shift-by": "-3"}
    expected = {"--to-offset": 4, "--to-datetime": 7, "--shift-by": 4}
    for how, value in moments.items():
        java.run(
            "consumer-groups", "--reset-offsets", "--group", group, "--topic", topic, how, value, "--execute"
        ).checked()
        assert readers[0].committed(group, topic, 0) == expected[how]
        assert readers[0].committed(group, topic, 1) == expected[how]
    java.run("consumer-groups", "--delete-offsets", "--group", group, "--topic", f"{topic}:0").checked()
    assert readers[0].committed(group, topic, 0) is None
    assert readers[0].committed(group, topic, 1) == 4
    assert "successful" in java.run("consumer-groups", "--delete", "--group", group).checked().out
    assert readers[0].committed(group, topic, 1) is None


def test_offset_and_cluster_commands(java, server, readers, new_topic, tmp_path):
    topic = new_topic(partitions=2)
    times_ms = [NEW_YEAR_MS, NEW_YEAR_MS + 9_000, NEW_YEAR_MS + 5_000]
    readers[0].produce(topic, [Sent(b"x", timestamp_ms=time_ms) for time_ms in times_ms])
    plan = tmp_path / "delete.json"
    plan.write_text(json.dumps({"version": 1, "partitions": [{"topic": topic, "partition": 0, "offset": 1}]}))
    moves = tmp_path / "moves.json"
    moves.write_text(
        json.dumps({"version": 1, "partitions": [{"topic": topic, "partition": 0, "replicas": [1]}]})
    )
    java.run("delete-records", "--offset-json-file", str(plan)).checked()
    shown = together(
        {
            **{
                name: lambda name=name: java.run("get-offsets", "--topic", topic, "--time", name)
                for name in ("earliest", "latest", "max-timestamp", str(NEW_YEAR_MS + 4_000))
            },
            "dirs": lambda: java.run("log-dirs", "--describe", "--topic-list", topic),
            "cluster": lambda: java.raw("cluster", "cluster-id", "--bootstrap-server", server.bootstrap),
            "versions": lambda: java.run("broker-api-versions"),
            "election": lambda: java.run(
                "leader-election", "--election-type", "preferred", "--all-topic-partitions"
            ),
            "move": lambda: java.run(
                "reassign-partitions", "--reassignment-json-file", str(moves), "--execute"
            ),
            "list moves": lambda: java.run("reassign-partitions", "--list"),
        }
    )
    for outcome in shown.values():
        outcome.checked()
    assert shown["earliest"].lines == [f"{topic}:0:1", f"{topic}:1:0"]
    assert shown["latest"].lines == [f"{topic}:0:3", f"{topic}:1:0"]
    assert shown["max-timestamp"].lines == [f"{topic}:0:1"]
    assert shown[str(NEW_YEAR_MS + 4_000)].lines == [f"{topic}:0:1"]
    folders = json.loads(shown["dirs"].lines[-1])["brokers"][0]["logDirs"]
    assert [folder["logDir"] for folder in folders] == [str(server.data)]
    sizes = {p["partition"]: p["size"] > 0 for p in folders[0]["partitions"]}
    assert sizes == {f"{topic}-0": True, f"{topic}-1": False}
    assert re.fullmatch(r"Cluster ID: [\w-]{22}", shown["cluster"].lines[0])
    assert f"{server.bootstrap} (id: 1 rack: null" in shown["versions"].out
    assert re.search(r"Produce\(0\): \d+ to \d+ \[usable: \d+\]", shown["versions"].out)
    assert "Successfully started partition reassignment" in shown["move"].out
    assert shown["list moves"].lines == ["No partition reassignments found."]


def test_log_files_are_readable_by_the_dump_tool(java, server, readers, new_topic, fresh_name):
    """Segments, indexes, snapshots, and the brokers' own topics: the same bytes as Apache Kafka's."""
    topic, group = new_topic(), fresh_name("group")
    readers[0].produce(
        topic, [Sent(b"v" * 300, b"k%d" % n, (("h", b"x"),), NEW_YEAR_MS + n) for n in range(5)], "lz4"
    )
    readers[0].produce(topic, [Sent(b"y" * 6_000, timestamp_ms=NEW_YEAR_MS + 100 + n) for n in range(10)])
    transactional_id = fresh_name("transactional")
    producer = readers[0].transactional(transactional_id)
    producer.begin()
    producer.send(topic, [Sent(b"aborted", timestamp_ms=NEW_YEAR_MS + 200)])
    producer.send_offsets(group, {(topic, 0): 3})
    producer.abort()
    producer.close()
    wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 17), "the marker")
    readers[0].commit(group, topic, 0, 7, "note")

    folder = server.data / f"{topic}-0"
    segments = sorted(folder.glob("*.log"))
    internal = {
        name: [str(path) for path in sorted(server.data.glob(f"{name}-*/*.log"))]
        for name in ("__consumer_offsets", "__transaction_state")
    }
    shown = together(
        {
            "records": lambda: java.raw(
                "dump-log",
                *("--deep-iteration", "--print-data-log", "--files", ",".join(map(str, segments))),
            ),
            "index": lambda: java.raw(
                "dump-log",
                "--files",
                ",".join(str(path) for path in sorted(folder.glob("*.*index"))),
            ),
            "offsets": lambda: java.raw(
                "dump-log", "--offsets-decoder", "--files", ",".join(internal["__consumer_offsets"])
            ),
            "transactions": lambda: java.raw(
                "dump-log", "--transaction-log-decoder", "--files", ",".join(internal["__transaction_state"])
            ),
        }
    )
    internal_folders = [path.parent for paths in internal.values() for path in map(Path, paths)]
    for each in (folder, *internal_folders):
        # What we say of the same files; a server is at work in them.
        done = subprocess.run(
            [sys.executable, "-m", "millrace.deploy.cli", "log", "verify", str(each)],
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
        assert done.returncode == 0 and done.stdout.endswith(": no problems\n"), done.stdout + done.stderr
    text = shown["records"].checked().out
    offsets = [int(n) for n in re.findall(r"\| offset: (\d+)", text)]
    assert offsets == list(range(17))
    assert "isvalid: false" not in text
    assert re.search(r"compresscodec: (\w+)", text.split("baseOffset: 0")[1]).group(1).lower() == "lz4"
    assert re.search(
        r"\| offset: 2 CreateTime: 1357034400002 .*headerKeys: \[h\] key: k2 payload: v{300}", text
    )
    assert "isTransactional: true" in text
    assert re.search(r"isControl: true.*\n?.*endTxnMarker: ABORT", text) or "endTxnMarker: ABORT" in text
    # The tool holds every entry against the log, and says what does not fit.
    indexes = shown["index"].checked().out
    assert not re.findall(r"(?i)mismatch|out of order|corrupt|invalid|exception", indexes)
    assert re.search(r"offset: [1-9]\d* position: \d+", indexes), "an entry of an offset index"
    assert re.search(r"timestamp: \d{13} offset: \d+", indexes), "an entry of a time index"
    assert re.search(r"producerId: \d+ firstOffset: 15 lastOffset: 16 lastStableOffset: 17", indexes)
    offsets_text = shown["offsets"].checked().out
    assert group in offsets_text
    assert re.search(rf'"group":"{group}","topic":"{topic}","partition":0', offsets_text)
    assert re.search(r'"offset":7,.*"metadata":"note', offsets_text)
    transactions_text = shown["transactions"].checked().out
    states = re.findall(
        rf'"transactionalId":"{transactional_id}".*"transactionStatus":(\d)', transactions_text
    )
    empty, ongoing, prepare_abort, complete_abort = "0", "1", "3", "5"
    assert [state for state, _ in groupby(states)] == [empty, ongoing, prepare_abort, complete_abort]


def test_transactions_command(java, readers, new_topic, fresh_name):
    topic, transactional_id = new_topic(), fresh_name("transactional")
    producer = readers[0].transactional(transactional_id)
    producer.begin()
    producer.send(topic, [Sent(b"x"), Sent(b"y")])
    shown = together(
        {
            "list": lambda: java.run("transactions", "list"),
            "describe": lambda: java.run("transactions", "describe", "--transactional-id", transactional_id),
            "producers": lambda: java.run(
                "transactions", "describe-producers", "--topic", topic, "--partition", "0"
            ),
        }
    )
    (listed,) = [row for row in words(shown["list"].checked().lines) if row[0] == transactional_id]
    assert (listed[1], listed[3]) == ("1", "Ongoing")
    (described,) = [row for row in words(shown["describe"].checked().lines) if transactional_id in row]
    assert "Ongoing" in described
    assert f"{topic}-0" in described
    titles, (row,) = shown["producers"].checked().lines[0].split("\t"), words(shown["producers"].lines[1:])
    active = dict(zip((title.strip() for title in titles), row, strict=True))
    assert active["ProducerId"] == listed[2]
    assert (active["LastSequence"], active["CurrentTransactionStartOffset"]) == ("1", "0")
    # What an administrator does with a transaction that hangs: abort it by the offset where it began.
    java.run("transactions", "abort", "--topic", topic, "--partition", "0", "--start-offset", "0").checked()
    wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 3), "the marker")
    assert readers[0].drain(topic, committed=True) == []
    producer.close()
