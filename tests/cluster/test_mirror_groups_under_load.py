"""Consumer groups that move while producers write on and the mirror carries: the sync follows them, also past
the mirror's position, and from one leading worker to the next."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition

from tests.cluster.mirror_calls import command
from tests.cluster.mirror_process import MirrorProcess
from tests.cluster.moving_groups import (
    TIMEOUT_S,
    check_read_once,
    committed,
    create,
    everything,
    looker,
    read,
    stable_ends,
    until,
    wait_until_carried,
)
from tests.pairs import End, Pair, in_pairs
from tests.threads import meanwhile
from tests.waiting import Deadline, patience

PARTITIONS = 2
MOVES = 5
PAUSE_S = 0.005


def load(end: End, topic: str) -> AbstractContextManager[None]:
    """Numbered records, one after the other to each partition, as long as the context lasts."""

    def write(is_over: threading.Event) -> None:
        producer = Producer({"bootstrap.servers": end.bootstrap, "linger.ms": 0})
        number = 0
        while not is_over.wait(PAUSE_S):
            for partition in range(PARTITIONS):
                producer.produce(topic, b"%d:%d" % (partition, number), partition=partition)
            number += 1
            producer.flush(patience(TIMEOUT_S))

    return meanwhile(write)


class Moving:
    """One mirror of two workers, and groups that leave its source one after the other."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.topic = pair, pair.unique("load")
        self.topics = {self.topic: PARTITIONS}
        create(pair.source, self.topic, PARTITIONS)
        name = pair.unique("mirror")
        self.workers = [
            pair.mirror(
                [self.topic],
                name=name,
                each_source={"groups": {"include": ["moves-.*"], "interval_ms": 200}},
                group={"session_timeout_ms": 3_000, "rebalance_timeout_ms": 10_000},
            )
            for _ in range(2)
        ]
        self.read: dict[str, list[bytes]] = {}

    def until(self, condition: Any, what: Any = "") -> Any:
        return until(condition, what, logs_of=self.workers)

    @property
    def leader(self) -> MirrorProcess:
        """The worker that leads, as soon as one says so."""
        return self.until(
            lambda: next((each for each in self.workers if each.status().get("leader")), None),
            lambda: str([each.status().get("leader") for each in self.workers]),
        )

    def share(self) -> None:
        """Until both workers carry."""
        self.until(
            lambda: [len(each.status().get("partitions", ())) for each in self.workers] == [1, 1],
            lambda: str([each.status().get("partitions") for each in self.workers]),
        )

    def read_at_source(self, group: str, at_least: int) -> None:
        there = read(self.pair.source, group, self.topics, at_least=at_least)
        self.read.setdefault(group, []).extend(value for _, value in there)

    def read_at_target(self, group: str, at_least: int | None = None) -> None:
        there = read(self.pair.target, group, self.topics, at_least=at_least)
        self.read[group] += [value for _, value in there]

    def state(self, group: str) -> tuple[str, str]:
        """As the leading worker tells it, and why."""
        told = [each for each in self.leader.status().get("groups", ()) if each["group"] == group]
        return (told[0]["state"], told[0].get("reason", "")) if told else ("", "")

    def wait_until_in_step(self, group: str) -> None:
        """At the target it stands before the first record of each partition that it has not read."""
        wanted = {
            (self.topic, partition): b"%d:%d" % (partition, self._read_of(group, partition))
            for partition in range(PARTITIONS)
        }
        self.until(lambda: self._next_records(group) == wanted, lambda: f"{wanted} {self.state(group)}")

    def _read_of(self, group: str, partition: int) -> int:
        return sum(value.startswith(b"%d:" % partition) for value in self.read[group])

    def _next_records(self, group: str) -> dict[tuple[str, int], bytes]:
        """What it would read first at the target, where it has a place there."""
        stands = committed(self.pair.target, group, self.topics)
        found: dict[tuple[str, int], bytes] = {}
        deadline = Deadline(lambda: f"{found} at {stands}", within_s=TIMEOUT_S)
        consumer = looker(self.pair.target)
        try:
            consumer.assign([TopicPartition(*place, offset) for place, offset in stands.items()])
            while len(found) < len(stands):
                deadline.check()
                message = consumer.poll(0.1)
                if message is not None and message.error() is None:
                    found.setdefault((message.topic(), message.partition()), message.value() or b"")
            return found
        finally:
            consumer.close()


@pytest.mark.long
@pytest.mark.safety
@in_pairs("kafka-millrace", "millrace-kafka")
def test_groups_that_move_under_load_read_every_record_once_whoever_leads(pair: Pair) -> None:
    moving = Moving(pair)
    moving.share()
    with load(pair.source, moving.topic):
        moving.until(lambda: min(stable_ends(pair.source, moving.topics).values()) > 20)
        for turn in range(MOVES):
            group = pair.unique("moves")
            moving.read_at_source(group, 20)
            if turn == 0:
                read_past_the_position(moving, group)
            elif turn % 2:
                leader = moving.leader
                leader.kill()  # between two commits of the group
                moving.read_at_source(group, 20)
                moving.wait_until_in_step(group)
                leader.start()
                moving.share()
            moving.read_at_source(group, 20)
            moving.wait_until_in_step(group)
            # It moves, and reads there what has come so far.
            moving.read_at_target(group, 20)
    wait_until_carried(stable_ends(pair.source, moving.topics), *moving.workers)
    carried = [value for _, value in everything(pair.source, moving.topics)]
    for group, values in moving.read.items():
        moving.read_at_target(group)
        check_read_once(values, carried)
        for partition in range(PARTITIONS):
            mine = [each for each in values if each.startswith(b"%d:" % partition)]
            assert mine == [b"%d:%d" % (partition, number) for number in range(len(mine))]


def read_past_the_position(moving: Moving, group: str) -> None:
    """What the mirror has not carried yet has no place: the sync says so, and commits when it has one."""
    paused = f"{moving.pair.source.name}/{moving.topic}"
    command(moving.workers[0], "pause", paused)

    def is_held_up() -> bool:
        moving.read_at_source(group, 20)
        return moving.state(group)[0] == "partly"

    moving.until(is_held_up, lambda: str(moving.state(group)))
    assert "not mirrored yet: the mirror is at " in moving.state(group)[1]
    command(moving.workers[0], "resume", paused)
    moving.wait_until_in_step(group)
    moving.until(lambda: moving.state(group)[0] == "synced", lambda: str(moving.state(group)))
