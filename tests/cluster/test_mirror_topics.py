"""Topics of a mirror between real clusters: found, made like the source's, kept in step, shifted, merged."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

import yaml

from millrace.broker.client.admin import (
    alter_configs,
    create_partitions,
    create_topic,
    describe_topics_configs,
)
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets
from millrace.broker.client.offsets import LATEST
from millrace.broker.client.raw_produce import init_producer_id
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError, TopicAlreadyExists
from millrace.broker.protocol.mirror_positions import decode_value
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.mirror.delivery.checkpoints import decode_key
from millrace.mirror.topics.own_topics import POSITIONS
from tests.cluster.mirror_calls import command
from tests.cluster.mirror_process import send, until
from tests.pairs import Pair, in_pairs
from tests.waiting import DeadlinePassed, patience

# Retention is on in some of these topics: records of another year would not stay.
NOW_MS = int(time.time() * 1000)
# The promise: from a topic's appearance to its first record.
DISCOVERY_S = 5.0


def one(value: bytes) -> bytearray:
    return build_batch([Record(b"k", value, timestamp_ms=NOW_MS)])


async def values(cluster: Cluster, topic: str) -> list[bytes]:
    try:
        return [record.value or b"" async for record in read_topic_to_end(cluster, topic)]
    except KafkaError:
        return []


async def set_configs(cluster: Cluster, topic: str) -> dict[str, str | None]:
    """What the topic itself sets."""
    found = (await describe_topics_configs(cluster, [topic]))[topic]
    return {key: each.value for key, each in found.items() if each.is_set} if isinstance(found, dict) else {}


async def width(cluster: Cluster, topic: str) -> int:
    view = await cluster.metadata([topic], max_age_ms=0)
    return len(view.topics[topic].partitions) if topic in view.topics else 0


@in_pairs("kafka-millrace", "millrace-kafka")
def test_topic_is_made_like_the_source_and_its_settings_follow(pair: Pair) -> None:
    async def story() -> None:
        topic, kept = pair.unique("flights"), {"min.insync.replicas": "1", "compression.type": "producer"}
        mirror = pair.mirror([topic], config_sync={"interval_ms": 500, "exclude": ["segment.ms"]})
        async with pair.source.cluster() as source, pair.target.cluster() as target:

            async def has(wanted: dict[str, str | None]) -> None:
                async def in_step() -> bool:
                    return await set_configs(target, topic) == wanted

                await until(in_step, lambda: f"wanted {wanted}; {mirror.log}")

            settings = {"retention.ms": "86400000", "cleanup.policy": "delete", **kept}
            await create_topic(source, topic, 3, 1, settings)
            await has({"retention.ms": "86400000", "cleanup.policy": "delete"})
            assert await width(target, topic) == 3

            # Changed, added and removed on the source; the target's own are left alone.
            await alter_configs(target, topic, {"segment.ms": "7200000", **kept})
            await alter_configs(
                source,
                topic,
                {"retention.ms": "3600000", "cleanup.policy": "compact,delete", "segment.ms": "1000"},
            )
            own = {"segment.ms": "7200000", **kept}
            await has({"retention.ms": "3600000", "cleanup.policy": "compact,delete", **own})
            await alter_configs(source, topic, {"retention.ms": None, "max.message.bytes": "500000"})
            await has({"cleanup.policy": "compact,delete", "max.message.bytes": "500000", **own})

            # What somebody changed on the target is put right again; each change is written once.
            await alter_configs(target, topic, {"cleanup.policy": "delete"})
            await has({"cleanup.policy": "compact,delete", "max.message.bytes": "500000", **own})
            changes = [
                line for line in mirror.log.splitlines() if "settings changed" in line and topic in line
            ]
            assert len(changes) <= 4, changes

    asyncio.run(story())


@in_pairs("kafka-kafka", "millrace-millrace")
def test_new_topic_and_new_partition_arrive_from_their_first_record(pair: Pair) -> None:
    async def story() -> None:
        running, later = pair.unique("running"), pair.unique("later")
        mirror = pair.mirror([running, later], start=False, discovery_interval_ms=2_000)
        mirror.settings["sources"][0]["start"] = "latest"
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
        mirror.start()
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, running, 1, 1)
            sent: list[bytes] = []
            stop = asyncio.Event()

            async def load() -> None:
                number = 0
                while not stop.is_set():
                    value = b"%d" % number
                    await send(source, running, 0, one(value))
                    sent.append(value)
                    number += 1
                    await asyncio.sleep(0.02)

            async def arrived(topic: str, partition: int) -> bool:
                """Whether a committed record is there."""
                if await width(target, topic) <= partition:
                    return False
                key = (topic, partition)
                return (await target.list_offsets({key: LATEST}, read_committed=True))[key].offset > 0

            took: list[float] = []
            loading = asyncio.create_task(load())
            try:
                await until(lambda: arrived(running, 0), logs_of=[mirror])
                skipped = int((await values(target, running))[0])
                # Not `latest`, and not one record too late: each is produced at once after the creation.
                for topic, partition, make in (
                    (later, 0, lambda: create_topic(source, later, 1, 1)),
                    (running, 1, lambda: create_partitions(source, running, 2)),
                ):
                    await make()
                    await send(source, topic, partition, one(b"first"))
                    began = time.monotonic()
                    await until(lambda t=topic, p=partition: arrived(t, p), logs_of=[mirror])
                    took_s = time.monotonic() - began
                    print(f"{topic}-{partition}: first record after {took_s:.1f} s")
                    took.append(took_s)
            finally:
                stop.set()
                await loading
            wanted = sent[skipped:]

            async def all_there() -> bool:
                return len(await values(target, running)) > len(wanted)

            await until(all_there, logs_of=[mirror])
            assert await values(target, later) == [b"first"]
            assert Counter(await values(target, running)) == Counter([*wanted, b"first"])
            if max(took) >= patience(DISCOVERY_S):
                seconds = " and ".join(f"{each:.1f}" for each in took)
                raise DeadlinePassed(f"first records after {seconds} s, not both within {DISCOVERY_S:.0f}")

    asyncio.run(story())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_start_at_a_time_and_what_is_found_later_from_its_first_record(pair: Pair) -> None:
    async def story() -> None:
        topic, later = pair.unique("timed"), pair.unique("timed-later")
        hour_ms = 3_600_000
        old, middle = NOW_MS - 2 * hour_ms, NOW_MS - hour_ms

        def dated(value: bytes, at_ms: int) -> bytearray:
            return build_batch([Record(b"k", value, timestamp_ms=at_ms)])

        mirror = pair.mirror([topic, later], start=False, config_sync={"enabled": False})
        begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((old + middle) // 2000))
        mirror.settings["sources"][0]["start"] = begin
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 2, 1)
            for value, at_ms in ((b"old", old), (b"middle", middle), (b"new", NOW_MS)):
                await send(source, topic, 0, dated(value, at_ms))
            await send(source, topic, 1, dated(b"nothing so late", old))
            mirror.start()

            async def begun() -> bool:
                parts = [each for each in mirror.status().get("partitions", []) if each["topic"] == topic]
                return sum(each["position"] is not None for each in parts) == 2

            await until(begun, logs_of=[mirror])
            await send(source, topic, 1, dated(b"since", NOW_MS))
            await create_topic(source, later, 1, 1)
            await send(source, later, 0, dated(b"first", old))

            async def all_there() -> bool:
                return len(await values(target, topic)) >= 3 and len(await values(target, later)) >= 1

            await until(all_there, logs_of=[mirror])
            found = [(each.partition, each.value) async for each in read_topic_to_end(target, topic)]
            assert sorted(found) == [(0, b"middle"), (0, b"new"), (1, b"since")]
            assert await values(target, later) == [b"first"]
            told: dict[tuple[str, int], tuple[int, int]] = {}

            async def positions_say_so() -> bool:
                async for record in read_topic_to_end(target, POSITIONS.of(mirror.settings["name"])):
                    if (of := decode_key(record.key)) is not None:  # or a reader's barrier
                        at = decode_value(record.value or b"")
                        told[of.topic, of.partition] = (at.began, at.next_offset)
                return told == {(topic, 0): (1, 3), (topic, 1): (1, 2), (later, 0): (0, 1)}

            # From where on, for whoever must know that the rest was never carried.
            await until(positions_say_so, logs_of=[mirror])

    asyncio.run(story())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_everything_means_never_the_internal_topics(pair: Pair) -> None:
    """Neither the brokers' nor a mirror's, and whoever asked for them is told; what the audit's topic says
    goes along."""

    async def story() -> None:
        first, second, made = pair.unique("plain"), pair.unique("plain-too"), pair.unique("made")
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, first, 1, 1)
            await send(source, first, 0, one(b"first"))
            # Both internal topics are there, with records, before the mirror looks.
            await commit_offsets(source, made, {(first, 0): CommittedOffset(1, -1, "")})
            await init_producer_id(source, made)
            positions = f"millrace.positions.{made}"
            await create_topic(source, positions, 1, 1)
            await send(source, positions, 0, one(b"somebody else's"))
            beats = f"{made}.heartbeats"  # a user's own, perhaps: the name is MirrorMaker 2's
            await create_topic(source, beats, 1, 1)
            await send(source, beats, 0, one(b"a beat"))
            with contextlib.suppress(TopicAlreadyExists):
                await create_topic(source, AUDIT_TOPIC, 1, 1)
            said = Record(f"said/{made}".encode(), b"{}", timestamp_ms=NOW_MS)
            await send(source, AUDIT_TOPIC, 0, build_batch([said]))
            internal = {"__consumer_offsets", "__transaction_state", positions}
            assert internal <= set((await source.metadata(max_age_ms=0)).topics)
            mirror = pair.mirror([], start=False, naming=f"{made}.{{topic}}")
            # Of a server that is shared with other tests: everything but their topics.
            only = rf"(?!{first}$|{second}$|__|{positions}$|{beats}$|{AUDIT_TOPIC}$).*"
            mirror.settings["sources"][0]["topics"] = {"include": [".*"], "exclude": [only]}
            mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
            mirror.start()

            async def carried(topic: str) -> bool:
                return await values(target, f"{made}.{topic}") == [topic.encode()]

            async def is_carried() -> bool:
                return len(await values(target, f"{made}.{first}")) == 1

            await until(is_carried, logs_of=[mirror])
            await create_topic(source, second, 1, 1)
            await send(source, second, 0, one(second.encode()))
            await until(lambda: carried(second), logs_of=[mirror])

            async def audit_goes_along() -> bool:
                keys = [record.key async for record in read_topic_to_end(target, AUDIT_TOPIC)]
                return said.key in keys

            await until(audit_goes_along, logs_of=[mirror])
            there = (await target.metadata(max_age_ms=0)).topics
            assert {name for name in there if made in name} == {
                f"{made}.{topic}" for topic in (first, second)
            }
            status = mirror.status()
            assert {each["topic"] for each in status["partitions"]} == {first, second, AUDIT_TOPIC}
            assert internal | {beats} == {each["topic"] for each in status["internal_topics"]}
            shown = [line for line in command(mirror, "status").splitlines() if "never carried" in line]
            (told,) = [line for line in command(mirror, "check").splitlines() if "never carried" in line]
            for line in (*shown, told):
                for topic in (beats, positions, *internal):
                    assert topic in line
            assert told.startswith("ok ") and "sources[0].topics.include" in told
            mirror.settings["sources"][0]["topics"] = {"include": [beats]}
            mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
            findings = command(mirror, "check").splitlines()
            (named,) = [line for line in findings if "is named in topics.include and never carried" in line]
            assert named.startswith("warning ") and f"{pair.source.name}/{beats}: " in named

    asyncio.run(story())


@in_pairs("millrace-kafka", "kafka-millrace")
def test_partition_offset_and_rename_say_where_records_go(pair: Pair) -> None:
    async def story() -> None:
        topic, renamed = pair.unique("flights"), pair.unique("departures")
        mirror = pair.mirror(
            [topic], start=False, naming={"rename": {f"{pair.source.name}/{topic}": renamed}}
        )
        mirror.settings["sources"][0]["partition_offset"] = 4
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 2, 1)
            # The target's topic is there, with too few partitions.
            await create_topic(target, renamed, 1, 1)
            for partition in range(2):
                await send(source, topic, partition, one(b"%d" % partition))
            mirror.start()

            async def all_there() -> bool:
                return len(await values(target, renamed)) == 2

            await until(all_there, logs_of=[mirror])
            assert await width(target, renamed) == 6
            where = {record.partition: record.value async for record in read_topic_to_end(target, renamed)}
            assert where == {4: b"0", 5: b"1"}
            assert await width(target, topic) == 0

    asyncio.run(story())
