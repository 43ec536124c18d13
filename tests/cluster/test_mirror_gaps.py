"""What cannot be carried is written down with exact offsets, and skipped only where the policy, or an
operator, says so. Every class happens for real here, to mirrors that run, between several pairs of clusters.

What needs a source that is killed (`truncated`) is in test_mirror_mortal_servers and in
test_mirror_several_brokers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millrace.broker.client.admin import alter_configs, delete_topic
from millrace.broker.client.offsets import EARLIEST
from millrace.broker.protocol.records import MAX_DECOMPRESSED_SIZE, Record, build_batch
from millrace.mirror.delivery.checkpoints import encode_key
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster.damaged_batches import damage
from tests.cluster.gap_stories import (
    EXACTLY_ONCE,
    NOW_MS,
    SKIP,
    STOP,
    GapStory,
    in_each_delivery,
    one,
    values,
    wait_until_gone,
)
from tests.cluster.mirror_process import send, until
from tests.pairs import Pair, in_pairs
from tests.points.fault import FaultAt
from tests.servers import BrokerProcess

BrokerFactory = Callable[..., BrokerProcess]

NO_SYNC = {"config_sync": {"enabled": False}}
YEAR_2001_MS = 980_000_000_000
DAY_MS = 86_400_000
LEAST_KAFKA_SEGMENT = 1 << 20
GZIP = 1


@in_each_delivery()
@in_pairs("millrace-kafka", "kafka-millrace")
def test_retention_overtakes_a_paused_mirror(pair: Pair, delivery: str) -> None:
    """By size: each batch is a segment of its own, of which the broker's own retention lets seven go. Apache
    Kafka takes no segments of less than a megabyte, so they hold a record of more than half of that there."""
    width = 1 if pair.source.kind == "millrace" else LEAST_KAFKA_SEGMENT * 3 // 5
    number = [(b"%d" % each).ljust(width, b".") for each in range(10)]
    size = len(build_batch([one(number[0])]))
    segment = size if pair.source.kind == "millrace" else LEAST_KAFKA_SEGMENT

    async def story() -> None:
        async with GapStory(pair, delivery, config=NO_SYNC) as gap:
            await gap.create_targets()
            await gap.create_source(**{"segment.bytes": str(segment)})
            await gap.carry_and_pause(number[0])
            await gap.send(*number[1:])

            async def lag_is_seen() -> bool:
                return all(gap.partition(policy).get("lag_records") == 9 for policy in (STOP, SKIP))

            async def lag_is_seen_while_stopped() -> bool:
                return gap.partition(STOP).get("lag_records") == 9

            await until(lag_is_seen, lambda: str(gap.partition(STOP)))

            async def lag_is_measured() -> bool:
                return gap.metric(STOP, "millrace_mirror_lag_records", topic=gap.topic) == 9

            await until(lag_is_measured, lambda: gap.mirrors[STOP].get("/metrics")[1])
            before = gap.partition(STOP)["lag_seconds"]
            await until(lambda: _is_older(gap, before), lambda: str(gap.partition(STOP)))
            await alter_configs(gap.source, gap.topic, {"retention.bytes": str(3 * size)})
            await until(lambda: _begins_at(gap, 7), lambda: "nothing was deleted")
            gap.post("/resume")
            await gap.is_stopped_at("expired", 1, 7)
            await gap.has(SKIP, number[0], *number[7:])
            await gap.has_skipped("expired", 1, 7)
            assert await values(gap.target, f"{STOP}.{gap.topic}") == number[:1]
            # A restart meets the same gap: it is no second event.
            position = gap.partition(STOP)["position"]
            assert gap.mirrors[STOP].terminate() == 0
            gap.mirrors[STOP].start()
            await gap.is_stopped_at("expired", 1, 7)
            assert await gap.events(STOP) == [("expired", 1, 7)]
            assert gap.partition(STOP)["position"] == position
            await until(lag_is_seen_while_stopped, lambda: str(gap.partition(STOP)))
            gap.skip()
            await gap.has(STOP, number[0], *number[7:])
            await gap.has_skipped("expired", 1, 7, STOP)

    asyncio.run(story())


async def _begins_at(gap: GapStory, offset: int) -> bool:
    key = (gap.topic, 0)
    return (await gap.source.list_offsets({key: EARLIEST}))[key].offset == offset


async def _is_older(gap: GapStory, before: float) -> bool:
    return float(gap.partition(STOP).get("lag_seconds", 0)) > before


@in_each_delivery()
@in_pairs("millrace-kafka", "kafka-millrace")
def test_topic_made_again_under_a_running_mirror_is_never_read_at_old_offsets(
    pair: Pair, delivery: str
) -> None:
    """Discovery is slow here, and the new topic outgrows the old position at once: the fetch itself tells."""

    async def story() -> None:
        async with GapStory(pair, delivery, config={"discovery_interval_ms": 30_000}) as gap:
            await gap.create_source()
            await gap.send(b"old 0", b"old 1", b"old 2")
            gap.start()
            for policy in (STOP, SKIP):
                await gap.has(policy, b"old 0", b"old 1", b"old 2")
            await delete_topic(gap.source, gap.topic)
            await wait_until_gone(gap.source, gap.topic)
            await gap.create_source()
            new = [b"new %d" % number for number in range(8)]
            await gap.send(*new)
            await gap.is_stopped_at("recreated", 3, 3)
            await gap.has(SKIP, b"old 0", b"old 1", b"old 2", *new)
            await gap.has_skipped("recreated", 3, 3)
            assert await values(gap.target, f"{STOP}.{gap.topic}") == [b"old 0", b"old 1", b"old 2"]
            gap.skip()
            await gap.has(STOP, b"old 0", b"old 1", b"old 2", *new)
            await gap.has_skipped("recreated", 3, 3, STOP)

    asyncio.run(story())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_topic_made_again_with_records_that_were_never_carried(pair: Pair) -> None:
    """Five of its records wait for a paused mirror when the topic goes: the gap is as long as what was seen
    of it, also when the next start meets it again. A mirror that looks for topics while there is none of the
    name lets go of the partition, and of what it has seen of it; this one looks at its start alone."""

    async def story() -> None:
        async with GapStory(pair, config={"discovery_interval_ms": 600_000}) as gap:
            await gap.create_source()
            old = [b"old 0", b"old 1", b"old 2"]
            await gap.carry_and_pause(*old)
            await gap.send(*(b"never carried %d" % number for number in range(5)))

            async def lag_is_seen() -> bool:
                return all(gap.partition(policy).get("lag_records") == 5 for policy in (STOP, SKIP))

            await until(lag_is_seen, lambda: str([gap.partition(policy) for policy in (STOP, SKIP)]))
            await delete_topic(gap.source, gap.topic)
            await wait_until_gone(gap.source, gap.topic)
            await gap.create_source()
            new = [b"new %d" % number for number in range(4)]
            await gap.send(*new)
            gap.post("/resume")
            await gap.is_stopped_at("recreated", 3, 8)
            await gap.has(SKIP, *old, *new)
            await gap.has_skipped("recreated", 3, 8)
            assert gap.mirrors[STOP].terminate() == 0
            gap.mirrors[STOP].start()
            await gap.is_stopped_at("recreated", 3, 8)
            gap.skip()
            await gap.has(STOP, *old, *new)
            await gap.has_skipped("recreated", 3, 8, STOP)

    asyncio.run(story())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_topic_made_again_before_the_mirror_had_begun_with_it(pair: Pair, fault_at: FaultAt) -> None:
    """It had seen the topic when it died, and no more. Nothing of the old one was carried, which is told."""

    async def story() -> None:
        async with GapStory(pair, config={"group": {"instance_id": "one"}}) as gap:
            await gap.create_source()
            await gap.send(b"old 0", b"old 1")
            for policy in (STOP, SKIP):
                fault = fault_at(gap.mirrors[policy], "first look on record, nothing begun")
                gap.mirrors[policy].start()
                await asyncio.to_thread(fault.wait_until_died)
            await delete_topic(gap.source, gap.topic)
            await wait_until_gone(gap.source, gap.topic)
            await gap.create_source()
            new = [b"new %d" % number for number in range(4)]
            await gap.send(*new)
            gap.start()
            await gap.is_stopped_at("recreated", 0, 0)
            await gap.has(SKIP, *new)
            await gap.has_skipped("recreated", 0, 0)
            gap.stop()  # and its heir meets the same
            gap.mirrors[STOP].start()
            await gap.is_stopped_at("recreated", 0, 0)
            assert await gap.events(STOP) == [("recreated", 0, 0)]
            gap.skip()
            await gap.has(STOP, *new)

    asyncio.run(story())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_topic_made_again_twice_at_one_offset_is_two_gaps(pair: Pair) -> None:
    async def story() -> None:
        async with GapStory(pair) as gap:
            await gap.create_source()
            await gap.send(b"0")
            gap.mirrors[SKIP].start()
            await gap.has(SKIP, b"0")
            for times, value in enumerate((b"1", b"2"), 1):
                await delete_topic(gap.source, gap.topic)
                await wait_until_gone(gap.source, gap.topic)
                await gap.create_source()
                await gap.send(value)
                await gap.has(SKIP, *(b"0", b"1", b"2")[: times + 1])
                await gap.has_skipped("recreated", 1, 1, times=times)

    asyncio.run(story())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_topic_made_again_while_the_mirror_is_down(pair: Pair) -> None:
    async def story() -> None:
        async with GapStory(pair) as gap:
            await gap.create_source()
            await gap.send(b"old 0", b"old 1")
            gap.start()
            for policy in (STOP, SKIP):
                await gap.has(policy, b"old 0", b"old 1")
            gap.stop()
            await delete_topic(gap.source, gap.topic)
            await wait_until_gone(gap.source, gap.topic)
            await gap.create_source()
            new = [b"new %d" % number for number in range(4)]
            await gap.send(*new)
            gap.start()
            met = await gap.is_stopped_at("recreated", 2, 2)
            await gap.has(SKIP, b"old 0", b"old 1", *new)
            await gap.has_skipped("recreated", 2, 2)
            # Another try meets the same gap, and it stays one event.
            gap.post("/retry", STOP)
            await gap.is_stopped_at("recreated", 2, 2, met["at_ms"])
            assert await gap.events(STOP) == [("recreated", 2, 2)]
            gap.skip()
            await gap.has(STOP, b"old 0", b"old 1", *new)

    asyncio.run(story())


@in_each_delivery(long=False)
@in_pairs("millrace-kafka", "kafka-millrace")
def test_record_over_the_targets_limit(pair: Pair, delivery: str) -> None:
    async def story() -> None:
        async with GapStory(pair, delivery, config=NO_SYNC) as gap:
            await gap.create_source()
            await gap.create_targets(max_message_bytes="1000")
            large = b"C" * 5_000
            await gap.send([one(b"A"), one(b"B"), one(large), one(b"D")], b"after")
            gap.start()
            await gap.is_stopped_at("too_large", 2, 3)
            await gap.has(STOP, b"A", b"B")
            await gap.has(SKIP, b"A", b"B", b"D", b"after")
            await gap.has_skipped("too_large", 2, 3)
            # The operator raises the limit, and has the record carried after all.
            await alter_configs(gap.target, f"{STOP}.{gap.topic}", {"max.message.bytes": "20000"})
            gap.post("/retry", STOP)
            await gap.has(STOP, b"A", b"B", large, b"D", b"after")
            await gap.has_skipped("too_large", 2, 3, STOP)

    asyncio.run(story())


@in_each_delivery()
@in_pairs("millrace-kafka", "kafka-millrace")
def test_record_whose_time_the_target_refuses(pair: Pair, delivery: str) -> None:
    async def story() -> None:
        async with GapStory(pair, delivery) as gap:
            await gap.create_source()
            await gap.create_targets(message_timestamp_before_max_ms=str(DAY_MS))
            await gap.send(b"before", [one(b"A"), one(b"B", timestamp_ms=YEAR_2001_MS), one(b"C")], b"after")
            gap.start()
            await gap.is_stopped_at("refused", 2, 3)
            await gap.has(STOP, b"before", b"A")
            await gap.has(SKIP, b"before", b"A", b"C", b"after")
            await gap.has_skipped("refused", 2, 3)
            gap.skip()
            await gap.has(STOP, b"before", b"A", b"C", b"after")
            await gap.has_skipped("refused", 2, 3, STOP)

    asyncio.run(story())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_record_without_a_key_for_a_compacted_topic(pair: Pair) -> None:
    async def story() -> None:
        async with GapStory(pair, config=NO_SYNC) as gap:
            await gap.create_source()
            await gap.create_targets(cleanup_policy="compact")
            keys = (b"1", b"2", None, b"4")
            await gap.send([one(b"v%d" % number, key=key) for number, key in enumerate(keys)])
            gap.start()
            await gap.is_stopped_at("refused", 2, 3)
            await gap.has(STOP, b"v0", b"v1")
            await gap.has(SKIP, b"v0", b"v1", b"v3")
            await gap.has_skipped("refused", 2, 3)
            await alter_configs(gap.target, f"{STOP}.{gap.topic}", {"cleanup.policy": "delete"})
            gap.post("/retry", STOP)
            await gap.has(STOP, b"v0", b"v1", b"v2", b"v3")

    asyncio.run(story())


@in_pairs("kafka-millrace", "kafka-kafka", only=("kafka-millrace", "kafka-kafka"))
def test_each_class_has_a_policy_of_its_own(pair: Pair) -> None:
    """Beside `default`. A batch that its broker stamped (LogAppendTime) is written anew, and the record of
    this one takes more memory than is given to any; Millrace as a source would not have taken it."""
    gaps = {
        STOP: {"default": "skip", "unpacked_too_large": "stop"},
        SKIP: {"default": "stop", "unpacked_too_large": "skip", "too_large": "skip"},
    }
    bomb = build_batch([one(bytes(MAX_DECOMPRESSED_SIZE))], compression=GZIP)
    told = [("corrupt", 4, 5), ("too_large", 3, 4), ("unpacked_too_large", 1, 2)]

    async def story() -> None:
        async with GapStory(pair, gaps=gaps, config=NO_SYNC) as gap:
            await gap.create_source(**{"message.timestamp.type": "LogAppendTime"})
            await gap.create_targets(max_message_bytes="200000")
            await gap.send(b"0")
            await send(gap.source, gap.topic, 0, bomb)
            await gap.send(b"2", b"3" * 300_000, b"4", b"5")
            damage(pair, gap.topic, 4, "records")
            gap.start()
            await gap.is_stopped_at("unpacked_too_large", 1, 2)
            await gap.has(STOP, b"0")
            await gap.has(SKIP, b"0", b"2")
            await gap.is_in_state("stopped", SKIP)
            assert gap.partition(SKIP)["gap"]["class"] == "corrupt"

            async def are_told() -> bool:
                return await gap.events(SKIP) == told

            await until(are_told, logs_of=[gap.mirrors[SKIP]])
            gap.skip()
            await gap.has(STOP, b"0", b"2", b"5")
            assert await gap.events(STOP) == told

    asyncio.run(story())


@in_each_delivery()
@in_pairs("millrace-kafka", "kafka-millrace")
def test_flipped_bit_on_the_sources_disk(pair: Pair, delivery: str) -> None:
    async def story() -> None:
        async with GapStory(pair, delivery) as gap:
            await gap.create_source()
            await gap.send(b"0", [one(b"1"), one(b"2")], b"3", b"4")
            damage(pair, gap.topic, 1, "records")
            gap.start()
            await gap.is_stopped_at("corrupt", 1, 3)
            await gap.has(STOP, b"0")
            await gap.has(SKIP, b"0", b"3", b"4")
            await gap.has_skipped("corrupt", 1, 3)
            damage(pair, gap.topic, 1, "records")  # flipped back: the disk was repaired
            gap.post("/retry", STOP)
            await gap.has(STOP, b"0", b"1", b"2", b"3", b"4")

    asyncio.run(story())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_flipped_bit_in_a_batchs_length(pair: Pair) -> None:
    """Behind it the source itself does not find its batches, so all of them are in the gap, and no more."""

    async def story() -> None:
        async with GapStory(pair) as gap:
            await gap.create_source()
            await gap.send(b"0", b"1", b"2", b"3")
            damage(pair, gap.topic, 1, "length")
            gap.start()
            await gap.is_stopped_at("corrupt", 1, 4)
            await gap.has_skipped("corrupt", 1, 4)
            await gap.send(b"after")
            await gap.has(STOP, b"0")

    asyncio.run(story())


LOW, HIGH = "low bit of the base offset", "high bit of the base offset"


@pytest.mark.parametrize(
    ("is_alone", "damaged", "where"),
    [
        pytest.param(False, 2, LOW, id="beside others, claims another's place"),
        pytest.param(
            False, 2, HIGH, id="beside others, claims to lie behind the log", marks=pytest.mark.long
        ),
        # Alone in its file, it would be passed over by Apache Kafka itself.
        pytest.param(False, 20, LOW, id="beside others, claims a lower place", marks=pytest.mark.long),
        pytest.param(True, 2, LOW, id="alone in its file, claims another's place", marks=pytest.mark.long),
        pytest.param(True, 2, HIGH, id="alone in its file, claims to lie behind the log"),
    ],
)
@in_pairs("millrace-millrace", "kafka-millrace")
def test_flipped_bit_in_a_batchs_base_offset(pair: Pair, is_alone: bool, damaged: int, where: str) -> None:
    """No checksum is over it."""
    is_small = pair.source.kind == "millrace" or not is_alone
    width = 3 if is_small else LEAST_KAFKA_SEGMENT * 3 // 5
    number = [(b"%d" % each).ljust(width, b".") for each in range(24)]
    segment = len(build_batch([one(number[0])])) if is_small else LEAST_KAFKA_SEGMENT
    configs = {"segment.bytes": str(segment)} if is_alone else {}
    others = number[:damaged] + number[damaged + 1 :]

    async def story() -> None:
        async with GapStory(pair, config=NO_SYNC) as gap:
            await gap.create_targets()
            await gap.create_source(**configs)
            await gap.send(*number)
            damage(pair, gap.topic, damaged, where)
            gap.start()
            await gap.is_stopped_at("corrupt", damaged, damaged + 1)
            await gap.has(STOP, *number[:damaged])
            await gap.has(SKIP, *others)
            await gap.has_skipped("corrupt", damaged, damaged + 1)
            await gap.send(b"24")
            await gap.has(SKIP, *others, b"24")

    asyncio.run(story())


@in_each_delivery(long=False)
@in_pairs("millrace-kafka", "kafka-millrace")
def test_lost_positions_topic_is_a_gap_and_never_a_new_start(pair: Pair, delivery: str) -> None:
    lose_position(pair, "all of them", delivery)


@in_pairs("kafka-millrace", "millrace-kafka")
def test_unreadable_position_is_a_gap_and_never_a_new_start(pair: Pair) -> None:
    lose_position(pair, "unreadable")


@in_pairs("millrace-kafka", "kafka-millrace")
def test_removed_position_is_a_gap_and_never_a_new_start(pair: Pair) -> None:
    lose_position(pair, "removed")


def lose_position(pair: Pair, how: str, delivery: str = EXACTLY_ONCE) -> None:
    """The three tests above; they differ in what becomes of the record of the position."""

    async def story() -> None:
        async with GapStory(pair, delivery) as gap:
            await gap.create_source()
            await gap.send(b"0", b"1")
            gap.start()
            for policy in (STOP, SKIP):
                await gap.has(policy, b"0", b"1")
            gap.stop()
            await gap.send(b"2", b"3")
            key = encode_key(SourcePartition(pair.source.name, gap.topic, 0))
            lost = Record(key, b"not a position" if how == "unreadable" else None, timestamp_ms=NOW_MS)
            for mirror in gap.mirrors.values():
                positions = POSITIONS.of(mirror.settings["name"])
                if how == "all of them":
                    # The offset map, too, which knows of them.
                    for topic in (positions, OFFSET_MAP.of(mirror.settings["name"])):
                        await delete_topic(gap.target, topic)
                        await wait_until_gone(gap.target, topic)
                else:
                    await send(gap.target, positions, 0, build_batch([lost]))
            gap.start()
            await gap.is_stopped_at("position_lost", 0, 4)
            await gap.has_skipped("position_lost", 0, 4)
            await gap.send(b"after")
            await gap.has(SKIP, b"0", b"1", b"after")
            # Whoever would rather have records twice than not at all, has it read again from its beginning.
            gap.post("/retry", STOP)
            await gap.has(STOP, b"0", b"1", b"0", b"1", b"2", b"3", b"after")

    asyncio.run(story())
