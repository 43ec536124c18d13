"""A gap in each partition of a topic, of another class each: what the policy of its class makes of it, what
its event says, word for word, and what the audit makes of that.

What each class is, and what a mirror does at it, is in test_mirror_gaps; `truncated` needs a source that is
killed (test_mirror_mortal_servers).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from millrace.audit.producer import AuditedProducer
from millrace.broker.client.admin import alter_configs, create_topic, delete_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import EARLIEST
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.checkpoints import encode_key
from millrace.mirror.topics.own_topics import POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster.audited_topics import WINDOW_MS
from tests.cluster.damaged_batches import damage
from tests.cluster.gap_audit import Fate, Look, look
from tests.cluster.gap_stories import NOW_MS, SKIP, STOP, GapStory, one, wait_until_gone
from tests.cluster.mirror_calls import partitions
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import Pair, in_pairs
from tests.record_deletion import delete_records
from tests.waiting import patience

DAY_MS = 86_400_000
YEAR_2001_MS = 980_000_000_000
MOST_MS = (1 << 63) - 1
ONE_CELL_EACH = 1

WHOLE, EXPIRED, TOO_LARGE, TOO_OLD, TOO_NEW, CORRUPT, LOST = range(7)
"""Partitions, by what becomes of them."""

OWN = ("expired", "recreated", "refused", "position_lost")
"""The classes with a policy of their own; the others go by `default`."""

POLICIES = {
    "own-skip": {"default": "stop", **dict.fromkeys(OWN, "skip")},
    "own-stop": {"default": "skip", **dict.fromkeys(OWN, "stop")},
}


class Met(NamedTuple):
    """A gap that is to be met, of source offsets [first, following); `end` is where its log ends."""

    topic: str
    partition: int
    gap_class: str
    first: int
    following: int
    end: int

    @property
    def place(self) -> tuple[str, int]:
        return self.topic, self.partition

    def is_skipped_by(self, name: str) -> bool:
        policies = POLICIES[name]
        return policies.get(self.gap_class, policies["default"]) == "skip"


class Records:
    """What an audited producer has written to the source, each record as a batch of its own."""

    def __init__(self, pair: Pair) -> None:
        settings = {
            "bootstrap.servers": pair.source.bootstrap,
            "millrace.producer": "feed@src",
            "millrace.window.ms": WINDOW_MS,
            "millrace.report.interval.ms": 3_600_000,
        }
        self._producer = AuditedProducer(settings)
        self._counts: dict[str, int] = {}
        self._numbers: dict[tuple[str, int], list[int]] = {}

    def send(self, topic: str, partition: int, *values: bytes, timestamp_ms: int = NOW_MS) -> None:
        for value in values:
            self._producer.produce(topic, value, b"k", partition=partition, timestamp=timestamp_ms)
            assert self._producer.flush(patience()) == 0
            number = self._counts[topic] = self._counts.get(topic, 0) + 1
            self._numbers.setdefault((topic, partition), []).append(number)

    def numbers(self, place: tuple[str, int], first: int, following: int) -> set[int]:
        """The sequences of the records that were written there at these places in their order."""
        return set(self._numbers[place][first:following])

    def close(self) -> None:
        assert self._producer.close(patience())


async def events_of(cluster: Cluster, mirror: MirrorProcess) -> dict[str, dict[str, Any]]:
    """{key: value} of the gaps that a mirror has told of."""
    begins = f"gap/{mirror.settings['name']}/"
    return {
        record.key.decode(): json.loads(record.value or b"")
        async for record in read_topic_to_end(cluster, "millrace.audit")
        if record.key is not None and record.key.startswith(begins.encode())
    }


async def ids_of(cluster: Cluster, *topics: str) -> dict[str, str]:
    view = await cluster.metadata(topics, max_age_ms=0)
    return {topic: str(view.topics[topic].topic_id) for topic in topics}


async def stands_as_told(name: str, mirror: MirrorProcess, gaps: list[Met]) -> None:
    """Until each partition has passed its gap, or is stopped at it, as the policy of the class says."""

    def shown() -> Iterator[tuple[Any, ...]]:
        found = partitions(mirror)
        for met in gaps:
            row = found.get(met.place, {})
            gap = row.get("gap", {})
            position = row.get("position") if row.get("state") == "running" else None
            yield met.place, row.get("state"), position, gap.get("class"), gap.get("from"), gap.get("to")

    wanted = [
        (met.place, "running", met.end, None, None, None)
        if met.is_skipped_by(name)
        else (met.place, "stopped", None, met.gap_class, met.first, met.following)
        for met in gaps
    ]

    async def is_so() -> bool:
        return list(shown()) == wanted and partitions(mirror)[gaps[0].topic, WHOLE]["lag_records"] == 0

    await until(is_so, lambda: f"{name}: {set(shown()) ^ set(wanted)}", logs_of=[mirror])


@in_pairs("millrace-kafka", "kafka-millrace", "kafka-kafka", "millrace-millrace")
def test_each_class_goes_by_its_own_policy_and_the_audit_knows_of_its_gap(pair: Pair) -> None:
    """Two mirrors of two topics, of which one lets pass what the other stops at. What befalls the partitions
    befalls them while both are down."""
    flights, renewed = pair.unique("flights"), pair.unique("renewed")
    source_name, began_ms = pair.source.name, int(time.time() * 1000)
    gaps = [
        Met(flights, EXPIRED, "expired", 2, 4, 5),
        Met(flights, TOO_LARGE, "too_large", 2, 3, 4),
        Met(flights, TOO_OLD, "refused", 3, 4, 6),
        Met(flights, TOO_NEW, "refused", 3, 4, 6),
        Met(flights, CORRUPT, "corrupt", 2, 3, 4),
        Met(flights, LOST, "position_lost", 0, 4, 4),
        Met(renewed, 0, "recreated", 2, 2, 1),
    ]
    mirrors = {
        name: pair.mirror(
            [flights, renewed],
            start=False,
            naming=f"{name}.{{topic}}",
            gaps=policies,
            config_sync={"enabled": False},
            batches="pass_through",  # so that batches go out behind one that is refused
        )
        for name, policies in POLICIES.items()
    }

    async def carry_what_is_whole(source: Cluster, target: Cluster, records: Records) -> None:
        await create_topic(source, flights, 7, 1, {"message.timestamp.after.max.ms": str(MOST_MS)})
        await create_topic(source, renewed, 1, 1)
        limits = {
            "max.message.bytes": "20000",
            "message.timestamp.before.max.ms": str(DAY_MS),
            "message.timestamp.after.max.ms": str(DAY_MS),
        }
        for name in mirrors:
            await create_topic(target, f"{name}.{flights}", 7, 1, limits)
        for topic, count in ((flights, 7), (renewed, 1)):
            for number in range(count):
                records.send(topic, number, b"0", b"1")

        async def is_carried() -> bool:
            rows = [row for mirror in mirrors.values() for row in partitions(mirror).values()]
            return [row["position"] for row in rows] == [2] * 16

        for mirror in mirrors.values():
            mirror.start()
        await until(is_carried, logs_of=mirrors.values())
        for mirror in mirrors.values():
            assert mirror.terminate() == 0, mirror.log

    async def spoil(source: Cluster, target: Cluster, records: Records) -> Look:
        """Gives what an audit saw of it before."""
        records.send(flights, WHOLE, b"2")
        records.send(flights, EXPIRED, b"2", b"3", b"after")
        records.send(flights, TOO_LARGE, b"L" * 60_000, b"after")
        for number, timestamp_ms in ((TOO_OLD, YEAR_2001_MS), (TOO_NEW, NOW_MS + 2 * DAY_MS)):
            records.send(flights, number, b"2")
            records.send(flights, number, b"3", timestamp_ms=timestamp_ms)
            records.send(flights, number, b"after", b"after that")
        records.send(flights, CORRUPT, b"2", b"after")
        records.send(flights, LOST, b"2", b"3")
        records.send(renewed, 0, b"never carried", b"nor this")
        before = await look(pair, {flights: flights, renewed: renewed}, chunk_offsets=ONE_CELL_EACH)
        await delete_records(source, {(flights, EXPIRED): 4})
        damage(pair, flights, 2, "records", CORRUPT)
        lost = Record(encode_key(SourcePartition(source_name, flights, LOST)), None, timestamp_ms=NOW_MS)
        for mirror in mirrors.values():
            await send(target, POSITIONS.of(mirror.settings["name"]), 0, build_batch([lost]))
        await delete_topic(source, renewed)
        await wait_until_gone(source, renewed)
        await create_topic(source, renewed, 1, 1)
        records.send(renewed, 0, b"new")
        records.close()
        return before

    async def tells_all(name: str, target: Cluster, ids: dict[str, str]) -> None:
        mirror = mirrors[name]
        told = await events_of(target, mirror)
        now_ms = int(time.time() * 1000)
        at_ms = [event.pop("at_ms") for event in told.values()]
        assert all(began_ms <= each <= now_ms for each in at_ms), (began_ms, at_ms, now_ms)
        cluster_id = (await target.metadata([])).cluster_id
        assert cluster_id
        wanted = {}
        for met in gaps:
            fields = (
                mirror.settings["name"],
                source_name,
                met.topic,
                met.partition,
                met.first,
                met.gap_class,
            )
            wanted["/".join(map(str, ("gap", *fields, ids[met.topic])))] = {
                "version": 1,
                "type": "gap",
                "mirror": fields[0],
                "source": source_name,
                "topic": met.topic,
                "partition": met.partition,
                "from": met.first,
                "to": met.following,
                "class": met.gap_class,
                "topic_id": ids[met.topic],
                "target": cluster_id,
                **({"open": True} if met.gap_class == "recreated" else {}),
            }
        assert told == wanted

    def judge(name: str, seen: Look, before: Look, records: Records) -> None:
        """What is not carried is explained where it was ever seen, and a loss were it not for the events."""
        # Each once: those of the other mirror, which are alike, are before another topic.
        known = [(gap.place[1:], gap.cause, gap.from_offset, gap.to_offset) for gap in seen.gaps]
        assert sorted(known) == sorted((met.place, met.gap_class, met.first, met.following) for met in gaps)
        explained: dict[str, set[int]] = {}
        passed, waits = set[int](), set[int]()
        for met in gaps[:-1]:
            first = max(met.first, 2)  # what came before was carried
            in_gap = records.numbers(met.place, first, met.following)
            explained.setdefault(met.gap_class, set()).update(in_gap)
            if met.is_skipped_by(name):
                passed |= in_gap
            else:
                waits |= records.numbers(met.place, met.following, met.end)
        gone = explained["expired"] | explained["corrupt"]
        there = {cause: which for cause, which in explained.items() if not which <= gone}
        assert seen.fate(flights) == Fate(in_flight=waits, unknown=gone, explained=there)
        whole = seen.beside(before, (flights, EXPIRED), (flights, CORRUPT), (renewed, 0))
        assert whole.fate(flights) == Fate(in_flight=waits, explained=explained)
        stops = set().union(*explained.values()) - passed
        assert whole.fate(flights, with_gaps=False) == Fate(missing=passed, in_flight=waits | stops)
        # Its old log held two that were carried and two that were not, and there is a new one.
        never, new = records.numbers((renewed, 0), 2, 4), records.numbers((renewed, 0), 4, 5)
        waits = set() if gaps[-1].is_skipped_by(name) else new
        assert seen.fate(renewed) == Fate(in_flight=waits, unknown=never)
        assert whole.fate(renewed) == Fate(in_flight=waits, explained={"recreated": never})
        assert whole.fate(renewed, with_gaps=False) == Fate(in_flight=waits, missing=never)

    async def story() -> None:
        records = Records(pair)
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await carry_what_is_whole(source, target, records)
            ids = await ids_of(source, flights, renewed)
            before = await spoil(source, target, records)
            for mirror in mirrors.values():
                mirror.start()
            for name, mirror in mirrors.items():
                await stands_as_told(name, mirror, gaps)

                async def nothing_is_tried_in_vain(mirror: MirrorProcess = mirror) -> bool:
                    return mirror.status().get("troubles") == []

                await until(nothing_is_tried_in_vain, lambda mirror=mirror: str(mirror.status()))
                await tells_all(name, target, ids)
            for mirror in mirrors.values():
                assert mirror.terminate() == 0, mirror.log
            for name in mirrors:
                judge(name, await look(pair, {each: f"{name}.{each}" for each in ids}), before, records)

    asyncio.run(story())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_retention_by_time_overtakes_a_paused_mirror(pair: Pair) -> None:
    """Each batch is a segment of its own: by its size, or to Apache Kafka, which takes none that small, by
    the days between their timestamps."""
    days = [9, 8, 7, 6, 5, 4, 3, 0, 0, 0]
    batches = [[one(b"%d" % each, timestamp_ms=NOW_MS - ago * DAY_MS)] for each, ago in enumerate(days)]
    segment = {"segment.bytes": str(len(build_batch(batches[0])))}
    configs = segment if pair.source.kind == "millrace" else {"segment.ms": str(DAY_MS // 24)}
    numbers = [b"%d" % each for each in range(10)]

    async def story() -> None:
        async with GapStory(pair, config={"config_sync": {"enabled": False}}) as gap:
            await gap.create_targets()
            await gap.create_source(**configs)
            await gap.carry_and_pause(batches[0])
            await gap.send(*batches[1:])
            await alter_configs(gap.source, gap.topic, {"retention.ms": str(2 * DAY_MS)})

            async def is_deleted() -> bool:
                key = (gap.topic, 0)
                return (await gap.source.list_offsets({key: EARLIEST}))[key].offset == 7

            await until(is_deleted)
            gap.post("/resume")
            await gap.is_stopped_at("expired", 1, 7)
            await gap.has(SKIP, numbers[0], *numbers[7:])
            await gap.has_skipped("expired", 1, 7)
            gap.skip()
            await gap.has(STOP, numbers[0], *numbers[7:])

    asyncio.run(story())
