"""A world for the audit: clusters whose logs are bytes, producers, mirrors, consumer groups, and what befalls
them. The truth is kept beside it, record by record, in plain Python, and knows nothing of the audit's code.

Used by `test_audit_mutations`; read by `audit_oracle` (what should be said) and shown to the product by
`audit_capture` (what a capture sees). Everything random comes from `World.rng`.
"""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from millrace.audit.contract.event_values import GapEvent
from millrace.audit.contract.events import Event, decode_event
from millrace.broker.protocol.mirror_positions import Position, encode_key, encode_value
from tests.simulation.audit_groups import Group, stands_at
from tests.simulation.audit_logs import LEASE_MS, NO_IDENTITY, Log, Rec, Sent
from tests.simulation.audit_producers import CountingProducer, Producer


@dataclass
class Lane:
    """A mirror's way from one source log into an aggregate."""

    carried: int = 0
    told: int | None = None
    topic_id: str = ""
    told_id: str = ""
    told_epoch: int = -1
    cuts_seen: int = 0
    told_cuts: int = 0


class Mirror:
    """Carries all topics of its sources into one aggregate; `foreign` ones tell nothing."""

    def __init__(self, world: World, aggregate: str, sources: Sequence[str], foreign: bool):
        self.world, self.aggregate, self.sources, self.foreign = world, aggregate, sources, foreign
        share = sources if list(sources) != world.sources else ()
        self.name = "-".join(["m", aggregate, *share])
        self.lanes: dict[tuple[str, str, int], Lane] = {}
        self.gaps: dict[tuple[str, str, int], dict[tuple[str, int], int]] = {}

    def logs(self) -> list[Log]:
        return [log for name in self.sources for log in self.world.cluster_logs(name)]

    def carry(self, all_of_it: bool = False) -> None:
        """Every lane a little further, or to the end."""
        for log in self.logs():
            lane = self.lanes.setdefault(log.place, Lane(topic_id=str(log.topic_id)))
            if lane.topic_id != str(log.topic_id):
                lane.carried, lane.topic_id, lane.cuts_seen = 0, str(log.topic_id), 0
            lane.carried = min([lane.carried, *log.cuts[lane.cuts_seen :]])
            lane.cuts_seen = len(log.cuts)
            end = (
                log.stable_end
                if all_of_it
                else self.world.rng.randint(min(lane.carried, log.stable_end), log.stable_end)
            )
            if end > lane.carried:
                self._carry(log, lane, end)
            if all_of_it or self.world.rng.random() < 0.8:
                self._tell(log, lane)

    def begin(self) -> None:
        """Tell where it stands, which is at the start."""
        for log in self.logs():
            self._tell(log, self.lanes.setdefault(log.place, Lane(topic_id=str(log.topic_id))))

    def restart(self) -> None:
        """What was carried and not told is carried again."""
        self.world.note("mirror restarted")
        for lane in self.lanes.values():
            if lane.told is not None and not self.foreign:
                lane.carried = min(lane.carried, lane.told)
                lane.cuts_seen = min(lane.cuts_seen, lane.told_cuts)

    def position(self, log: Log) -> tuple[int, str] | None:
        """(next offset, topic id) as told."""
        lane = self.lanes.get(log.place)
        return None if lane is None or lane.told is None or self.foreign else (lane.told, lane.told_id)

    def epoch_of(self, log: Log) -> int:
        """The leader epoch that was told with it."""
        return self.lanes[log.place].told_epoch

    def stands(self, log: Log) -> tuple[int, str] | None:
        """(next offset, topic id) of the position, as far as this log is the one that it was told of."""
        position = self.position(log)
        if position is None or position[1] != str(log.topic_id):
            return position
        lane = self.lanes[log.place]
        return stands_at(log, position[0], lane.told_epoch, log.cuts[lane.told_cuts :]), position[1]

    def _tell(self, log: Log, lane: Lane) -> None:
        lane.told, lane.told_id = lane.carried, lane.topic_id
        lane.told_epoch, lane.told_cuts = log.epoch_before(lane.carried), lane.cuts_seen

    def _carry(self, log: Log, lane: Lane, end: int) -> None:
        rng, world = self.world.rng, self.world
        copies = list(log.visible(lane.carried, end))
        gap = (0, 0)
        if not self.foreign and rng.random() < world.gapping and end - lane.carried > 1:
            first = rng.randint(lane.carried, end - 1)
            gap = (first, rng.randint(first + 1, end))
            world.note("gap")
            # The newest word of what begins there: who tells less now has carried the rest this time.
            self.gaps.setdefault(log.place, {})[lane.topic_id, gap[0]] = gap[1]
            where = (log.cluster, log.name, log.partition)
            event = GapEvent(self.name, *where, *gap, "oversized", world.now_ms, topic_id=lane.topic_id)
            world.publish(event, log.cluster, surely=True)
        # What a gap names may come after all: refused, tried again with another limit, and taken.
        takes_some = gap != (0, 0) and world.tries_gaps_again and world.in_gaps.random() < 0.5
        moved: list[Rec] = []
        for copy in copies:
            if not gap[0] <= copy.offset < gap[1]:
                moved += self._fate(copy.rec)
            elif takes_some and world.in_gaps.random() < 0.5:
                world.note("in a gap and there")
                moved.append(copy.rec)
        if rng.random() < world.reorder and not self.foreign:
            world.note("reordered")
            rng.shuffle(moved)
        target = world.logs_of(self.aggregate, world.name_at(self.aggregate, log.name))
        log_to = target[log.partition % len(target)]
        append_ms = world.now_ms if world.log_append else None
        while moved:
            count = rng.randint(1, 12)
            part, moved = moved[:count], moved[count:]
            log_to.append(part, append_ms=append_ms)
        lane.carried = end

    def _fate(self, rec: Rec) -> list[Rec]:
        rng, world = self.world.rng, self.world
        if rng.random() < world.drop:
            world.note("lost by mirror")
            return []
        if rng.random() < world.corrupt:
            return [self._corrupted(rec)]
        if rng.random() < world.repeat:
            world.note("repeated by mirror")
            return [rec, rec]
        return [rec]

    def _corrupted(self, rec: Rec) -> Rec:
        rng, world = self.world.rng, self.world
        kind = rng.choice(("content", "content", "identity", "stream", "sequence", "time"))
        world.note(f"corrupt {kind}")
        if kind == "content":
            return replace(rec, content=rec.content ^ 1)
        if kind == "identity":
            return replace(rec, stream=NO_IDENTITY)
        if kind == "stream":
            return replace(rec, stream=f"ffff{rng.getrandbits(48):012x}")
        if kind == "sequence":
            changed = replace(rec, sequence=rec.sequence ^ (1 << rng.randint(0, 4)) or 1)
            world.renumbered.add((changed.stream, changed.sequence, changed.window))
            return changed
        return replace(rec, created_ms=rec.created_ms ^ 1 << rng.randint(10, 12))


@dataclass
class Topics:
    """The names of one scenario: audited topics, and what the aggregates call them."""

    audited: list[str]
    renamed: dict[str, str] = field(default_factory=dict)


class World:
    """One scenario. `step` does something; `quiesce` lets everything come to rest."""

    def __init__(self, seed: int, folder: Path):
        rng = self.rng = random.Random(seed)
        self.folder = folder
        self.kinds: Counter[str] = Counter()
        self.now_ms = 1_000_000
        chance = rng.choice
        quiet = rng.random() < 0.25  # some worlds are without any fault: they must be PROVEN
        rate = (lambda *values: 0) if quiet else (lambda *values: chance(values))  # type: ignore[misc]
        self.quiet, self.tells_epochs = quiet, True
        self.loss_at_source, self.double_at_source = rate(0, 0, 0.02), rate(0, 0, 0.02)
        self.drop, self.repeat = rate(0, 0, 0.02, 0.3, 1.0), rate(0, 0, 0.03)
        self.corrupt, self.gapping = rate(0, 0, 0.03), rate(0, 0, 0.2)
        self.group_drop = rate(0, 0, 0.02)
        self.lose_events, self.unsure = rate(0, 0, 0, 0.1, 0.6), chance((0, 0.04))
        self.calm = quiet or rng.random() < 0.4
        self.reorder = chance((0, 0.3))
        self.backdating, self.journaled = chance((0, 0, 0.5)), chance((0, 0.5))
        self.transactions, self.log_append = rng.random() < 0.3, rng.random() < 0.3
        self.content = rng.random() < 0.3
        self.counting = chance((0, 0, 0.4))
        self.sources = ["ewr"] if rng.random() < 0.7 else ["ewr", "jfk"]
        self.aggregates = ["agg"] if rng.random() < 0.75 else ["agg", "lax"]
        self.racing, self.late_positions = rng.random() < 0.1, rng.random() < 0.08
        self.topics = Topics(["flights"])
        if rng.random() < 0.25:
            merged = {"flights": "all", "hotels": "all"}
            self.topics = Topics(["flights", "hotels"], merged if rng.random() < 0.6 else {"flights": "f"})
        self.logs: dict[tuple[str, str], list[Log]] = {}
        for cluster in self.sources:
            for topic in self.topics.audited:
                self.make_topic(cluster, topic, rng.randint(1, 3))
        for cluster in self.aggregates:
            for name in sorted({self.name_at(cluster, topic) for topic in self.topics.audited}):
                self.make_topic(cluster, name, rng.randint(1, 3))
        foreign = not self.topics.renamed and rng.random() < 0.15
        # Luck of its own, so that the other scenarios are what they were.
        apart = len(self.sources) > 1 and random.Random(f"mirrors of {seed}").random() < 0.5
        shares = [[source] for source in self.sources] if apart else [self.sources]
        self.mirrors = [
            Mirror(self, aggregate, share, foreign) for aggregate in self.aggregates for share in shares
        ]
        self.foreign = foreign
        for mirror in self.mirrors if not self.late_positions else ():
            mirror.begin()
        self.groups: list[Group] = []
        if rng.random() < 0.35:
            self.groups.append(Group(self, chance([*self.aggregates, *self.sources]), "readers"))
        self.producers: list = []
        self.transactions_open: list[tuple] = []
        self.produced_count = 0
        self.sent: list[Sent] = []
        self.audit_has_looked = False
        self.acknowledged: dict[str, list[Rec]] = {}
        self.topic_of: dict[str, str] = {}
        self.name_of: dict[str, str] = {}
        self.members: dict[str, int] = {}
        self.waiving = random.Random(0)
        # Luck of its own, too: some aggregates lose a disk, or a topic of theirs is made anew.
        self.below = random.Random(f"aggregates of {seed}")
        self.loses_below = not self.calm and not self.racing and self.below.random() < 0.35
        self.vanished_below: Counter[tuple[str, str, int]] = Counter()  # cluster, stream, sequence
        self.in_gaps = random.Random(0)
        self.tries_gaps_again = False
        self.upkeep = random.Random(0)
        self.keep_ms: int | None = None
        self.shortened: set[tuple[str, str, int, str]] = set()  # partition and topic id
        self.renumbered: set[tuple[str, int, int]] = set()  # stream, number it got on the way, window
        for what, on in (
            ("merged by rename", "all" in self.topics.renamed.values()),
            ("several aggregates", len(self.aggregates) > 1),
            ("several sources", len(self.sources) > 1),
            ("several mirrors of one aggregate", apart),
            ("foreign mirror", foreign),
            ("online group", bool(self.groups)),
            ("LogAppendTime", self.log_append),
            ("content digests", self.content),
            ("clock skew or back-dating", bool(self.backdating)),
            ("quiet", quiet),
        ):
            if on:
                self.note(what)

    def note(self, kind: str) -> None:
        self.kinds[kind] += 1

    def make_topic(self, cluster: str, name: str, partitions: int, luck: random.Random | None = None) -> None:
        topic_id = uuid.UUID(int=(luck or self.rng).getrandbits(128))
        self.logs[cluster, name] = [
            self._new_log(cluster, name, number, topic_id) for number in range(partitions)
        ]

    def _new_log(self, cluster: str, name: str, number: int, topic_id: uuid.UUID) -> Log:
        log = Log(cluster, name, number, topic_id)
        log.epochs = [(0, 0)] if self.tells_epochs else []
        return log

    def name_at(self, cluster: str, topic: str) -> str:
        return self.topics.renamed.get(topic, topic) if cluster in self.aggregates else topic

    def logs_of(self, cluster: str, name: str) -> list[Log]:
        return self.logs[cluster, name]

    def cluster_logs(self, cluster: str) -> list[Log]:
        return [log for (where, _), logs in self.logs.items() if where == cluster for log in logs]

    def mirror_of(self, aggregate: str, source: str) -> Mirror:
        """The one that carries this source's records there."""
        (found,) = (m for m in self.mirrors if m.aggregate == aggregate and source in m.sources)
        return found

    def source_logs(self) -> list[Log]:
        return [log for cluster in self.sources for log in self.cluster_logs(cluster)]

    def write(self, cluster: str, topic: str, rec: Rec) -> None:
        log = self.rng.choice(self.logs_of(cluster, topic))
        if log.open_pid >= 0 and self.rng.random() < 0.5:
            log = self.logs_of(cluster, topic)[0]
        if self.corrupt and self.rng.random() < self.corrupt / 3:
            self.note("corrupt identity at source")
            rec = replace(rec, stream=NO_IDENTITY)
        log.append([rec])

    def publish(self, event: Event, cluster: str, *, surely: bool = False) -> None:
        """The events topic takes it; it may lose it all the same."""
        lost = not surely and self.rng.random() < self.lose_events
        if lost:
            self.note("event lost")
        self.sent.append(Sent(event, cluster, lost))

    def told_in(self, cluster: str, first: int = 0) -> list[tuple[bytes, bytes]]:
        """The records of a cluster's events topic, from the first event on, of any cluster, that was sent."""
        return [each.record for each in self.sent[first:] if each.where == cluster and not each.lost]

    def publish_owed(self, producer: Producer, owed: dict[str, str]) -> None:
        for value in owed.values():
            event = decode_event(value.encode())
            assert event is not None
            self.publish(event, producer.cluster)

    def step(self) -> None:
        """One random thing happens."""
        rng = self.rng
        self.now_ms += rng.randint(0, 300)
        acts: list[tuple[float, Callable[[], None]]] = [
            (8, self._produce), (8, self._settle), (3, self._report), (6, self._mirror), (1, self._end),
            (2, self._end_some_transaction), (3, self._consume),
        ]  # fmt: skip
        if not self.calm:
            acts += [
                (0.7, self._restart_mirror), (0.5, self._expire), (0.3, self._recreate),
                (0.3, self._add_partition),
                (0.5, self._kill), (0.4, self._restart_group), (0.2, self._delete_records),
                (0.4, self._shorten),
            ]  # fmt: skip
        rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        if self.loses_below and self.below.random() < 0.06:
            self.below.choice((self._shorten_below, self._recreate_below))()

    def quiesce(self) -> None:
        """All producers close or die, mirrors and groups come to the end, the grace passes."""
        for each in list(self.transactions_open):
            self.end_transaction(each, True)
        for producer in list(self.producers):
            producer.settle()
            if not self.quiet and self.rng.random() < 0.15:
                producer.kill()
            else:
                producer.close()
        for mirror in self.mirrors:
            mirror.carry(all_of_it=True)
        for group in self.groups:
            group.step(all_of_it=True)
        self.now_ms += 2 * LEASE_MS + 100_000
        self.note("quiesced")

    def _produce(self) -> None:
        rng = self.rng
        if not self.producers or (rng.random() < 0.1 and self.produced_count < 5):
            self.produced_count += 1
            cluster, topic = rng.choice(self.sources), rng.choice(self.topics.audited)
            make = (
                (lambda *a: CountingProducer(*a))
                if rng.random() < self.counting
                else (lambda *a: Producer(*a, self.folder))
            )
            self.producers.append(make(self, cluster, topic, self.produced_count))
            self.topic_of[self.producers[-1].stream] = topic
            self.name_of[self.producers[-1].stream] = self.producers[-1].name
        rng.choice(self.producers).produce()

    def _settle(self) -> None:
        if self.producers:
            self.rng.choice(self.producers).settle()

    def _report(self) -> None:
        for producer in self.producers:
            producer.report()

    def _mirror(self) -> None:
        self.rng.choice(self.mirrors).carry()

    def _end(self) -> None:
        if self.producers:
            self.rng.choice(self.producers).close()
            self.note("producer closed")

    def _kill(self) -> None:
        if self.producers:
            self.rng.choice(self.producers).kill()

    def _consume(self) -> None:
        for group in self.groups:
            group.step()

    def _restart_mirror(self) -> None:
        self.rng.choice(self.mirrors).restart()

    def carry_again(self) -> None:
        """Somebody puts a mirror back: an aggregate gets again what it has."""
        log = self.upkeep.choice([log for name in self.aggregates for log in self.cluster_logs(name)])
        copies = list(log.visible(0, log.stable_end))
        first = self.upkeep.randint(0, len(copies))
        recs = [copy.rec for copy in copies[first : first + self.upkeep.randint(1, 12)]]
        if recs:
            log.append(recs, append_ms=self.now_ms if self.log_append else None)
            self.note("carried again")

    def _restart_group(self) -> None:
        for group in self.groups:
            group.restart()

    def _expire(self) -> None:
        for logs in self.logs.values():
            for log in logs:
                if self.rng.random() < 0.3:
                    log.start = self.rng.randint(log.start, log.stable_end)
        self.note("expired")

    def _delete_records(self) -> None:
        log = self.rng.choice(self.source_logs())
        log.start = log.stable_end
        self.note("DeleteRecords")

    def _recreate(self) -> None:
        """A source topic is deleted and made anew; an audit has looked, or nobody would know of the first."""
        if self.transactions_open or not self.audit_has_looked or self.groups or self.racing:
            return
        cluster, name = self.rng.choice([key for key in self.logs if key[0] in self.sources])
        self.make_topic(cluster, name, len(self.logs[cluster, name]))
        self.note("topic recreated")

    def _shorten(self) -> None:
        """A disk is lost, or an unclean election chooses one who has less: it gives offsets out again."""
        log = self.rng.choice(self.source_logs())
        cuts = [offset for offset in log.calm if offset >= log.start]
        if self.transactions_open or self.racing or not cuts:
            return
        log.shorten(self.rng.choice(cuts))
        self.shortened.add((*log.place, str(log.topic_id)))
        self.note("log shortened")

    def _shorten_below(self) -> None:
        """The same in an aggregate: what a mirror carried is gone there, and its position is as it was."""
        cluster = self.below.choice(self.aggregates)
        log = self.below.choice(self.cluster_logs(cluster))
        cuts = [offset for offset in log.calm if offset >= log.start]
        if not cuts:
            return
        cut = self.below.choice(cuts)
        self._vanish(log, cut)
        log.shorten(cut)
        self.shortened.add((*log.place, str(log.topic_id)))
        self.note("aggregate's log shortened")

    def _recreate_below(self) -> None:
        if not self.audit_has_looked or self.groups:
            return
        cluster, name = self.below.choice([key for key in self.logs if key[0] in self.aggregates])
        for log in self.logs[cluster, name]:
            self._vanish(log, 0)
        self.make_topic(cluster, name, len(self.logs[cluster, name]), self.below)
        self.note("aggregate's topic recreated")

    def _vanish(self, log: Log, first: int) -> None:
        gone = (copy.rec for copy in log.copies if copy.offset >= first)
        self.vanished_below.update((log.cluster, rec.stream, rec.sequence) for rec in gone)

    def _add_partition(self) -> None:
        (cluster, name), logs = self.rng.choice(list(self.logs.items()))
        logs.append(self._new_log(cluster, name, len(logs), logs[0].topic_id))
        self.note("partition added")

    def _end_some_transaction(self) -> None:
        if self.transactions_open:
            self.end_transaction(self.rng.choice(self.transactions_open), self.rng.random() < 0.6)

    def end_transaction(self, each: tuple, commit: bool) -> None:
        self.transactions_open.remove(each)
        producer, log, members = each
        producer.end_transaction(log, members, commit)


def positions_of(mirror: Mirror) -> list[tuple[bytes, bytes]]:
    """The records of the mirror's positions topic, as the mirror writes them."""
    records = []
    for log in mirror.logs():
        told = mirror.position(log)
        if told is not None:
            position = Position(
                told[0], f"id-{log.cluster}", uuid.UUID(told[1]), mirror.epoch_of(log), mirror.world.now_ms
            )
            records.append((encode_key(log.cluster, log.name, log.partition), encode_value(position)))
    return records


def routes_of(mirror: Mirror) -> list[tuple[bytes, bytes]]:
    """The records of the mirror's routes topic."""
    world = mirror.world
    return [
        (
            json.dumps({"source": cluster, "topic": topic}).encode(),
            json.dumps(
                {
                    "version": 1,
                    "cluster_id": f"id-{cluster}",
                    "target_topic": world.name_at(mirror.aggregate, topic),
                }
            ).encode(),
        )
        for cluster in mirror.sources
        for topic in world.topics.audited
    ]
