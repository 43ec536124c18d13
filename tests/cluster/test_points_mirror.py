"""A mirror that dies, or loses its seat, at named points of a transaction, of its beginning or of a takeover:
a read-committed reader of the target sees every record once and in order, and the position says what is
committed. At least once, the point is between the acknowledgement and its position: only what lies behind the
last position comes again."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress

import pytest

from millrace.broker.client import admin
from millrace.broker.client.groups import describe_group
from millrace.broker.client.open_transactions import OpenTransaction, open_transactions
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import UnknownTopicOrPartition
from millrace.mirror.offsets.translation import Answer
from millrace.mirror.topics.own_topics import POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster import mirror_process
from tests.cluster.fed_workers import (
    GROUP,
    PARTITIONS,
    Feed,
    check,
    finish,
    owners,
    seen,
    until_flowing,
    until_grown,
    until_shared,
)
from tests.cluster.mirror_process import MirrorProcess, end_offset
from tests.cluster.moving_groups import map_translations
from tests.cluster.test_mirror_exactly_once import stopped_in_a_transaction
from tests.cluster.transactional import create_topic, known_ids, read
from tests.pairs import Pair, in_pairs
from tests.points.fault import FaultAt, until
from tests.raw_client import RawClient, batch_of

pytestmark = pytest.mark.safety

COUNT = 30
ALL = 1_000_000
SHORT_SESSION = {"session_timeout_ms": 1_500, "rebalance_timeout_ms": 10_000}
# No session ends meanwhile: that, too, would repeat records, or write a position once more.
AT_EASE = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 10_000}
BY_NAME = AT_EASE | {"instance_id": "one"}
ACKNOWLEDGED = "acknowledged at least once, position not written"
NAMED = {"instance_id": "one"}  # it waits for no session to end


def values(pair: Pair, topic: str, isolation: str = "read_committed") -> list[bytes]:
    return read(pair.target.server, topic, ALL, isolation=isolation)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def position(pair: Pair, mirror: str, topic: str) -> int:
    """Where the positions topic, read committed, says that the mirror is."""

    async def last() -> int:
        found = 0
        async with pair.target.cluster() as target:
            with suppress(UnknownTopicOrPartition):  # the mirror has not made it yet
                async for record in read_topic_to_end(target, POSITIONS.of(mirror)):
                    if record.value and json.loads(record.key or b"{}").get("topic") == topic:
                        found = int(json.loads(record.value)["next_offset"])
        return found

    return asyncio.run(last())


def at_position(offset: int) -> str:
    """The writing of this position, for `only`."""
    return f'"next_offset":{offset},'


def produce(pair: Pair, topic: str, first: int) -> int:
    """Sends COUNT more to the source; how many there are now."""
    with RawClient(pair.source.server.port) as client:
        for start in range(first, first + COUNT, 10):
            named = (b"%d" % number for number in range(start, start + 10))
            batch = batch_of(*named, timestamp_ms=time.time_ns() // 1_000_000)
            (answer,) = client.produce({(topic, 0): batch}, acks=-1)
            assert (answer.error_code, answer.base_offset) == (0, start)
    return first + COUNT


def begin(pair: Pair) -> tuple[str, str]:
    """A new topic at the source, and the name of a mirror of it."""
    topic = pair.unique("points")
    create_topic(pair.source.server, topic)
    return topic, pair.unique("mirror")


def has_carried(pair: Pair, mirror: str, topic: str, wanted: list[bytes]) -> None:
    """Waits until this is there, nothing else and each once, and then until the position is its end."""
    until(lambda: len(values(pair, topic)) >= len(wanted), "all is carried")
    assert values(pair, topic) == wanted
    end = int(wanted[-1]) + 1
    until(lambda: position(pair, mirror, topic) == end, "the position is the end")


def open_on(pair: Pair, topic: str) -> list[OpenTransaction]:
    """The transactions that have written to partition 0 and are not over."""

    async def look() -> list[OpenTransaction]:
        async with pair.target.cluster() as target:
            return await open_transactions(target, topic, 0)

    return asyncio.run(look())


def has_ongoing(pair: Pair, mirror: str) -> bool:
    """Whether a coordinator takes more for a transaction of the mirror."""

    async def look() -> bool:
        async with pair.target.cluster() as target:
            known = await known_ids(target, f"millrace.{mirror}.")
            return any(each.state == "Ongoing" for each in known.values())

    return asyncio.run(look())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_mirror_dies_at_each_point_of_a_transaction_and_every_record_is_there_once(
    pair: Pair, fault_at: FaultAt
) -> None:
    topic, name = begin(pair)
    # Known by its name: it need not wait for the session of its predecessor.
    mirror = pair.mirror([topic], start=False, name=name, group=NAMED)
    sent = 0
    for point, nth, is_open in (
        ("records acknowledged, positions not written", 2, True),
        ("partitions added, nothing sent", 1, True),
        ("batches in the target's log, their answer not taken", 1, True),
        ("positions written, fence not asked", 1, True),
        ("fence passed, end not asked for", 1, True),
        ("end answered, lane not told", 1, False),
        ("barrier written, positions not read", 1, False),
    ):
        fault = fault_at(mirror, point, nth=nth)
        sent = produce(pair, topic, sent)
        mirror.start()
        fault.wait_until_died()
        until(lambda want=is_open: has_ongoing(pair, name) is want, f"{point}: open: {is_open}")
    mirror.start()
    has_carried(pair, name, topic, numbers(sent))


@in_pairs("millrace-millrace", "kafka-kafka")
def test_mirror_dies_at_the_first_position_of_a_partition_and_begins_where_it_would_have(
    pair: Pair, fault_at: FaultAt
) -> None:
    """It starts with the latest record. What has come since it first looked is carried, whether it came to
    put down where it begins or not."""
    topic, name = begin(pair)
    mirror = pair.mirror([topic], start=False, name=name, group=NAMED, each_source={"start": "latest"})
    sent = produce(pair, topic, 0)
    for point in (
        "records acknowledged, positions not written",
        "positions written, fence not asked",
        "fence passed, end not asked for",
        "first position on record, its mark not",
    ):
        fault = fault_at(mirror, point, nth=1)
        mirror.start()
        fault.wait_until_died()
        begun = COUNT if "on record" in point else 0
        until(lambda want=begun: position(pair, name, topic) == want, f"{point}: its position is {begun}")
        sent = produce(pair, topic, sent)
    mirror.start()
    has_carried(pair, name, topic, numbers(sent)[COUNT:])


@in_pairs("millrace-kafka", "millrace-millrace")
def test_mirror_whose_session_ends_between_positions_and_fence_is_refused_and_carries_again(
    pair: Pair, fault_at: FaultAt
) -> None:
    """Nobody else is there who would begin a new epoch of its producer: only the fence is in its way."""
    topic, name = begin(pair)
    sent = produce(pair, topic, 0)
    mirror = pair.mirror([topic], start=False, name=name, group=SHORT_SESSION)
    fault = fault_at(mirror, "positions written, fence not asked", "wait")
    mirror.start()
    fault.wait_until_reached()
    until(lambda: members(pair, name) == 0, "the group has no member any more")
    assert open_on(pair, topic)
    fault.go()
    has_carried(pair, name, topic, numbers(sent))
    # Once in the transaction that was refused, and once more when the worker had a seat again.
    assert values(pair, topic, "read_uncommitted") == numbers(sent) * 2


@in_pairs("millrace-millrace", "kafka-kafka")
def test_leader_dies_when_it_has_fenced_a_worker_that_left_and_the_next_one_fences_both(
    pair: Pair, fault_at: FaultAt
) -> None:
    """Nothing that the dead worker had was given to anybody, nor has any other heard of it."""
    topic, name = pair.unique("points"), pair.unique("mirror")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            leader, victim, heir = workers = [
                pair.mirror([topic], start=False, name=name, group=GROUP) for _ in range(3)
            ]
            fault = fault_at(leader, "workers that left are fenced, their work not shared out")
            for worker in workers:  # the first leads

                async def has_a_seat(worker: MirrorProcess = worker) -> bool:
                    return " assigned" in worker.log

                worker.start()
                await mirror_process.until(has_a_seat, logs_of=workers)
            # Not before: who joins where partitions move is not known by its slot in the next round, and the
            # one that it was given is fenced.
            await admin.create_topic(source, topic, PARTITIONS, 1)
            await until_shared(workers)
            feed = Feed(source, topic)
            await until_flowing(target, feed, workers)
            lost = next(iter((await owners([victim]))[0]))
            left_open = await stopped_in_a_transaction(target, feed, lost, victim)
            victim.kill()
            await asyncio.to_thread(fault.wait_until_died)
            assert not set(left_open) & set(await open_transactions(target, topic, lost))
            check(await seen(target, topic))
            await until_shared([heir])
            await until_grown(target, feed, lost, 100, heir)
            assert re.search(r"fenced earlier holders of slots  slots=\S*\d, \d", heir.log), heir.log
            await finish(target, feed, [heir])

    asyncio.run(story())


@in_pairs("kafka-kafka", "millrace-millrace")
def test_mirror_that_was_replaced_between_acknowledgement_and_positions_commits_nothing(
    pair: Pair, fault_at: FaultAt
) -> None:
    topic, name = begin(pair)
    sent = produce(pair, topic, 0)
    mirror = pair.mirror([topic], start=False, name=name, group=SHORT_SESSION)
    fault = fault_at(mirror, "records acknowledged, positions not written", "wait")
    mirror.start()
    fault.wait_until_reached()
    pair.mirror([topic], name=name, group=SHORT_SESSION)
    until(lambda: len(values(pair, topic)) == sent, "the heir has carried all")
    fault.go()
    until(lambda: members(pair, name) == 2, "both are members")
    sent = produce(pair, topic, sent)
    has_carried(pair, name, topic, numbers(sent))


@in_pairs("kafka-kafka", "millrace-millrace")
def test_at_least_once_a_mirror_that_dies_before_its_position_is_written_repeats_from_the_last_one(
    pair: Pair, fault_at: FaultAt
) -> None:
    topic, name = begin(pair)
    mirror = pair.mirror([topic], start=False, name=name, delivery="at_least_once", group=BY_NAME)
    fault = fault_at(mirror, ACKNOWLEDGED, only=at_position(2 * COUNT))
    mirror.start()
    sent = produce(pair, topic, 0)
    until(lambda: position(pair, name, topic) == sent, "the first position is written", logs_of=[mirror])
    sent = produce(pair, topic, sent)
    fault.wait_until_died()
    assert values(pair, topic) == numbers(sent)
    last = position(pair, name, topic)
    assert COUNT <= last < sent
    mirror.start()
    until(lambda: position(pair, name, topic) == sent, "the position is the end", logs_of=[mirror])
    assert values(pair, topic) == numbers(sent) + numbers(sent)[last:]
    carried = values(pair, topic)
    sent = produce(pair, topic, sent)
    until(lambda: position(pair, name, topic) == sent, "it goes on", logs_of=[mirror])
    assert values(pair, topic) == carried + numbers(sent)[-COUNT:]


@in_pairs("millrace-millrace", "kafka-kafka")
def test_at_least_once_a_frozen_mirror_does_not_turn_its_heirs_position_back(
    pair: Pair, fault_at: FaultAt
) -> None:
    """It is about to write its own when it wakes, and has not heard yet that its seat is lost."""
    topic, name = begin(pair)
    sent = produce(pair, topic, 0)
    frozen = pair.mirror([topic], start=False, name=name, delivery="at_least_once", group=SHORT_SESSION)
    fault = fault_at(frozen, ACKNOWLEDGED, "wait", only=at_position(sent))
    frozen.start()
    fault.wait_until_reached()
    heir = pair.mirror([topic], name=name, delivery="at_least_once", group=AT_EASE)
    sent = produce(pair, topic, sent)
    until(lambda: position(pair, name, topic) == sent, "the heir's position is the end", logs_of=[heir])
    fault.go()
    until(lambda: members(pair, name) == 2, "both are members", logs_of=[frozen])
    assert position(pair, name, topic) == sent


def end_of_positions(pair: Pair, mirror: str) -> int:
    """Behind all that was ever written there, committed or not."""

    async def look() -> int:
        async with pair.target.cluster() as target:
            return await end_offset(target, POSITIONS.of(mirror), 0)

    return asyncio.run(look())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_mirror_at_least_once_dies_around_its_offset_map_and_every_offset_leads_to_a_copy(
    pair: Pair, fault_at: FaultAt
) -> None:
    """From there on nothing is left out of what comes behind the offset."""
    topic, name = begin(pair)
    mirror = pair.mirror([topic], start=False, name=name, delivery="at_least_once", group=NAMED)
    sent = 0
    for point, only in (
        ("acknowledged at least once, offset map not written", None),
        (ACKNOWLEDGED, r'"next_offset":[1-9]'),
    ):
        fault = fault_at(mirror, point, only=only)
        sent = produce(pair, topic, sent)
        mirror.start()
        fault.wait_until_died()
        assert position(pair, name, topic) == 0
    mirror.start()
    sent = produce(pair, topic, sent)
    until(lambda: position(pair, name, topic) == sent, "all is carried, and on record")
    copies = copies_of(pair, topic)
    assert copies.keys() == set(range(sent))
    assert len(copies[0]) == 3, "what a map speaks of was acknowledged each time"
    partition = SourcePartition(pair.source.name, topic, 0)
    for offset, found in enumerate(map_translations(pair.target, name, partition, sent)):
        assert found.answer is Answer.EXACT and found.target is not None
        if offset < sent:
            assert found.target in copies[offset], offset
        assert all(copies[number][-1] >= found.target for number in range(offset, sent)), offset
    assert found.target == copies[sent - 1][-1] + 1


def copies_of(pair: Pair, topic: str) -> dict[int, list[int]]:
    """The target offsets of each number, in order."""

    async def look() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async with pair.target.cluster() as target:
            async for record in read_topic_to_end(target, topic):
                found.setdefault(int(record.value or b"-1"), []).append(record.offset)
        return found

    return asyncio.run(look())


def members(pair: Pair, mirror: str) -> int:
    """How many workers the mirror's group has."""

    async def look() -> int:
        async with pair.target.cluster() as target:
            return len((await describe_group(target, f"millrace-mirror.{mirror}")).members)

    return asyncio.run(look())
