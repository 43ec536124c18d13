"""Options of `spark.read.format("millrace")`: those of Spark's Kafka connector, and one line for the rest."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from millrace.audit.scanning.credentials import ClientProperties, security_of
from millrace.audit.spark.kafka_options import SourceOptions, Subscription, parse_source
from millrace.audit.spark.offset_limits import EARLIEST, LATEST, Limit
from millrace.audit.spark.record_rows import RecordRows, record_ddl
from millrace.audit.spark.spark_source import MillraceDataSource, MillraceReader
from millrace.broker.errors import ConfigError

SERVERS = {"kafka.bootstrap.servers": "a:1,b:2"}
GOOD = {**SERVERS, "subscribe": "x, y"}
PLAIN_LOGIN = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="a" password="{}";'


def test_without_more_it_reads_what_the_connector_reads():
    source = parse_source(GOOD)
    assert source.read.bootstraps == {"cluster": ["a:1", "b:2"]} and source.read.mode == "records"
    assert source.subscription == Subscription("subscribe", topics=("x", "y"))
    assert (source.start.default, source.end.default) == (EARLIEST, LATEST)
    assert (source.least_tasks, source.most_offsets) == (None, None)
    assert not source.read.read_committed and source.read.fail_on_loss and not source.read.headers


def test_columns_and_their_types_are_the_connectors():
    assert MillraceDataSource(GOOD).schema() == (
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
        "timestampType int"
    )
    read = parse_source({**GOOD, "includeHeaders": "true", "includeIdentity": "true"}).read
    assert record_ddl(read).endswith(
        "timestampType int, headers array<struct<key: string, value: binary>>, "
        "identity struct<stream: string, sequence: bigint, created: timestamp, producer: string>"
    )
    assert RecordRows(read).flush().schema.names[-2:] == ["headers", "identity"]


def test_values_of_every_option():
    source = parse_source(
        {
            "KAFKA.bootstrap.servers": "a:1",
            "SubscribePattern": " fl.*|x ",
            "startingTimestamp": "5",
            "startingOffsetsByTimestampStrategy": "latest",
            "endingOffsets": '{"x": {"0": 7, "1": -1}}',
            "FAILONDATALOSS": "false",
            "minPartitions": "9",
            "maxRecordsPerPartition": "1000",
            "includeHeaders": "true",
            "kafka.isolation.level": "READ_COMMITTED",
            "kafka.fetch.max.bytes": "4096",
        }
    )
    assert source.subscription == Subscription("subscribePattern", pattern="fl.*|x")
    assert source.start == Limit("startingTimestamp", EARLIEST, time_ms=5, or_latest=True)
    assert source.end == Limit("endingOffsets", LATEST, offsets={("x", 0): 7, ("x", 1): -1})
    assert (source.least_tasks, source.most_offsets) == (9, 1000)
    read = source.read
    assert (read.fail_on_loss, read.headers, read.read_committed, read.fetch_max_bytes) == (
        False,
        True,
        True,
        4096,
    )
    assigned = parse_source({**SERVERS, "assign": '{"x": [2, 0], "y": [1]}'}).subscription
    assert assigned.partitions == (("x", 2), ("x", 0), ("y", 1))
    cells = parse_source({**GOOD, "mode": "cells", "window": "5m", "digest": "true", "cluster": "ewr"})
    assert (cells.read.window_ms, cells.read.digest, cells.read.read_committed) == (300_000, True, True)
    assert (cells.cluster, cells.tier) == ("ewr", "ewr")


def test_of_several_starts_a_time_comes_before_times_before_offsets():
    given = {**GOOD, "startingOffsets": '{"x": {"0": 3}}'}
    assert parse_source(given).start.offsets == {("x", 0): 3}
    given["startingOffsetsByTimestamp"] = '{"x": {"0": 4}}'
    assert parse_source(given).start.times_ms == {("x", 0): 4}
    given["startingTimestamp"] = "5"
    assert parse_source(given).start.time_ms == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscribe": "x"}, "option kafka.bootstrap.servers: got None, expected a value: it is required"),
        (
            {"kafka.bootstrap.servers": "a", "subscribe": "x"},
            "option kafka.bootstrap.servers: got 'a', expected host:port",
        ),
        (SERVERS, "options: got None, expected one of assign, subscribe, subscribePattern"),
        (
            {**GOOD, "assign": "{}"},
            "options: got 'assign, subscribe', expected one of assign, subscribe, subscribePattern",
        ),
        ({**SERVERS, "subscribe": " , "}, "option subscribe: got ' , ', expected topics with commas"),
        ({**SERVERS, "assign": '{"x": 1}'}, "option assign, x: got '1', expected partitions"),
        ({**SERVERS, "assign": '{"x": [-1]}'}, "option assign: got '{\"x\": [-1]}', expected partitions"),
        ({**SERVERS, "subscribePattern": "("}, "option subscribePattern: got '(', expected a pattern"),
        ({**SERVERS, "subscribePattern": r"\p{Lu}"}, "expected a pattern of Python's re (bad escape"),
        ({**SERVERS, "subscribePattern": "[a-z&&[^x]]"}, "Python's re (Possible set intersection"),
        ({**GOOD, "startingOffsets": "latest"}, "option startingOffsets: got 'latest', expected earliest"),
        ({**GOOD, "endingOffsets": "earliest"}, "option endingOffsets: got 'earliest', expected latest"),
        (
            {**GOOD, "startingOffsets": '{"x": {"0": -1}}'},
            "option startingOffsets, x-0: got -1, expected an offset, or -2 for earliest",
        ),
        (
            {**GOOD, "endingOffsets": '{"x": {"0": -2}}'},
            "option endingOffsets, x-0: got -2, expected an offset, or -1 for latest",
        ),
        ({**GOOD, "endingOffsets": '{"x": {"zero": 2}}'}, 'option endingOffsets: got \'{"x": {"zero": 2}}\''),
        ({**GOOD, "endingOffsets": '{"x": {"0": "2"}}'}, "expected numbers, such as"),
        ({**GOOD, "startingTimestamp": "now"}, "option startingTimestamp: got 'now', expected a time in"),
        (
            {**GOOD, "startingOffsetsByTimestampStrategy": "earliest"},
            "option startingOffsetsByTimestampStrategy: got 'earliest', expected error or latest",
        ),
        (
            {**GOOD, "startingOffsetsByTimestamp": '{"x": {"0": 9223372036854775808}}'},
            "option startingOffsetsByTimestamp, x-0: got 9223372036854775808, expected a number up to",
        ),
        (
            {**GOOD, "endingOffsets": '{"x": {"0": 9223372036854775808}}'},
            "option endingOffsets, x-0: got 9223372036854775808, expected a number up to 9223372036854775807",
        ),
        ({**GOOD, "startingOffsets": '{"x":' + "[" * 100_000}, 'option startingOffsets: got \'{"x":[[[['),
        ({**SERVERS, "assign": "[" * 100_000}, "option assign: got '[[[["),
        ({**GOOD, "endingOffsets": '{"x": {"0": ' + "9" * 5000 + "}}"}, "expected a JSON object"),
        ({**GOOD, "startingTimestamp": "9" * 5000}, "expected a time in milliseconds since 1970"),
        ({**GOOD, "minPartitions": "9" * 5000}, "expected a whole number from 1 to 100000"),
        ({**GOOD, "mode": "cells", "window": "9" * 5000 + "d"}, "at most 100000d"),
        ({**GOOD, "failOnDataLoss": "no"}, "option failOnDataLoss: got 'no', expected true or false"),
        ({**GOOD, "minPartitions": "0"}, "option minPartitions: got '0', expected a whole number from 1"),
        ({**GOOD, "maxRecordsPerPartition": "-1"}, "option maxRecordsPerPartition: got '-1', expected a"),
        ({**GOOD, "kafka.isolation.level": "all"}, "option kafka.isolation.level: got 'all', expected read_"),
        (
            {**GOOD, "mode": "cells", "kafka.isolation.level": "read_uncommitted"},
            "expected read_committed, for mode cells",
        ),
        ({**GOOD, "mode": "rows"}, "option mode: got 'rows', expected records or cells"),
        ({**GOOD, "window": "1m"}, "option window: got '1m', expected mode cells beside it"),
        (
            {**GOOD, "mode": "cells", "includeHeaders": "true"},
            "option includeHeaders: got 'true', expected mode records beside it",
        ),
        ({**GOOD, "kafka.enable.auto.commit": "true"}, "expected none: this source reads without a consumer"),
        ({**GOOD, "maxBytesPerTrigger": "5"}, "expected none: it is of streaming queries"),
        ({**GOOD, "kafka.auto.offset.reset": "earliest"}, "expected startingOffsets in its place"),
        ({**GOOD, "kafka.ssl.keystore.password": "a"}, "expected kafka.ssl.key.password: stores are PEM"),
        (
            {**GOOD, "kafka.exclude.internal.topics": "false"},
            "option: got 'kafka.exclude.internal.topics', ex",
        ),
        (
            {**GOOD, "kafka.interceptor.classes": "a"},
            "option: got 'kafka.interceptor.classes', expected a set",
        ),
        ({**GOOD, "topics": "x"}, "option: got 'topics', expected one of assign, subscribe"),
        (
            {**GOOD, "startingOffsets": '{"a": {"0": 1}, "a": {"0": 2}}'},
            "option startingOffsets: got 'the key \"a\" twice', expected it once",
        ),
        ({**GOOD, "endingOffsets": '{"a": {"0": 1, "0": 2}}'}, 'the key "0" twice'),
        (
            {**GOOD, "endingOffsets": '{"a": {"1": 1, "01": 2}}'},
            "option endingOffsets, a: got 'partition 1 twice', expected it once",
        ),
    ],
)
def test_what_is_wrong_or_not_supported_is_one_line_that_names_the_option(given, said):
    with pytest.raises(ConfigError) as problem:
        parse_source(given)
    assert said in str(problem.value) and "\n" not in str(problem.value)
    assert "9" * 100 not in str(problem.value)


# Every option that Spark's guide to its Kafka connector has for reading ("Structured Streaming + Kafka
# Integration Guide"), and where it is found here: in what is read, or among those that change no row.
DOCUMENTED: dict[str, tuple[str, Callable[[SourceOptions], object], object]] = {
    "startingTimestamp": ("7", lambda source: source.start.time_ms, 7),
    "startingOffsetsByTimestamp": ('{"x": {"1": 7}}', lambda source: source.start.times_ms, {("x", 1): 7}),
    "startingOffsets": ('{"x": {"1": -2}}', lambda source: source.start.offsets, {("x", 1): EARLIEST}),
    "startingOffsetsByTimestampStrategy": ("latest", lambda source: source.start.or_latest, True),
    "endingTimestamp": ("7", lambda source: source.end.time_ms, 7),
    "endingOffsetsByTimestamp": ('{"x": {"1": 7}}', lambda source: source.end.times_ms, {("x", 1): 7}),
    "endingOffsets": ('{"x": {"1": -1}}', lambda source: source.end.offsets, {("x", 1): LATEST}),
    "failOnDataLoss": ("false", lambda source: source.read.fail_on_loss, False),
    "minPartitions": ("7", lambda source: source.least_tasks, 7),
    "maxRecordsPerPartition": ("7", lambda source: source.most_offsets, 7),
    "includeHeaders": ("true", lambda source: source.read.headers, True),
    **{
        name: ("7", lambda source: source.ignored, (name,))
        for name in (
            "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
            "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "groupIdPrefix",
            "kafka.group.id",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_option_of_the_connectors_guide_is_taken(name):
    value, where, found = DOCUMENTED[name]
    given = {**GOOD, "startingTimestamp": "5"} if name.endswith("Strategy") else GOOD
    assert where(parse_source({**given, name: value})) == found != where(parse_source(given))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("subscribe", "x,y", Subscription("subscribe", topics=("x", "y"))),
        ("subscribePattern", "x.*", Subscription("subscribePattern", pattern="x.*")),
        ("assign", '{"x": [1]}', Subscription("assign", partitions=(("x", 1),), topics=("x",))),
    ],
)
def test_each_way_of_the_guide_to_name_topics_is_taken(name, value, found):
    assert parse_source({**SERVERS, name: value}).subscription == found


TUNED = {
    "minPartitions": "7",
    "groupIdPrefix": "mine",
    "fetchOffset.numRetries": "5",
    "kafkaConsumer.pollTimeoutMs": "60000",
    "KAFKA.Max.Poll.Records": "5",
}


def test_what_only_tunes_the_connector_is_taken_and_named_and_changes_nothing_else():
    tuned = parse_source({**GOOD, **TUNED})
    names = (
        "groupIdPrefix",
        "fetchOffset.numRetries",
        "kafkaConsumer.pollTimeoutMs",
        "kafka.max.poll.records",
    )
    assert tuned.ignored == names
    assert replace(tuned, ignored=()) == parse_source({**GOOD, "minPartitions": "7"})
    assert (
        tuned.ignored_line() == f"millrace: options that change no row here are ignored: {', '.join(names)}"
    )


def test_what_is_ignored_is_said_once_for_each_query(capsys):
    source = MillraceDataSource({**GOOD, **TUNED})
    source.reader(source.schema())  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("are ignored") == 1
    MillraceDataSource(GOOD).schema()
    assert capsys.readouterr().err == ""


def test_a_streaming_query_is_refused_in_one_sentence():
    source = MillraceDataSource(GOOD)
    with pytest.raises(ConfigError) as problem:
        source.streamReader(source.schema())  # type: ignore[arg-type]
    assert (
        str(problem.value) == "format millrace: got 'readStream', expected read: this source reads in batches"
    )


@pytest.mark.parametrize(
    "given",
    [
        {**GOOD, "security": '{"sasl": {"password": "hunter2"}'},
        {**GOOD, "sasl.password": "hunter2"},
        {**GOOD, "kafka.ssl.truststore.password": "hunter2"},
        {**GOOD, "kafka.sasl.client.callback": "hunter2"},
        {**GOOD, "kafka.sasl.jaas.config": PLAIN_LOGIN.format("hunter2"), "security": "{}"},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(given):
    with pytest.raises(ConfigError) as problem:
        parse_source(given)
    assert "hunter2" not in str(problem.value) and "hunter2" not in repr(problem.value)


def test_a_login_in_kafkas_words_reaches_the_workers_and_no_text():
    given = {
        **GOOD,
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": PLAIN_LOGIN.format("hunter2"),
    }
    reader = MillraceReader(parse_source(given))
    (login,) = pickle.loads(pickle.dumps(reader))._source.read.securities.values()
    assert isinstance(login, ClientProperties)
    security = security_of("cluster", login)
    assert security.sasl is not None and security.sasl.password is not None
    assert (security.sasl.username, security.sasl.password.read()) == ("a", "hunter2")
    assert "hunter2" not in repr(reader._source) and "hunter2" not in repr(security)


def test_an_option_of_audit_yaml_is_taken_as_it_stands_there():
    section = {"protocol": "SSL", "ssl": {"verify_hostname": False}}
    source = parse_source({**GOOD, "security": json.dumps(section)})
    assert source.read.securities == {"cluster": section}
