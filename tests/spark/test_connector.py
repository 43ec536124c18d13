"""`reader: spark-kafka`: the same data through Spark's own Kafka connector must get the same verdicts, also
from clusters that ask who it is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.audit import job
from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.contract.header import encode_identity, encode_prefix
from millrace.audit.spark.connector_reader import offset_options, read_through_connector
from millrace.audit.spark.connector_security import client_settings
from millrace.audit.spark.spark_source import read_pinned
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.errors import ConfigError
from tests.cluster.transactional import transactional
from tests.secure_kafka import PASSWORD
from tests.spark.conftest import NOW_MS, Stream, World
from tests.waiting import patience

pytestmark = pytest.mark.java


class RealCluster:
    """What `World` needs of a cluster, for a broker that Java's client can talk to."""

    def __init__(self, bootstrap: str, compression: str) -> None:
        self.bootstrap = bootstrap
        settings = {"bootstrap.servers": bootstrap, "compression.type": compression, "linger.ms": 20}
        self._producer = Producer(settings)

    def create(self, name: str, **config: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_topics([NewTopic(name, 1, 1, config=config)])[name].result(patience(30))

    def produce(self, topic: str, value: bytes | None, **more: Any) -> None:
        self._producer.produce(topic, value, **{"partition": 0, **more})
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(patience(30)) == 0


@pytest.fixture
def real_world(broker_factory: Any, tmp_path: Path) -> World:
    """One source and an aggregate that stamps append times, on real brokers."""
    source, aggregate = broker_factory(), broker_factory()
    clusters = {"ewr": RealCluster(source.bootstrap, "lz4"), "agg": RealCluster(aggregate.bootstrap, "zstd")}
    clusters["ewr"].create("flights")
    clusters["agg"].create("flights", **{"message.timestamp.type": "LogAppendTime"})
    for cluster in clusters.values():
        cluster.create("millrace.audit")
    clusters["agg"].create("millrace.positions.test")
    return World(clusters, parse_config(content(clusters, tmp_path / "unused")))  # type: ignore[arg-type]


def content(clusters: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "clusters": {
            name: {"bootstrap": [each.bootstrap], "tier": "aggregate" if name == "agg" else "source"}
            for name, each in clusters.items()
        },
        "topics": ["flights"],
        "window": "1d",
        "grace": "1s",
        "keep": "forever",
        "state": str(folder / "state"),
        "report": str(folder / "report"),
        **more,
    }


def stamped(stream: str, sequence: int) -> list[tuple[str, bytes]]:
    created_ms = World.created_ms(sequence)
    return [("_mr", encode_identity(encode_prefix(stream), sequence, created_ms, b"UA@ewr"))]


def test_both_readers_come_to_the_same_verdicts(spark, real_world, broker_factory, tmp_path):
    world, ewr, agg = real_world, real_world.clusters["ewr"], real_world.clusters["agg"]
    sender = SimpleNamespace(
        source="ewr", producer="UA@ewr", stream="00000000000000aa", topic="flights", partition=0, sent=[]
    )
    world.send(sender, range(1, 101))
    ewr.produce("flights", None, key=b"tombstone", headers=[("_mr", None)])
    ewr.produce("flights", b"no header at all")
    ewr.produce("flights", b"", headers=[("_mr", b"\x09" * 30), ("other", None)])
    world.flush()
    # An aborted transaction, then a committed one: markers and what was aborted take offsets.
    aborting = transactional(SimpleNamespace(bootstrap=ewr.bootstrap), "t-1")  # type: ignore[arg-type]
    aborting.init_transactions(patience(30))
    for ending in ("abort_transaction", "commit_transaction"):
        aborting.begin_transaction()
        for sequence in range(101, 121):
            aborting.produce(
                "flights",
                f"record {sequence}".encode(),
                partition=0,
                headers=stamped(sender.stream, sequence),
            )
        aborting.flush(patience(30))
        getattr(aborting, ending)(30)
    sender.sent += range(101, 121)
    world.send(sender, range(121, 131))
    world.report(sender)
    world.carry(sender, lose=[5, 17, 18, 107], repeat=[33, 34])
    agg.produce("flights", b"another", headers=stamped(sender.stream, 44))  # the same sequence, other content
    world.position("ewr", 10_000)
    world.flush()
    summaries, rows = [], []
    for reader in ("millrace", "spark-kafka"):
        config = parse_config(content(world.clusters, tmp_path / reader, reader=reader, content=True))
        result = job.run(config, "local[2]", clock_ms=lambda: NOW_MS)
        assert result.summary is not None, result.problem
        assert result.exit_status == 1
        summaries.append(result.summary)
        rows.append(pq.read_table(config.report / "reconciliation.parquet").to_pylist())
    assert summaries[0] == summaries[1]
    assert rows[0] == rows[1] and len(rows[0]) > 12
    lost = [pair for loss in summaries[0]["losses"] for pair in loss["sequences"]]
    assert sorted(lost) == [[5, 5], [17, 18], [107, 107]]
    assert summaries[0]["counts"]["seen"] == {"ewr": 130, "agg": 126}


def test_cells_are_equal_byte_for_byte(spark, real_world):
    ewr = real_world.clusters["ewr"]
    for sequence in range(1, 3_001):
        ewr.produce(
            "flights", b"v" * (sequence % 300), key=b"k", headers=stamped("00000000000000ab", sequence)
        )
    ewr.flush()
    # The range is cut as a mirror's position cuts it, and does not reach the ends of the log.
    whole = OffsetRange("ewr", "ewr", "flights", "flights", 0, 7, 1_500, "")
    ranges = [whole, OffsetRange("ewr", "ewr", "flights", "flights", 0, 1_500, 2_990, "", tail=True)]
    found = []
    for digest in ("false", "true"):
        options = {
            "bootstraps": json.dumps({"ewr": [ewr.bootstrap]}),
            "ranges": json.dumps([asdict(each) for each in ranges]),
            "window": "1d",
            "chunk_offsets": "500",
            "tasks": "1",  # fragments of a cell are cut where tasks are
            "digest": digest,
        }
        for read in (read_pinned, read_through_connector):
            rows = read(spark, options).filter("note is null or note != 'read'")
            found.append(sorted(map(str, rows.collect())))
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]
    assert sum("note=None" in row for row in found[0]) > 3


def test_a_compacted_topic_is_refused_in_one_line(spark, real_world):
    ewr = real_world.clusters["ewr"]
    ewr.create("tables", **{"cleanup.policy": "compact,delete"})
    ewr.produce("tables", b"v", key=b"k")
    ewr.flush()
    options = {
        "bootstraps": json.dumps({"ewr": [ewr.bootstrap]}),
        "ranges": json.dumps([asdict(OffsetRange("ewr", "ewr", "tables", "tables", 0, 0, 1))]),
    }
    with pytest.raises(ConfigError, match="topic tables of cluster ewr is compacted") as problem:
        read_through_connector(spark, options)
    assert "\n" not in str(problem.value)


def test_ranges_of_one_partition_are_read_as_one():
    ranges = [
        OffsetRange("c", "c", "t", "x.t", 1, 5, 9),
        OffsetRange("c", "c", "t", "x.t", 1, 9, 12, tail=True),
    ]
    options = offset_options({("x.t", 1): ranges, ("x.t", 0): [OffsetRange("c", "c", "t", "x.t", 0, 0, 3)]})
    assert {name: json.loads(value) for name, value in options.items()} == {
        "assign": {"x.t": [0, 1]},
        "startingOffsets": {"x.t": {"0": 0, "1": 5}},
        "endingOffsets": {"x.t": {"0": 3, "1": 12}},
    }


@pytest.mark.long
def test_a_query_moves_over_from_the_connector_by_the_formats_name_alone(spark, broker_factory):
    """The same options and the same query, the same rows in columns of the same types."""
    broker = broker_factory(log_retention_ms=-1)
    cluster = RealCluster(broker.bootstrap, "lz4")
    for topic, times in (("moving.created", "CreateTime"), ("moving.appended", "LogAppendTime")):
        cluster.create(topic, **{"message.timestamp.type": times})
        for number in range(40):
            headers = [("a", b"1"), ("a", None), ("\u00e9", b"")] if number % 3 else None
            value = None if number % 7 == 0 else b"value %d" % number
            cluster.produce(
                topic, value, key=b"%d" % (number % 4), headers=headers, timestamp=1_000 + 10 * number
            )
        cluster.flush()
    aborting = transactional(broker, "moving")
    aborting.init_transactions(patience(30))
    aborting.begin_transaction()
    aborting.produce("moving.created", b"aborted", partition=0, timestamp=1_395)
    aborting.flush(patience(30))
    aborting.abort_transaction(30)  # offset 40 is aborted, 41 its marker
    schemas: dict[str, Any] = {}

    def rows(format_: str, **options: str) -> list[tuple[Any, ...]]:
        reader = spark.read.format(format_).option("kafka.bootstrap.servers", broker.bootstrap)
        table = reader.options(**options).load()
        query = "cast(value as string) as text", "octet_length(key) as size", "*"
        found = table.where("partition = 0").selectExpr(*query)
        schemas[format_] = found.schema
        return sorted(map(tuple, found.collect()), key=lambda row: (row[4], row[6]))

    both = {"subscribePattern": r"^moving\.(c|a)"}
    one = {"subscribe": "moving.created"}
    for options in (
        both,
        {**both, "includeHeaders": "true", "minPartitions": "5"},
        {**one, "kafka.isolation.level": "read_committed"},
        {**one, "startingOffsets": '{"moving.created": {"0": 11}}', "maxRecordsPerPartition": "7"},
        {"assign": '{"moving.created": [0]}', "endingOffsets": '{"moving.created": {"0": 9}}'},
        {**one, "startingTimestamp": "1105", "endingTimestamp": "1200"},
        {**one, "endingOffsetsByTimestamp": '{"moving.created": {"0": 1150}}'},
        {**one, "startingOffsetsByTimestamp": '{"moving.created": {"0": 1300}}', "failOnDataLoss": "false"},
        {
            **one,
            "groupIdPrefix": "mine",
            "fetchOffset.numRetries": "5",
            "kafkaConsumer.pollTimeoutMs": "60000",
            "maxOffsetsPerTrigger": "10",
            "kafka.max.poll.records": "3",
            "kafka.max.partition.fetch.bytes": "2000",
            "kafka.client.id": "tuned",
            "kafka.request.timeout.ms": "40000",
        },
    ):
        theirs, ours = rows("kafka", **options), rows("millrace", **options)
        assert ours == theirs and ours, options
        assert schemas["millrace"] == schemas["kafka"], options
    committed = rows("millrace", **one, **{"kafka.isolation.level": "read_committed"})
    assert (len(committed), len(rows("millrace", **one))) == (40, 41)


@pytest.mark.long
@pytest.mark.kafka
def test_secrets_stay_references_in_both_readers(spark, secure_kafka, tmp_path):
    secret = "päss-ª=wörd"
    password = tmp_path / "password"
    password.write_text(secret, encoding="utf-8")
    topic = f"secured-{time.monotonic_ns()}"
    beside = RealCluster(secure_kafka.peer.bootstrap, "none")
    beside.create(topic)
    for sequence in range(1, 51):
        beside.produce(topic, b"v", headers=stamped("00000000000000ac", sequence))
    beside.flush()
    own = secure_kafka.authority.issue(f"client-{time.monotonic_ns()}")
    section = {
        "protocol": "SASL_SSL",
        "ssl": {**secure_kafka.tls(), "cert": str(own.cert), "key": str(own.key)},
        "sasl": {**secure_kafka.login("SCRAM-SHA-512"), "password": {"file": str(password)}},
    }
    securities = json.dumps({"cluster": section})
    frames = {}
    for mode in ("cells", "records"):
        reader = spark.read.format("millrace").option("mode", mode).option("subscribe", topic)
        reader = reader.option("kafka.bootstrap.servers", secure_kafka.address("SECURE"))
        frames[mode] = reader.option("security", json.dumps(section)).load()
    assert frames["records"].count() == 50
    options = {
        "bootstraps": json.dumps({"cluster": [secure_kafka.address("SECURE")]}),
        "ranges": json.dumps([asdict(OffsetRange("cluster", "c", topic, topic, 0, 0, 50))]),
        "securities": securities,
    }
    frames["connector"] = read_through_connector(spark, options)
    for name in ("cells", "connector"):
        assert frames[name].where("note is null").selectExpr("sum(count) as n").collect()[0]["n"] == 50
    told = "".join(frame._jdf.queryExecution().toString() for frame in frames.values())
    events = Path(spark.sparkContext.getConf().get("spark.eventLog.dir").removeprefix("file://"))
    written = b"".join(path.read_bytes() for path in events.rglob("*") if path.is_file())
    assert len(written) > 10_000 and topic.encode() in written
    for text in (secret, secret.encode("unicode_escape").decode(), own.key.read_text().split("\n")[1]):
        assert text not in told and text.encode() not in written


@pytest.mark.long
@pytest.mark.kafka
def test_the_whole_job_reads_clusters_that_ask_for_certificates_and_passwords(spark, secure_kafka, tmp_path):
    """The source by TLS and SCRAM, the aggregate by TLS and a client's certificate."""
    # Both are topics of one server; what other tests wrote there is of other topics.
    here, there = (f"secured-{side}-{time.monotonic_ns()}" for side in ("source", "aggregate"))
    beside = RealCluster(secure_kafka.peer.bootstrap, "lz4")
    for topic in (here, there):
        beside.create(topic, **{"retention.ms": "-1"})  # the records are of 2013
    with contextlib.suppress(KafkaException):
        beside.create("millrace.audit")
    with contextlib.suppress(KafkaException):
        beside.create("millrace.positions.test")
    password = tmp_path / "password"
    password.write_text(PASSWORD, encoding="utf-8")
    own = secure_kafka.authority.issue(f"client-{time.monotonic_ns()}")
    login = {**secure_kafka.login("SCRAM-SHA-512"), "password": {"file": str(password)}}
    security = {
        "ewr": {"protocol": "SASL_SSL", "ssl": secure_kafka.tls(), "sasl": login},
        "agg": {"protocol": "SSL", "ssl": secure_kafka.tls(cert=str(own.cert), key=str(own.key))},
    }
    listeners = {"ewr": "SECURE", "agg": "MTLS"}

    def config(state: str, **more: Any) -> AuditConfig:
        return parse_config(
            {
                **content({}, tmp_path / state, **more),
                "clusters": {
                    name: {
                        "bootstrap": [secure_kafka.address(listener)],
                        "tier": "aggregate" if name == "agg" else "source",
                        "topics": {here: there} if name == "agg" else {},
                        "security": security[name],
                    }
                    for name, listener in listeners.items()
                },
                "topics": [here],
            }
        )

    world = World({"ewr": beside, "agg": beside}, config("lost"))  # type: ignore[dict-item]
    stream = Stream("ewr", "UA@ewr", f"{time.monotonic_ns():016x}", here)
    world.send(stream, range(1, 61))
    world.report(stream)
    world.position("ewr", 60, topic=here)
    world.carry(dataclasses.replace(stream, topic=there), lose=[7, 44])
    world.flush()
    found = job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS)
    assert found.summary is not None and found.exit_status == 1, found.problem
    assert found.summary["counts"]["seen"] == {"ewr": 60, "agg": 58}
    assert [(each["sequences"], each["lost_between"]) for each in found.summary["losses"]] == [
        ([[7, 7]], ["ewr", "agg"]),
        ([[44, 44]], ["ewr", "agg"]),
    ]
    world.carry(dataclasses.replace(stream, topic=there), lose=set(stream.sent) - {7, 44})
    world.flush()
    healed = job.run(config("healed", reader="spark-kafka"), "local[2]", clock_ms=lambda: NOW_MS)
    assert healed.summary is not None and healed.summary["verdict"] == "PROVEN", healed.summary
    # The same question with a wrong password gets no answer, and one line that does not tell it.
    password.write_text("not the pässword", encoding="utf-8")
    refused = job.run(config("refused"), "local[2]", clock_ms=lambda: NOW_MS)
    assert (refused.exit_status, refused.summary) == (3, None)
    assert "ewr" in refused.problem and "\n" not in refused.problem
    assert "not the p" not in refused.problem


def test_logins_become_references(tmp_path):
    file = tmp_path / "password"
    file.write_text("secret")
    sasl = {"mechanism": "PLAIN", "username": 'a "b"', "password": {"file": str(file)}}
    given = client_settings("ewr", {"protocol": "SASL_PLAINTEXT", "sasl": sasl})
    assert given["kafka.sasl.jaas.config"] == (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="a \\"b\\"" password="${{millracefile:{tmp_path}:password}}";'
    )
    assert not any("secret" in value for value in given.values())
    assert client_settings("ewr", {}) == {}


@pytest.mark.parametrize("written", ["secret\n", 'se"cret', "se\\cret"])
def test_a_secret_that_java_would_misread_is_refused_and_not_shown(written, tmp_path):
    file = tmp_path / "password"
    file.write_text(written)
    sasl = {"mechanism": "SCRAM-SHA-256", "username": "a", "password": {"file": str(file)}}
    with pytest.raises(ConfigError) as problem:
        client_settings("ewr", {"protocol": "SASL_PLAINTEXT", "sasl": sasl})
    assert "clusters.ewr.security.sasl.password" in str(problem.value)
    assert "cret" not in str(problem.value).replace("secret", "") and written not in str(problem.value)
