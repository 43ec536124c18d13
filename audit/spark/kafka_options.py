"""Options of `spark.read.format("millrace")`, by the names that `format("kafka")` has. Pure.

Called by `spark_source`. A query moves over from Spark's Kafka connector (`spark-sql-kafka-0-10`, batch) by
changing the format's name: same options, same columns, same rows. What only tunes the connector or its
client changes no row: it is taken, and `SourceOptions.ignored` names it for the user. Whatever else the
connector has and this source has not is refused by name, never passed over. Names are read whatever their
case, as Spark's own are; a wrong one is one `ConfigError` line, which shows no value of a `kafka.` setting:
any may hold a secret.

    kafka.bootstrap.servers   host:port,host:port; required
    subscribe                 topic,topic                     (one of these three)
    subscribePattern          a pattern found in topics' names; internal topics are left out
    assign                    JSON {topic: [partition, ...]}
    startingOffsets           earliest (default), or JSON {topic: {partition: offset}}; -2 is earliest
    endingOffsets             latest (default), or the same; -1 is latest
    startingTimestamp, endingTimestamp
                              ms: the first offset at or after it; before all others
    startingOffsetsByTimestamp, endingOffsetsByTimestamp
                              JSON {topic: {partition: ms}}; before the offsets
    startingOffsetsByTimestampStrategy
                              error (default) or latest, where no record is as young
    failOnDataLoss            true (default); false: begin and end where the log does, if it is shorter
    minPartitions             about so many tasks, larger partitions cut; default: one a partition
    maxRecordsPerPartition    tasks of at most so many offsets
    includeHeaders            true: column `headers`
    kafka.isolation.level     read_uncommitted (default, as Kafka's) or read_committed; cells are of
                              committed records alone
    kafka.fetch.max.bytes     most bytes of one fetch, default 8388608
    kafka.security.protocol, kafka.sasl.…, kafka.ssl.…
                              as in a client file of Kafka; stores are PEM

    groupIdPrefix, kafka.group.id, fetchOffset.…, kafkaConsumer.…, …PerTrigger, kafka.max.poll.records, …
                              change no row, and are ignored (`_IGNORED`)

And those of its own:

    mode                      records (default), or cells: what the audit counts (`cell_rows`)
    includeIdentity           true: column `identity`, what an audited producer told
    security                  JSON: a `security` section of audit.yaml, with references for secrets; they are
                              followed on the driver, and what they hold travels with the tasks, unseen
    window, digest, chunk_offsets
                              of cells, as in `read_options`
    cluster, tier             of cells: where they are from
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.audit.config import SHOWN, parse_addresses, parse_duration_ms
from millrace.audit.scanning.credentials import ClientProperties, Login
from millrace.audit.spark.offset_limits import EARLIEST, LATEST, Limit
from millrace.audit.spark.read_options import (
    CELLS,
    CHUNK_OFFSETS,
    FETCH_MAX_BYTES,
    RECORDS,
    ReadOptions,
    count_option,
    flag_option,
    json_option,
)
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.topic_partition import TopicPartition

BOOTSTRAP = "kafka.bootstrap.servers"
_OWN = (
    "assign",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "includeIdentity",
    "mode",
    "cluster",
    "tier",
    "window",
    "digest",
    "chunk_offsets",
    "security",
)
_OF_RECORDS = ("includeHeaders", "includeIdentity")
_OF_CELLS = ("cluster", "tier", "window", "digest", "chunk_offsets")
_CLIENT = ("kafka.isolation.level", "kafka.fetch.max.bytes", BOOTSTRAP)
_LOGIN = (
    "security.protocol",
    "sasl.mechanism",
    "sasl.jaas.config",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.client.credentials.client.id",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.header.urlencode",
    "ssl.truststore.location",
    "ssl.truststore.type",
    "ssl.truststore.certificates",
    "ssl.keystore.location",
    "ssl.keystore.type",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
)
_IGNORED = (
    # It reads without a consumer group, and tries again for 30 s by itself.
    "groupIdPrefix",
    "kafka.group.id",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    # The connector passes them over in batch queries, too.
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    # How Kafka's own consumer goes about its work.
    *(
        f"kafka.{name}"
        for name in (
            "allow.auto.create.topics",
            "client.dns.lookup",
            "client.id",
            "client.rack",
            "connections.max.idle.ms",
            "default.api.timeout.ms",
            "fetch.max.wait.ms",
            "fetch.min.bytes",
            "heartbeat.interval.ms",
            "max.partition.fetch.bytes",
            "max.poll.interval.ms",
            "max.poll.records",
            "metadata.max.age.ms",
            "receive.buffer.bytes",
            "reconnect.backoff.max.ms",
            "reconnect.backoff.ms",
            "request.timeout.ms",
            "retry.backoff.max.ms",
            "retry.backoff.ms",
            "send.buffer.bytes",
            "session.timeout.ms",
            "socket.connection.setup.timeout.max.ms",
            "socket.connection.setup.timeout.ms",
        )
    ),
)
"""Options that tune the connector or Kafka's consumer: whatever their values, a query gives the same rows."""
_NO_GROUP = "none: this source reads without a consumer group"
_REFUSED = {
    "kafka.enable.auto.commit": _NO_GROUP,
    "kafka.auto.offset.reset": "startingOffsets in its place",
    "kafka.key.deserializer": "none: keys are bytes; decode the column",
    "kafka.value.deserializer": "none: values are bytes; decode the column",
    "maxbytespertrigger": "none: it is of streaming queries, and this source reads in batches",
    "kafka.ssl.truststore.password": "none: stores are PEM, whose certificates need no password",
    "kafka.ssl.keystore.password": "kafka.ssl.key.password: stores are PEM",
}
"""Options that the connector or Kafka's client has and this source has not: what is expected instead."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which partitions are read: those of `topics`, of topics in whose name `pattern` is found, or
    `partitions` alone. `option` is the one that said so, for errors."""

    option: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The checked options. `least_tasks` and `most_offsets` of a task are None where nobody asked; `ignored`
    are names of options that were given and change nothing here."""

    read: ReadOptions
    cluster: str
    tier: str
    subscription: Subscription
    start: Limit
    end: Limit
    least_tasks: int | None = None
    most_offsets: int | None = None
    ignored: tuple[str, ...] = ()

    def ignored_line(self) -> str:
        """What a user is told of them; "" where there are none."""
        names = ", ".join(self.ignored)
        return f"millrace: options that change no row here are ignored: {names}" if names else ""


def parse_source(options: Mapping[str, str]) -> SourceOptions:
    """Check what `.option(...)` was given; raises ConfigError."""
    given = {name.lower(): value for name, value in options.items()}
    _check_names(given)
    mode = given.get("mode", RECORDS)
    if mode not in (RECORDS, CELLS):
        raise ConfigError("option mode", mode, "records or cells")
    for name in _OF_CELLS if mode == RECORDS else _OF_RECORDS:
        if name.lower() in given:
            other = CELLS if mode == RECORDS else RECORDS
            raise ConfigError(f"option {name}", given[name.lower()], f"mode {other} beside it")
    cluster = given.get("cluster", "cluster")
    if not given.get(BOOTSTRAP):
        raise ConfigError(f"option {BOOTSTRAP}", given.get(BOOTSTRAP), "a value: it is required")
    login = _login(given)
    read = ReadOptions(
        bootstraps={cluster: parse_addresses(f"option {BOOTSTRAP}", given[BOOTSTRAP])},
        mode=mode,
        window_ms=parse_duration_ms("option window", given.get("window", "60s")),
        chunk_offsets=count_option(given, "chunk_offsets", CHUNK_OFFSETS, 1, 1 << 40),
        fetch_max_bytes=count_option(given, "kafka.fetch.max.bytes", FETCH_MAX_BYTES, 1 << 10, 1 << 30),
        securities={} if login is None else {cluster: login},
        digest=flag_option(given, "digest"),
        read_committed=_reads_committed(given, mode),
        fail_on_loss=flag_option(given, "failOnDataLoss", True),
        headers=flag_option(given, "includeHeaders"),
        identity=flag_option(given, "includeIdentity"),
    )
    return SourceOptions(
        read=read,
        cluster=cluster,
        tier=given.get("tier", cluster),
        subscription=_subscription(given),
        start=_limit(given, "starting", EARLIEST),
        end=_limit(given, "ending", LATEST),
        least_tasks=_optional_count(given, "minPartitions", 100_000),
        most_offsets=_optional_count(given, "maxRecordsPerPartition", 1 << 62),
        ignored=tuple(name for name in _IGNORED if name.lower() in given),
    )


def _check_names(given: Mapping[str, str]) -> None:
    known = {name.lower() for name in (*_OWN, *_CLIENT, *_IGNORED)} | {f"kafka.{name}" for name in _LOGIN}
    for name in given:
        if name in _REFUSED:
            raise ConfigError(f"option {name}", _HIDDEN, _REFUSED[name])
        if name not in known:
            # Its value is not shown: it may be the password of an option that another client has.
            expected = "a setting of Kafka's client that this source has: " if "kafka." in name else "one of "
            names = (*_CLIENT, *(f"kafka.{each}" for each in _LOGIN)) if "kafka." in name else _OWN
            raise ConfigError("option", name, expected + ", ".join(names))


_MOST_NUMBER = (1 << 63) - 1
"""What Kafka has offsets and times in."""


class _Hidden:
    def __repr__(self) -> str:
        return "a value"


_HIDDEN = _Hidden()


def _login(given: Mapping[str, str]) -> Login | None:
    properties = {name: given[f"kafka.{name}"] for name in _LOGIN if given.get(f"kafka.{name}") is not None}
    if "security" in given:
        if properties:
            name = f"kafka.{next(iter(properties))}"
            raise ConfigError(f"option {name}", _HIDDEN, "none beside option security, which tells all")
        section: dict[str, Any] = json_option(given, "security", dict)
        return section
    return ClientProperties(properties) if properties else None


def _reads_committed(given: Mapping[str, str], mode: str) -> bool:
    level = given.get("kafka.isolation.level", "read_committed" if mode == CELLS else "read_uncommitted")
    if level.lower() not in ("read_committed", "read_uncommitted"):
        raise ConfigError("option kafka.isolation.level", level, "read_committed or read_uncommitted")
    if mode == CELLS and level.lower() != "read_committed":
        raise ConfigError("option kafka.isolation.level", level, "read_committed, for mode cells")
    return level.lower() == "read_committed"


def _subscription(given: Mapping[str, str]) -> Subscription:
    ways = [name for name in ("assign", "subscribe", "subscribePattern") if name.lower() in given]
    if len(ways) != 1:
        raise ConfigError("options", ", ".join(ways) or None, "one of assign, subscribe, subscribePattern")
    (way,) = ways
    text = given[way.lower()]
    if way == "subscribe":
        topics = tuple(dict.fromkeys(topic.strip() for topic in text.split(",") if topic.strip()))
        if not topics:
            raise ConfigError("option subscribe", text, "topics with commas")
        return Subscription(way, topics=topics)
    if way == "subscribePattern":
        return Subscription(way, pattern=_pattern(text.strip()))
    places = _places(given, "assign", list)
    partitions = [(topic, number) for topic, numbers in places.items() for number in numbers]
    if not partitions or not all(type(number) is int and number >= 0 for _, number in partitions):
        raise ConfigError("option assign", text[:SHOWN], 'partitions, such as {"topic": [0, 1]}')
    return Subscription(way, topics=tuple(places), partitions=tuple(dict.fromkeys(partitions)))


def _pattern(text: str) -> str:
    """A pattern that means the same to Java and Python, as far as Python can tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # Java's sets in sets
            re.compile(text)
    except (re.error, FutureWarning) as problem:
        raise ConfigError("option subscribePattern", text, f"a pattern of Python's re ({problem})") from None
    if not text:
        raise ConfigError("option subscribePattern", text, "a pattern")
    return text


def _limit(given: Mapping[str, str], side: str, default: int) -> Limit:
    """Where a read begins or ends. Of several options the first that is given counts, as in the connector."""
    by_time, by_times, by_offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    or_latest = side == "ending" or _or_latest(given)
    if by_time.lower() in given:
        text = given[by_time.lower()].strip()
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise ConfigError(f"option {by_time}", text[:SHOWN], "a time in milliseconds since 1970")
        return Limit(by_time, default, time_ms=int(text), or_latest=or_latest)
    if by_times.lower() in given:
        return Limit(by_times, default, times_ms=_numbers(given, by_times, 0), or_latest=or_latest)
    text = given.get(by_offsets.lower(), "").strip()
    word = "earliest" if side == "starting" else "latest"
    if not text or text.lower() == word:
        return Limit(by_offsets, default)
    if not text.startswith("{"):
        raise ConfigError(f"option {by_offsets}", text[:SHOWN], f"{word}, or JSON with an offset a partition")
    offsets = _numbers(given, by_offsets, EARLIEST)
    for (topic, partition), offset in offsets.items():
        if offset < 0 and offset != default:
            where = f"option {by_offsets}, {topic}-{partition}"
            raise ConfigError(where, offset, f"an offset, or {default} for {word}")
    return Limit(by_offsets, default, offsets=offsets)


def _or_latest(given: Mapping[str, str]) -> bool:
    text = given.get("startingoffsetsbytimestampstrategy", "error")
    if text.lower() not in ("error", "latest"):
        raise ConfigError("option startingOffsetsByTimestampStrategy", text, "error or latest")
    return text.lower() == "latest"


def _numbers(given: Mapping[str, str], name: str, least: int) -> dict[TopicPartition, int]:
    """{(topic, partition): number} of `{"topic": {"0": 23}}`."""
    found: dict[TopicPartition, int] = {}
    for topic, numbers in _places(given, name, dict).items():
        for partition, number in numbers.items():
            if not re.fullmatch(r"[0-9]{1,9}", partition) or type(number) is not int or number < least:
                shown = json.dumps({topic: {partition: number}})[:SHOWN]
                raise ConfigError(f"option {name}", shown, 'numbers, such as {"topic": {"0": 23}}')
            if number > _MOST_NUMBER:
                where, expected = f"option {name}, {topic}-{partition}", f"a number up to {_MOST_NUMBER}"
                raise ConfigError(where, number, expected)
            if (topic, int(partition)) in found:  # as 1 and as 01
                raise ConfigError(f"option {name}, {topic}", f"partition {int(partition)} twice", "it once")
            found[topic, int(partition)] = number
    return found


def _places(given: Mapping[str, str], name: str, kind: type) -> dict[str, Any]:
    """A JSON object of lists or objects by topic."""
    value: dict[str, Any] = json_option(given, name, dict)
    for topic, each in value.items():
        if not isinstance(each, kind):
            what = '{"topic": [0, 1]}' if kind is list else '{"topic": {"0": 23}}'
            raise ConfigError(
                f"option {name}, {topic}", json.dumps(each)[:SHOWN], f"partitions, such as {what}"
            )
    return value


def _optional_count(given: Mapping[str, str], name: str, most: int) -> int | None:
    return count_option(given, name, 1, 1, most) if name.lower() in given else None
