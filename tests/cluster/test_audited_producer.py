"""The audited producer against librdkafka's own in-memory cluster: an independent Kafka, without Java."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest
from confluent_kafka import KafkaError, KafkaException

from millrace.audit.clients.producer_config import read_config
from millrace.audit.contract.content_digest import record_digest
from millrace.audit.contract.events import CLOSED
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.producer import AuditedProducer
from millrace.broker.errors import ConfigError
from tests.cluster.audited_topics import DEADLINE_S, facts_of, fate, read_all
from tests.cluster.mock_kafka import identities, settings, told_by
from tests.waiting import Deadline, patience


def test_records_carry_their_identity_and_the_reports_say_exactly_what_was_acknowledged(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    delivered = []
    for number in range(300):
        producer.produce(
            "flights",
            b"x" * number,
            key=f"k{number}",
            timestamp=1_357_000_000_000 + number * 10,
            headers={"own": b"1"} if number % 2 else [("own", b"1")],
            on_delivery=lambda error, message: delivered.append((error, message.offset())),
        )
    assert producer.close()
    messages = read_all(mock_cluster, "flights")
    stamps = sorted(identities(messages), key=lambda identity: identity.sequence)
    assert [stamp.sequence for stamp in stamps] == list(range(1, 301))
    assert [stamp.created_ms for stamp in stamps] == [1_357_000_000_000 + n * 10 for n in range(300)]
    assert {stamp.producer for stamp in stamps} == {"AA@ewr"}
    assert all(dict(message.headers())["own"] == b"1" for message in messages)
    assert all(
        message.timestamp()[1] == stamp.created_ms
        for message, stamp in zip(sorted(messages, key=lambda m: m.timestamp()[1]), stamps, strict=True)
    )
    assert len(delivered) == 300 and {error for error, _ in delivered} == {None}
    facts = facts_of(told_by(mock_cluster), "flights")
    assert facts.stream == stamps[0].stream
    assert (facts.state, facts.last_assigned, facts.last_settled) == (CLOSED, 300, 300)
    assert fate(facts, "acknowledged") == set(range(1, 301))
    windows = {start: len(report.acknowledged) for start, report in facts.windows.items()}
    assert windows == {1_357_000_000_000 + second * 1000: 100 for second in range(3)}
    assert sum(report.byte_count for report in facts.windows.values()) == sum(range(300))


def test_each_topic_is_a_stream_of_its_own(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    for number in range(10):
        producer.produce("a" if number % 2 else "b", b"")
    producer.close()
    ledger = told_by(mock_cluster)
    a, b = facts_of(ledger, "a"), facts_of(ledger, "b")
    assert a.stream != b.stream and a.session == b.session
    assert fate(a, "acknowledged") == fate(b, "acknowledged") == {1, 2, 3, 4, 5}


def test_compact_identity_leaves_the_name_to_the_events(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, millrace_identity="compact"))
    producer.produce("flights", "text", "key")
    producer.close()
    (identity,) = identities(read_all(mock_cluster, "flights"))
    assert identity.producer == ""
    assert facts_of(told_by(mock_cluster), "flights").producer == "AA@ewr"


def test_without_a_timestamp_the_creation_time_is_now_and_a_promise_is_made(mock_cluster):
    before_ms = int(time.time() * 1000)
    producer = AuditedProducer(settings(mock_cluster))
    producer.produce("flights", b"")
    producer.flush()
    producer.report()
    producer.close()
    (identity,) = identities(read_all(mock_cluster, "flights"))
    assert before_ms <= identity.created_ms <= int(time.time() * 1000)
    assert facts_of(told_by(mock_cluster), "flights").no_earlier_than_ms is not None


def test_a_clock_that_jumped_ahead_and_was_set_right_changes_no_time_of_a_record(mock_cluster, monkeypatch):
    """Each has the time that the clock showed; what was promised of the future stands, of another stream."""
    shown_ms = [2_000_000_000_000]
    monkeypatch.setattr("millrace.audit.producer._time_ns", lambda: shown_ms[0] * 1_000_000)
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=60_000))
    for at_ms in (2_000_000_000_000, 2_000_003_600_000, 2_000_000_001_000, 2_000_000_002_000):
        shown_ms[0] = at_ms
        producer.produce("flights", b"")
        producer.produce_batch("flights", [{}])
        producer.flush()
        producer.report()
    producer.close()
    messages = read_all(mock_cluster, "flights")
    times = [
        (m.timestamp()[1], identity.created_ms)
        for m, identity in zip(messages, identities(messages), strict=True)
    ]
    hours = [2_000_000_000_000, 2_000_003_600_000, 2_000_000_001_000, 2_000_000_002_000]
    assert sorted(times) == sorted((at_ms, at_ms) for at_ms in hours for _ in range(2))
    streams = [facts for facts in told_by(mock_cluster).streams.values() if facts.topic == "flights"]
    assert sorted(facts.last_assigned for facts in streams) == [4, 4]
    for facts in streams:
        own = [each.created_ms for each in identities(messages) if each.stream == facts.stream]
        assert facts.state == CLOSED and fate(facts, "acknowledged") == {1, 2, 3, 4} and len(own) == 4


def test_a_clock_set_back_into_the_last_records_millisecond_breaks_no_promise(mock_cluster, monkeypatch):
    """What was looked up for that millisecond holds no more, for a report has promised of later since."""
    shown_ms = [2_000_000_000_000]
    monkeypatch.setattr("millrace.audit.producer._time_ns", lambda: shown_ms[0] * 1_000_000)
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=60_000))
    for later_ms in (0, 3_600_000):
        for _ in range(3):
            producer.produce("flights", b"")
        producer.flush()
        shown_ms[0] += later_ms
        producer.report()
        shown_ms[0] -= later_ms
    for _ in range(3):
        producer.produce("flights", b"")
    producer.close()
    streams = [facts for facts in told_by(mock_cluster).streams.values() if facts.topic == "flights"]
    assert sorted(facts.last_assigned for facts in streams) == [3, 6]
    assert {each.created_ms for each in identities(read_all(mock_cluster, "flights"))} == {shown_ms[0]}


@pytest.mark.parametrize(("retries", "fate_of_all"), [(0, "failed"), (5, "ambiguous")])
def test_a_purged_record_has_surely_failed_only_where_nothing_is_sent_twice(retries, fate_of_all):
    """With retries, a record that waits in the queue may have been sent before."""
    producer = AuditedProducer(settings("127.0.0.1:1", retries=retries))
    errors = []
    for _ in range(5):
        producer.produce("flights", b"", on_delivery=lambda error, message: errors.append(error.code()))
    stream = producer._streams["flights"]
    producer.purge()
    deadline = Deadline("five records are given up", within_s=DEADLINE_S)
    while len(errors) < 5:
        deadline.check(errors)
        producer.poll(0.1)  # the client's own thread purges, and may do it in parts
    assert errors == [KafkaError._PURGE_QUEUE] * 5
    assert {name: fate(stream, name) for name in ("failed", "ambiguous")} == {
        "failed": set(),
        "ambiguous": set(),
        fate_of_all: {1, 2, 3, 4, 5},
    }
    producer.close(0.1)


def test_a_timeout_leaves_the_record_ambiguous():
    producer = AuditedProducer(settings("127.0.0.1:1", message_timeout_ms=50))
    producer.produce("flights", b"")
    stream = producer._streams["flights"]
    producer.flush(patience(DEADLINE_S))
    assert (fate(stream, "ambiguous"), fate(stream, "failed")) == ({1}, set())
    producer.close(0.1)


def test_a_full_queue_raises_as_ever_and_burns_no_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, queue_buffering_max_messages=5, linger_ms=1000))
    refused = 0
    for _ in range(30):
        try:
            producer.produce("flights", b"")
        except BufferError:
            refused += 1
    assert refused > 0
    producer.flush()
    for _ in range(3):
        producer.produce("flights", b"")
    producer.close()
    facts = facts_of(told_by(mock_cluster), "flights")
    acknowledged, failed = fate(facts, "acknowledged"), fate(facts, "failed")
    assert len(acknowledged) == 30 - refused + 3
    assert acknowledged == {i.sequence for i in identities(read_all(mock_cluster, "flights"))}
    # A number that is still given back when a report is made ends as failed: one a report at most.
    assert acknowledged | failed == set(range(1, facts.last_assigned + 1))
    assert len(failed) <= max(report.report for report in facts.windows.values())


def test_a_wrong_call_raises_and_burns_no_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    with pytest.raises(TypeError):
        producer.produce("flights", object())
    with pytest.raises(ValueError, match="creation time"):
        producer.produce("flights", b"", timestamp=-5)
    with pytest.raises(ValueError, match="own events"):
        producer.produce("millrace.audit", b"")
    producer.produce("flights", b"")
    producer.close()
    assert fate(facts_of(told_by(mock_cluster), "flights"), "acknowledged") == {1}


def test_threads_share_one_producer_without_sharing_a_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=5))
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            producer.poll(0.01)

    def send():
        for _ in range(500):
            producer.produce("flights", b"")

    poller = threading.Thread(target=serve)
    senders = [threading.Thread(target=send) for _ in range(3)]
    for thread in (poller, *senders):
        thread.start()
    for thread in senders:
        thread.join()
    stop.set()
    poller.join()
    assert producer.close()
    assert sorted(i.sequence for i in identities(read_all(mock_cluster, "flights"))) == list(range(1, 1501))
    facts = facts_of(told_by(mock_cluster), "flights")
    assert fate(facts, "acknowledged") == set(range(1, 1501))


def test_a_batch_is_stamped_record_by_record(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    told = []
    messages = [{"value": b"%d" % number, "key": "k"} for number in range(700)]
    messages[5]["timestamp"] = 1_357_000_000_000
    messages[600]["headers"] = {"own": b"1", HEADER_KEY: b"of another record"}
    messages[601]["callback"] = lambda error, message: told.append(message.value())
    everyone = []
    taken = producer.produce_batch("flights", messages, on_delivery=lambda *_: everyone.append(1))
    assert taken == 700
    assert producer.close()
    read = read_all(mock_cluster, "flights")
    stamps = {decode_identity(dict(m.headers())[HEADER_KEY]).sequence: m for m in read}
    assert sorted(stamps) == list(range(1, 701))
    assert all(message.value() == b"%d" % (sequence - 1) for sequence, message in stamps.items())
    assert stamps[6].timestamp()[1] == 1_357_000_000_000
    assert [name for name, _ in stamps[601].headers()] == ["own", HEADER_KEY]
    assert (told, len(everyone)) == ([b"601"], 699)
    facts = facts_of(told_by(mock_cluster), "flights")
    assert fate(facts, "acknowledged") == set(range(1, 701))


def test_a_batch_that_does_not_fit_says_which_and_burns_no_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, queue_buffering_max_messages=40, linger_ms=1000))
    producer.produce("flights", b"")
    messages = [{"value": b""} for _ in range(600)]
    taken = producer.produce_batch("flights", messages)
    assert 0 < taken < 600
    refused = [message["_error"].code() for message in messages if "_error" in message]
    assert refused == [KafkaError._QUEUE_FULL] * (600 - taken)
    stream = producer._streams["flights"]
    producer.flush()
    producer.produce("flights", b"")
    producer.close()
    written = {identity.sequence for identity in identities(read_all(mock_cluster, "flights"))}
    facts = facts_of(told_by(mock_cluster), "flights")
    assert fate(facts, "acknowledged") == written and len(written) == taken + 2
    assert fate(facts, "acknowledged") | fate(facts, "failed") == set(range(1, stream.last_assigned + 1))


@pytest.mark.parametrize("messages", [({"value": b""},), [b"value"], [{"value": b""}, {"value": 5}]])
def test_a_wrong_batch_is_refused_before_any_of_it_is_sent(mock_cluster, messages):
    producer = AuditedProducer(settings(mock_cluster))
    with pytest.raises(TypeError):
        producer.produce_batch("flights", messages)
    assert len(producer) == 0 and producer._streams == {}
    producer.close()


def test_an_identity_that_a_record_brought_along_is_replaced(mock_cluster):
    """Whoever forwards what it has read passes its headers on."""
    producer = AuditedProducer(settings(mock_cluster, millrace_content_digest=True))
    producer.produce("flights", b"", headers=[("a", b"1"), (HEADER_KEY, b"x" * 30), ("b", None)])
    producer.close()
    (message,) = read_all(mock_cluster, "flights")
    assert [name for name, _ in message.headers()] == ["a", "b", HEADER_KEY]
    (report,) = facts_of(told_by(mock_cluster), "flights").windows.values()
    assert report.digest == record_digest(1, None, b"", [("a", b"1"), ("b", None)])


def test_reports_do_not_show_in_the_length_of_the_queue(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, linger_ms=1000))
    producer.produce("flights", b"")
    producer.report()
    assert len(producer) == 1
    assert producer.flush(patience(DEADLINE_S)) == 0 and len(producer) == 0
    producer.close()


def test_an_application_that_wants_errors_only_hears_of_errors_only(mock_cluster):
    heard = []
    producer = AuditedProducer(
        settings(mock_cluster, delivery_report_only_error=True),
        on_delivery=lambda error, message: heard.append(error and error.code()),
    )
    producer.produce("flights", b"")
    producer.flush()
    producer.purge()
    producer.produce("flights", b"")
    producer.purge()
    producer.flush()
    producer.close()
    assert set(heard) <= {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
    assert 1 in fate(facts_of(told_by(mock_cluster), "flights"), "acknowledged")


def test_send_hears_of_its_records_whatever_the_application_wants_to_hear(mock_cluster):
    heard = []
    producer = AuditedProducer(
        settings(mock_cluster, delivery_report_only_error=True),
        on_delivery=lambda error, message: heard.append(error),
    )
    (standing,) = producer.send("flights", b"", timeout=patience(DEADLINE_S))
    assert (standing.topic, standing.offset) == ("flights", 0)
    producer.close()
    assert heard == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("millrace.window.ms", 0),
        ("millrace.window.ms", 99),
        ("millrace.window.ms", 7 * 86_400_000 + 1),
        ("millrace.window.ms", 1000.5),
        ("millrace.window.ms", True),
        ("millrace.window.ms", float("nan")),
        ("millrace.window.ms", "soon"),
        ("millrace.report.interval.ms", 3_600_001),
        ("millrace.lease.ms", 10_000),
        ("millrace.identity", "none"),
        ("millrace.content.digest", "perhaps"),
        ("millrace.producer", "a\nb"),
        ("millrace.producer", "a" * 10_240),
        ("millrace.producer", "a" * 250),
        ("millrace.producer", "\udcff"),
        ("millrace.application", "a\x00b"),
        ("millrace.datacenter", "d" * 250),
        ("millrace.audit.topic", "no topic"),
        ("millrace.journal", 5),
        ("millrace.windows", 1),
        ("partitioner", 5),
        ("encoder", "utf-8"),
        ("producer.type", "fast"),
        ("delivery.report.only.error", "maybe"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name_in_one_line(key, value):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as refused:
        AuditedProducer({"bootstrap.servers": "127.0.0.1:1", key: value})
    assert len(str(refused.value)) < 300 and str(refused.value).isprintable()


IDEMPOTENT = {"acks": "all", "enable.idempotence": True}


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, IDEMPOTENT),
        ({"acks": "all"}, {"enable.idempotence": True}),
        ({"request.required.acks": -1}, {"enable.idempotence": True}),
        ({"retries": 3, "max.in.flight": 5, "queuing.strategy": "fifo"}, IDEMPOTENT),
        ({"enable.idempotence": False}, {"acks": "all"}),
        ({"retries": 0}, {"acks": "all"}),
        ({"max.in.flight": 10}, {"acks": "all"}),
        ({"queuing.strategy": "lifo"}, {"acks": "all"}),
        ({"acks": 1}, {}),
        ({"default.topic.config": {"acks": 1}}, {}),
        ({"acks": "all", "default.topic.config": {"acks": 1}}, {}),  # the topics' setting is what counts
        ({"retries": 3, "message.send.max.retries": 0}, {"acks": "all"}),
        ({"max.in.flight": "0x10"}, {"acks": "all"}),
    ],
)
def test_all_acknowledgements_and_idempotence_are_defaults_that_give_way(own, added):
    assert read_config(own).client == {**own, **added}
    AuditedProducer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0, **own}).close(0.1)


@pytest.mark.parametrize(("own", "idempotent"), [({}, True), ({"acks": 1}, False)])
def test_the_client_itself_is_idempotent_by_default(mock_cluster, own, idempotent):
    """librdkafka tells of its producer id where it has one, and takes one only with all acknowledgements."""
    told = []
    producer = AuditedProducer(
        settings(mock_cluster, statistics_interval_ms=20, **own),
        stats_cb=lambda text: told.append(json.loads(text)),
    )
    producer.produce("flights", b"")
    assert producer.flush(patience(DEADLINE_S)) == 0
    told.clear()
    deadline = Deadline("statistics of the client", within_s=DEADLINE_S)
    while not told:
        deadline.check()
        producer.poll(0.1)
    assert told and ("eos" in told[0] and told[0]["eos"]["producer_id"] >= 0) is idempotent
    producer.close()


def test_a_script_with_an_impossible_name_gets_a_name_that_fits(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/" + "a\tb" * 200 + ".py"])
    config = read_config({})
    assert config.producer.startswith("a?b") and len(config.producer.encode()) <= 249


@pytest.mark.parametrize("topic", ["", "a b", "a" * 250, "a\n", "..", None, b"flights"])
def test_a_topic_that_no_broker_takes_is_refused_before_a_stream_opens(mock_cluster, topic):
    producer = AuditedProducer(settings(mock_cluster))
    with pytest.raises((KafkaException, TypeError)):
        producer.produce(topic, b"")
    assert producer._streams == {}
    producer.close()


def test_a_timestamp_that_is_no_whole_number_burns_no_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    with pytest.raises(TypeError):
        producer.produce("flights", b"", timestamp=1.5)
    producer.produce("flights", b"")
    producer.close()
    assert fate(facts_of(told_by(mock_cluster), "flights"), "acknowledged") == {1}
