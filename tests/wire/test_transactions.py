"""Transactions as foreign clients live them: committed, aborted, left open, fenced, timed out.

Every reader is asked for the same: read_committed shows exactly the records of committed transactions and
those without one, each at its own offset, and nothing behind an open transaction.
"""

from __future__ import annotations

import pytest

from tests.wire.foreign_clients import ForeignClient, Refused, Sent, wait_until

NEW_YEAR_MS = 1_357_034_400_000


def named(prefix: str, count: int, partition: int = 0) -> list[Sent]:
    return [Sent(b"%s-%d" % (prefix.encode(), n), b"k", (), NEW_YEAR_MS + n, partition) for n in range(count)]


def shown(client: ForeignClient, topic: str, partition: int = 0, *, committed: bool) -> list[tuple[int, str]]:
    """(offset, value) of everything that this isolation level shows."""
    drained = client.drain(topic, partition, committed=committed)
    return [(record.offset, (record.value or b"").decode()) for record in drained]


def test_commit_shows_all_partitions_at_once(client, readers, new_topic, fresh_name):
    topic = new_topic(partitions=2)
    producer = client.transactional(fresh_name("transactional"))
    try:
        producer.begin()
        assert producer.send(topic, named("a", 3)) == [0, 1, 2]
        assert producer.send(topic, named("b", 2, partition=1)) == [0, 1]
        for reader in readers:
            assert shown(reader, topic, 0, committed=True) == []
            assert shown(reader, topic, 1, committed=True) == []
            assert shown(reader, topic, 0, committed=False) == [(0, "a-0"), (1, "a-1"), (2, "a-2")]
            assert reader.bounds(topic, 0) == (0, 3)
            assert reader.bounds(topic, 0, committed=True) == (0, 0)
        producer.commit()
        # The marker that ends a transaction takes an offset.
        wait_until(lambda: readers[0].bounds(topic, 1, committed=True) == (0, 3), "the second marker")
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 4), "the first marker")
        for reader in readers:
            assert shown(reader, topic, 0, committed=True) == [(0, "a-0"), (1, "a-1"), (2, "a-2")]
            assert shown(reader, topic, 1, committed=True) == [(0, "b-0"), (1, "b-1")]
        producer.begin()
        assert producer.send(topic, named("c", 1)) == [4]
        producer.commit()
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 6), "the third marker")
        assert [offset for offset, _ in shown(readers[0], topic, committed=True)] == [0, 1, 2, 4]
    finally:
        producer.close()


def test_aborted_records_are_shown_only_to_who_asks_for_uncommitted_ones(
    client, readers, new_topic, fresh_name
):
    topic = new_topic()
    producer = client.transactional(fresh_name("transactional"))
    expected: list[tuple[int, str]] = []
    everything: list[tuple[int, str]] = []
    end = 0
    try:
        for name, fate in (("a", "commit"), ("b", "abort"), ("plain", None), ("c", "abort"), ("d", "commit")):
            records = named(name, 3)
            if fate is None:
                offsets = readers[0].produce(topic, records)
            else:
                producer.begin()
                offsets = producer.send(topic, records)
                getattr(producer, fate)()
            assert offsets == [end, end + 1, end + 2]
            end += 3 if fate is None else 4
            wait_until(lambda: readers[0].bounds(topic, 0, committed=True)[1] == end, f"the end of {name}")  # noqa: B023
            written = [
                (offset, (record.value or b"").decode())
                for offset, record in zip(offsets, records, strict=True)
            ]
            everything += written
            expected += [] if fate == "abort" else written
        for reader in readers:
            assert shown(reader, topic, committed=True) == expected, reader.name
            assert shown(reader, topic, committed=False) == everything, reader.name
    finally:
        producer.close()


def test_an_open_transaction_holds_back_what_was_written_after_it(client, readers, new_topic, fresh_name):
    topic = new_topic()
    readers[0].produce(topic, named("before", 1))
    early, late = (client.transactional(fresh_name("transactional")) for _ in range(2))
    try:
        early.begin()
        early.send(topic, named("early", 2))
        late.begin()
        late.send(topic, named("late", 1))
        readers[0].produce(topic, named("plain", 1))
        late.commit()
        wait_until(lambda: readers[0].bounds(topic, 0)[1] == 6, "the marker of the later one")
        for reader in readers:
            assert shown(reader, topic, committed=True) == [(0, "before-0")], reader.name
            assert reader.bounds(topic, 0, committed=True) == (0, 1)
        early.abort()
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 7), "the earlier one's marker")
        for reader in readers:
            assert shown(reader, topic, committed=True) == [(0, "before-0"), (3, "late-0"), (4, "plain-0")]
    finally:
        early.close()
        late.close()


FENCED = {
    # What each client makes of PRODUCER_FENCED or INVALID_PRODUCER_EPOCH.
    "confluent-kafka": {"_FENCED"},
    "kafka-python": {"PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"},
    "aiokafka": {"ProducerFenced"},
}


def test_second_producer_with_the_id_fences_the_first_and_aborts_what_it_left(
    client, readers, new_topic, fresh_name
):
    topic, transactional_id = new_topic(), fresh_name("transactional")
    first = client.transactional(transactional_id)
    second = None
    try:
        first.begin()
        first.send(topic, named("first", 2))
        second = client.transactional(transactional_id)
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 3), "the first one is aborted")
        with pytest.raises(Refused) as refused:
            first.send(topic, named("too late", 1))
            first.commit()
        assert refused.value.reason in FENCED[client.name]
        second.begin()
        assert second.send(topic, named("second", 1)) == [3]
        second.commit()
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 5), "the second one's marker")
        for reader in readers:
            assert shown(reader, topic, committed=True) == [(3, "second-0")]
    finally:
        first.close()
        if second is not None:
            second.close()


def test_commit_of_a_fenced_producer_is_refused(client, readers, new_topic, fresh_name):
    """It sends nothing after it was fenced: the coordinator alone can tell it."""
    topic, transactional_id = new_topic(), fresh_name("transactional")
    first = client.transactional(transactional_id)
    first.begin()
    first.send(topic, named("first", 2))
    second = client.transactional(transactional_id)
    try:
        with pytest.raises(Refused) as refused:
            first.commit()
        assert refused.value.reason in FENCED[client.name]
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 3), "the first one is aborted")
        assert shown(readers[0], topic, committed=True) == []
    finally:
        first.close()
        second.close()


def test_transaction_that_takes_too_long_is_aborted_by_its_coordinator(
    client, readers, new_topic, fresh_name
):
    topic = new_topic()
    producer = client.transactional(fresh_name("transactional"), timeout_ms=2_000)
    try:
        producer.begin()
        producer.send(topic, named("slow", 2))
        # Of two seconds; the client's own would be of one minute.
        marker = "the coordinator's marker"
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, 3), marker, timeout_s=30)
        assert shown(readers[0], topic, committed=True) == []
        with pytest.raises(Refused) as refused:
            producer.commit()
        assert refused.value.reason in FENCED[client.name] | {"INVALID_PRODUCER_EPOCH", "INVALID_TXN_STATE"}
    finally:
        producer.close()


def test_offsets_are_committed_with_the_transaction_or_not_at_all(client, readers, new_topic, fresh_name):
    source, target, group = new_topic(), new_topic(), fresh_name("group")
    readers[0].produce(source, named("in", 6))
    producer = client.transactional(fresh_name("transactional"))

    def committed() -> set[int | None]:
        return {reader.committed(group, source, 0) for reader in readers}

    try:
        producer.begin()
        producer.send(target, named("aborted", 2))
        producer.send_offsets(group, {(source, 0): 2})
        producer.abort()
        assert committed() == {None}

        producer.begin()
        producer.send(target, named("out", 3))
        producer.send_offsets(group, {(source, 0): 3})
        producer.commit()
        wait_until(lambda: readers[0].committed(group, source, 0) == 3, "the offsets with the commit")
        assert committed() == {3}
        assert shown(readers[0], target, committed=True) == [(3, "out-0"), (4, "out-1"), (5, "out-2")]

        producer.begin()
        producer.send_offsets(group, {(source, 0): 6})
        producer.abort()
        assert committed() == {3}
    finally:
        producer.close()


def test_read_committed_group_consumes_each_committed_record_once(readers, new_topic, fresh_name):
    topic, group = new_topic(), fresh_name("group")
    producer = readers[0].transactional(fresh_name("transactional"))
    member = readers[0].member(group, topic, isolation_level="read_committed")
    expected: list[bytes | None] = []
    try:
        for number in range(6):
            records = named(f"t{number}", 3)
            producer.begin()
            producer.send(topic, records)
            if number % 2:
                producer.abort()
            else:
                producer.commit()
                expected += [record.value for record in records]
        wait_until(lambda: len(member.records) >= len(expected), "the committed records arrive")
        member.leave()
        assert [record.value for record in member.records] == expected
        # The last transaction is aborted: the group stands behind the last committed record it was given.
        assert readers[0].committed(group, topic, 0) == 19
    finally:
        producer.close()


def test_aborted_index_serves_readers_of_many_segments_and_producers(readers, new_topic, fresh_name):
    """Interleaved transactions of three producers: the aborted ones differ per producer and offset."""
    topic = new_topic()
    producers = [readers[0].transactional(fresh_name("transactional")) for _ in range(3)]
    expected: list[tuple[int, str]] = []
    try:
        for round_number in range(4):
            written: list[list[tuple[int, str]]] = []
            for number, producer in enumerate(producers):
                producer.begin()
                records = named(f"r{round_number}p{number}", 2)
                offsets = producer.send(topic, records)
                written.append(
                    [(o, (r.value or b"").decode()) for o, r in zip(offsets, records, strict=True)]
                )
            for number, producer in enumerate(producers):
                if (round_number + number) % 2:
                    producer.abort()
                else:
                    producer.commit()
                    expected += written[number]
        end = 4 * 3 * 3
        wait_until(lambda: readers[0].bounds(topic, 0, committed=True) == (0, end), "all markers")
        for reader in readers:
            assert shown(reader, topic, committed=True) == sorted(expected), reader.name
    finally:
        for producer in producers:
            producer.close()
