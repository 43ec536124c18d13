"""How an audited producer ends: purges, closing, forks and kills, against librdkafka's in-memory cluster."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.audit.clients.journal import HALF_HEADER, Journal, JournalInUse
from millrace.audit.clients.producer_life import drain
from millrace.audit.clients.recovery import recover
from millrace.audit.contract.events import CLOSED, EventLedger
from millrace.audit.producer import AuditedProducer
from tests.cluster.audited_topics import DEADLINE_S, facts_of, fate, read_all
from tests.cluster.mock_kafka import identities, settings, told_by
from tests.unit.audit.interruptions import handled_by, interrupting
from tests.waiting import patience, until


def test_reports_that_a_purge_took_along_go_out_again(mock_cluster, monkeypatch):
    """librdkafka may still drop what is queued after `purge` has returned: the last counts may go too."""
    own = settings(mock_cluster, linger_ms=60_000, millrace_report_interval_ms=60_000)
    producer, purged = AuditedProducer(own), []
    producer.produce("flights", b"")
    producer.flush()

    def purge_once(client, *arguments):
        if producer.refusal is not None and not purged:
            purged.append(producer._publisher.in_flight)
            Producer.purge(producer)
        return drain(client, *arguments)

    monkeypatch.setattr("millrace.audit.producer.drain", purge_once)
    assert producer.close() and purged == [2]
    facts = facts_of(told_by(mock_cluster), "flights")
    assert (facts.state, fate(facts, "acknowledged")) == (CLOSED, {1})


def test_close_says_so_when_the_last_counts_were_refused(mock_cluster, monkeypatch, tmp_path):
    """They are still owed then, and the next start of the same journal tells them."""
    own = settings(
        mock_cluster, millrace_report_interval_ms=60_000, millrace_journal=str(tmp_path / "journal")
    )
    producer = AuditedProducer(own)
    producer.produce("flights", b"")
    producer.flush()

    def refuse_counts(client, topic, value, key, partition, settled):
        if b'"count"' in value:
            return settled(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), None)
        return Producer.produce(client, topic, value, key, partition, settled)

    with monkeypatch.context() as refusing:
        refusing.setattr("millrace.audit.clients.event_publisher._produce", refuse_counts)
        assert not producer.close()
    assert fate(facts_of(told_by(mock_cluster), "flights"), "acknowledged") == set()
    with AuditedProducer(own) as again:
        again.report()
    assert fate(facts_of(told_by(mock_cluster), "flights"), "acknowledged") == {1}


def test_a_client_that_takes_nothing_any_more_has_its_counts_told_by_another(mock_cluster, monkeypatch):
    """After a fatal error an idempotent client refuses every record, reports included."""
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=60_000))
    producer.produce("flights", b"")
    producer.flush()
    take = Producer.produce

    def refuse(client, *arguments):
        if client is producer:
            raise KafkaException(KafkaError(KafkaError._FATAL, "the test's own"))
        take(client, *arguments)

    monkeypatch.setattr("millrace.audit.clients.event_publisher._produce", refuse)
    producer.report()
    assert producer.close()
    facts = facts_of(told_by(mock_cluster), "flights")
    assert (facts.state, fate(facts, "acknowledged")) == (CLOSED, {1})


def test_after_a_flush_that_timed_out_the_records_are_pending_and_not_settled():
    producer = AuditedProducer(settings("127.0.0.1:1"))
    for _ in range(3):
        producer.produce("flights", b"")
    # librdkafka counts what it has to say of the refused connection, too.
    assert producer.flush(0.05) >= 3 <= len(producer)
    stream = producer._streams["flights"]
    (*counts, about) = stream.report(0)
    assert counts == [] and (about.last_assigned, about.last_settled) == (3, 0)
    assert not producer.close(0.1)
    assert fate(stream, "ambiguous") == {1, 2, 3}


def test_what_a_callback_raises_comes_out_and_the_counts_are_told_nevertheless(mock_cluster):
    def fail(error, message):
        raise LookupError("the application's own")

    producer = AuditedProducer(settings(mock_cluster))
    producer.produce("flights", b"", on_delivery=fail)
    with pytest.raises(LookupError):
        producer.flush()
    producer.produce("flights", b"", on_delivery=fail)
    with pytest.raises(LookupError):
        producer.close()
    facts = facts_of(told_by(mock_cluster), "flights")
    assert (facts.state, fate(facts, "acknowledged")) == (CLOSED, {1, 2})


@pytest.mark.parametrize(
    "error", [KafkaException("text"), KafkaException(KafkaError(KafkaError._FAIL, "mine"))], ids=repr
)
@pytest.mark.parametrize("transactional", [False, True])
def test_nor_does_a_kafka_exception_of_the_applications_own_keep_anything_back(
    mock_cluster, error, transactional
):
    def fail(*_):
        raise error

    own = {"transactional_id": "writer"} if transactional else {}
    producer = AuditedProducer(settings(mock_cluster, **own))
    if transactional:
        producer.init_transactions(patience(DEADLINE_S))
        producer.begin_transaction()
        producer.produce("flights", b"", on_delivery=fail)
        with pytest.raises(KafkaException, match=r"text|mine"):
            producer.commit_transaction()
        with contextlib.suppress(KafkaException):  # it may have been cut short, and may be over
            producer.commit_transaction()
        producer.begin_transaction()
    producer.produce("flights", b"", on_delivery=fail)
    with pytest.raises(KafkaException, match=r"text|mine"):
        producer.close()
    facts = facts_of(told_by(mock_cluster), "flights")
    assert (facts.state, fate(facts, "acknowledged")) == (CLOSED, {1})
    assert producer.close() and facts.last_settled == facts.last_assigned


class Told(list):
    """A callback that is false until it was called, and equal to others."""

    def __call__(self, error, message):
        self.append(message.value())


def test_a_callback_that_is_false_is_told(mock_cluster):
    default, told = Told(), [Told() for _ in range(5)]
    producer = AuditedProducer({**settings(mock_cluster), "on_delivery": default})
    producer.produce("flights", b"0", callback=told[0])
    producer.produce("flights", b"1", on_delivery=told[1])
    producer.produce("flights", b"-")
    messages = [{"value": b"2", "callback": told[2]}, {"value": b"3"}]
    producer.produce_batch("flights", messages, callback=told[3])
    producer.produce_batch("flights", [{"value": b"4", "timestamp": 1}], on_delivery=told[4])
    producer.close()
    assert (default, told) == ([b"-"], [[b"%d" % number] for number in range(5)])


@pytest.mark.safety
@pytest.mark.parametrize(
    "where",
    [
        lambda producer: (producer._transactions, "end"),
        lambda producer: (producer._open_streams, "end"),
        lambda producer: (producer._publisher, "take_undelivered"),
        lambda producer: (producer._publisher, "publish"),
        lambda producer: (producer._journal, "close"),
    ],
    ids=["abort", "streams", "undelivered", "reports", "journal"],
)
def test_a_close_that_was_interrupted_goes_on_when_it_is_repeated(mock_cluster, monkeypatch, tmp_path, where):
    own = settings(
        mock_cluster, millrace_report_interval_ms=3_600_000, millrace_journal=str(tmp_path / "journal")
    )
    producer = AuditedProducer(own)
    producer.produce("flights", b"")
    producer.flush()
    part, name = where(producer)

    def leave() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, handled_by(leave):
        patch.setattr(part, name, interrupting(getattr(part, name)))
        with pytest.raises(KeyboardInterrupt):
            producer.close()
        assert producer.close() and producer.close()
    facts = facts_of(told_by(mock_cluster), "flights")
    assert (facts.state, fate(facts, "acknowledged")) == (CLOSED, {1})
    AuditedProducer(own).close()  # nobody holds the journal


def test_a_stream_of_many_windows_is_followed_by_a_new_one(mock_cluster, monkeypatch):
    monkeypatch.setattr("millrace.audit.clients.told_stream.MAX_WINDOWS_A_STREAM", 3)
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=60_000))
    for second in range(10):
        producer.produce("flights", b"", timestamp=1_357_000_000_000 + second * 1000)
        if second == 5:
            producer.flush()
            producer.report()
    producer.close()
    streams = sorted(told_by(mock_cluster).streams.values(), key=lambda facts: facts.last_assigned)
    assert [facts.last_assigned for facts in streams] == [4, 6]
    assert {facts.state for facts in streams} == {CLOSED}
    assert [len(fate(facts, "acknowledged")) for facts in streams] == [4, 6]
    named = {(i.stream, i.sequence) for i in identities(read_all(mock_cluster, "flights"))}
    assert named == {(f.stream, s) for f in streams for s in fate(f, "acknowledged")}


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_producer_that_was_flushed_and_dropped_says_that_it_is_closed(mock_cluster, in_a_cycle):
    own = settings(mock_cluster, millrace_report_interval_ms=3_600_000)
    producer = AuditedProducer(own)
    producer.produce("flights", b"")
    producer.flush()
    if in_a_cycle:
        producer.itself = producer
    dropped = weakref.ref(producer)
    del producer

    def is_closed() -> bool:
        gc.collect()  # each time: a report that is under way holds the producer until it is out
        streams = [each for each in told_by(mock_cluster).streams.values() if each.topic == "flights"]
        return [(each.state, fate(each, "acknowledged")) for each in streams] == [(CLOSED, {1})]

    until(is_closed, "the dropped producer's last word")
    until(lambda: dropped() is None and not _of_reports(), "nothing left of it")


def _of_reports() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "millrace-audit-reports"]


def test_a_producer_that_two_threads_close_is_closed_by_one_of_them(mock_cluster, monkeypatch):
    """The client of one that was closed meanwhile can be flushed for ever."""
    producer, closers, second = AuditedProducer(settings(mock_cluster)), set(), []
    producer.produce("flights", b"")

    def close_from_another_thread(client, *arguments):
        if not closers:
            closers.add(threading.get_ident())
            other = threading.Thread(target=lambda: second.append(producer.close(0.01)))
            other.start()
            other.join()
        closers.add(threading.get_ident())
        if len(closers) > 1:
            raise SystemExit
        return drain(client, *arguments)

    monkeypatch.setattr("millrace.audit.producer.drain", close_from_another_thread)
    assert producer.close() and producer.close(0.01)
    assert second == [False] and closers == {threading.get_ident()}
    assert facts_of(told_by(mock_cluster), "flights").state == CLOSED


def test_a_closed_client_has_nothing_to_drain():
    class Asked(Producer):
        times = 0

        def flush(self, *arguments):
            self.times += 1
            if self.times > 3:
                raise SystemExit("a client that is closed is asked for ever")
            return super().flush(*arguments)

    client, raised = Asked({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}), []
    client.close()
    assert drain(client, -1, raised) == 0
    assert [str(error) for error in raised] == ["Producer has been closed"]


DROPPED = """
import sys
from millrace.audit.producer import AuditedProducer
producer = AuditedProducer({"bootstrap.servers": sys.argv[1], "linger.ms": 1})
producer.produce("flights", b"")
producer.flush()
del producer
"""


def test_a_program_that_ends_right_after_it_dropped_a_producer_waits_for_its_last_word(mock_cluster):
    command = [sys.executable, "-c", DROPPED, mock_cluster]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(DEADLINE_S))
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert facts_of(told_by(mock_cluster), "flights").state == CLOSED


def test_what_a_poll_has_told_is_in_the_journal_when_it_returns_or_a_callback_raises(mock_cluster, tmp_path):
    own = settings(mock_cluster, millrace_journal=tmp_path / "j", millrace_report_interval_ms=3_600_000)
    producer, delivered = AuditedProducer(own), []
    inner = producer._journal._journal

    def acknowledged() -> set[int]:
        """What the next start would tell after a kill at this moment."""
        found = EventLedger()
        blocks = inner._read_blocks(inner._start + HALF_HEADER.size, inner._size)
        for key, value in recover(blocks, 0).items():
            found.add(key.encode(), value.encode())
        return set().union(*(fate(facts, "acknowledged") for facts in found.streams.values()))

    def callback(error, message):
        delivered.append(message)
        if len(delivered) == 2:
            raise LookupError("the application's own")

    def serve(number):
        until(lambda: producer.poll(0.1) and len(delivered) == number, "the delivery")

    for number in (1, 2, 3):
        producer.produce("flights", b"", on_delivery=callback)
        with contextlib.suppress(LookupError):
            serve(number)
        assert len(delivered) == number and acknowledged() == set(range(1, number + 1))
    producer.close()


def test_a_closed_producer_refuses_and_closing_again_is_harmless(mock_cluster):
    with AuditedProducer(settings(mock_cluster)) as producer:
        producer.produce("flights", b"")
    assert producer.close()
    with pytest.raises(RuntimeError, match="closed"):
        producer.produce("flights", b"")
    assert facts_of(told_by(mock_cluster), "flights").state == CLOSED


def test_a_forked_child_refuses_to_use_its_parents_streams(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    producer.produce("flights", b"")
    producer.flush()
    child = os.fork()
    if child == 0:
        try:
            producer.produce("flights", b"")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.produce("flights", b"")
    producer.close()
    assert fate(facts_of(told_by(mock_cluster), "flights"), "acknowledged") == {1, 2}


FORKED = """
import sys, os
from millrace.audit.producer import AuditedProducer
settings = {"bootstrap.servers": sys.argv[1], "log_level": 0, "linger.ms": 60000}
settings["millrace.journal"] = sys.argv[2]
producer = AuditedProducer(settings)
producer.produce("flights", b"")
producer.flush()
producer.produce("flights", b"")
stuck = AuditedProducer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
stuck.produce("flights", b"")  # the end of this one would wait for ever in a child
child = os.fork()
if child == 0:
    calls = [lambda: producer.produce("flights", b""), lambda: producer.produce_batch("flights", [{}]),
             lambda: producer.send("flights", b""), lambda: producer.poll(0), lambda: producer.flush(1),
             producer.purge, lambda: producer.list_topics(timeout=1), producer.cluster_id,
             producer.begin_transaction, lambda: producer.set_sasl_credentials("a", "b")]
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            if "forked" in str(error):
                continue
        os._exit(100 + number)
    producer.close()
    del calls, call, producer, stuck
    sys.exit(7)  # through the interpreter's end, where a plain client would wait for threads that it has not
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = os.fork()
if child == 0:
    import time
    time.sleep(600)
producer.produce("flights", b"")
producer.close()
stuck.close(0.1)
try:
    AuditedProducer(settings).close()
finally:
    os.kill(child, 9)
    os.waitpid(child, 0)
"""


def test_no_call_of_a_forked_child_hangs_or_uses_its_parents_streams(mock_cluster, tmp_path):
    """Nor does the child keep the journal's lock, which the next start would wait for."""
    command = [sys.executable, "-c", FORKED, mock_cluster, str(tmp_path / "journal")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(2 * DEADLINE_S))
    assert done.returncode == 0, done.stderr
    streams = [facts for facts in told_by(mock_cluster).streams.values() if facts.topic == "flights"]
    assert [fate(facts, "acknowledged") for facts in streams] == [{1, 2, 3}]


CHILD = """
import sys
from millrace.audit.producer import AuditedProducer
producer = AuditedProducer({"bootstrap.servers": sys.argv[1], "linger.ms": 1, "millrace.journal": sys.argv[2],
    "millrace.producer": "AA@ewr", "millrace.report.interval.ms": int(sys.argv[3])})
served = 0
def delivered(error, message):
    global served
    served += error is None
while True:
    for _ in range(50):
        producer.produce("flights", b"x" * 20, on_delivery=delivered)
    producer.poll(0.001)
    while len(producer) > 20_000:  # a server that is slower must not make its queue run over
        producer.poll(0.01)
    print(served, flush=True)
"""


@pytest.mark.parametrize("report_interval_ms", [20, 60_000])
def test_a_killed_producer_reports_by_its_journal_what_it_knew(mock_cluster, tmp_path, report_interval_ms):
    journal = tmp_path / "journal"
    command = [sys.executable, "-c", CHILD, mock_cluster, str(journal), str(report_interval_ms)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    known = 0
    while known < 2000:
        known = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    rest = child.communicate()[0].split("\n")
    known = max([known, *(int(line) for line in rest[:-1] if line)])
    successor = AuditedProducer(settings(mock_cluster, millrace_journal=journal))
    with pytest.raises(JournalInUse):
        AuditedProducer(settings(mock_cluster, millrace_journal=journal))
    assert successor.close()
    facts = facts_of(told_by(mock_cluster), "flights")
    written = {identity.sequence for identity in identities(read_all(mock_cluster, "flights"))}
    acknowledged = fate(facts, "acknowledged")
    assert facts.state == CLOSED and facts.conflicts == []
    assert known <= len(acknowledged) and acknowledged <= written
    assert written <= acknowledged | fate(facts, "ambiguous")
    left = Journal(journal)
    assert recover(left.recovered, 0) == {}
    left.close()
