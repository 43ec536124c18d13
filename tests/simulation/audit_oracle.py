"""What the audit should say of a world, from the rules of its verdict table and from nothing of its code.

Plain sets over single records with exact offsets. The oracle knows what the audit has been shown: everything
that any committed run could read and keep, and what is readable now. What vanished before that, nobody can
know; everything else must be named.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from millrace.audit.contract.event_values import CountEvent, StreamEvent
from tests.simulation.audit_answers import Answers, Pinned
from tests.simulation.audit_arrivals import Counted, counted_together, passages
from tests.simulation.audit_expected import Told
from tests.simulation.audit_logs import NO_IDENTITY, Log, Rec
from tests.simulation.audit_world import Mirror, World

PRODUCED = "produced"
RANK = {"opened": 0, "heartbeat": 1, "closed": 2}


@dataclass(frozen=True, slots=True)
class Shown:
    """One copy that the audit could read."""

    cluster: str
    name: str
    partition: int
    topic_id: object
    offset: int
    rec: Rec
    life: int = 0
    """how often the log had been shortened when it was read"""
    counted: tuple[int, int] = (0, 0)
    """with what it was counted: the look, and the piece of the log between offsets that cells do not cross"""
    uncut_to: int = 0
    """Where it was kept before all was known at which the log is cut (a mirror's first position, a gap that
    was told while the audit looked): up to this offset its cell may reach."""


@dataclass(frozen=True, slots=True)
class Vanished:
    """Something in a topic of a cluster was gone before it could be read, at this time (None: any)."""

    cluster: str
    name: str
    at_ms: int | None
    recreated: bool = False
    """Another log is in its place since, or it was shortened: what is there again is not there twice."""
    cut: tuple[Log, int] | None = None
    """the log that was shortened, and the newest epoch that had been read of it"""


class Oracle:
    """One audit's knowledge, run after run."""

    def __init__(self, world: World):
        self.world = world
        self.until: dict[tuple[str, str, int], tuple[int, object, int, int]] = {}
        self.kept: list[Shown] = []
        self.vanished: list[Vanished] = []
        self.shown: list[Shown] = []
        self.gone: list[Vanished] = []
        self.watermarks: dict[str, int] = {}
        """as they were told by the last run that was kept"""
        self.twice: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
        self.given_twice = self.twice
        """offsets that were given out again, by partition"""
        self.bounds: dict[tuple[str, str, int], set[int]] = {}
        """where these began and ended: no cell crosses that, of a topic made anew in their place neither"""
        self._looks = 0
        self._carried: dict[str, dict[tuple[tuple[str, str, int], str], int]] = {}

    def look(self, *, dies: bool, answers: Answers | None = None) -> None:
        """What a run is shown now; it is kept unless the run dies. With `answers`, what it was shown by a
        world that went on until it had all of them."""
        until, kept, vanished = dict(self.until), list(self.kept), list(self.vanished)
        twice = {place: list(each) for place, each in self.twice.items()}
        bounds = {place: set(each) for place, each in self.bounds.items()}
        tail: list[Shown] = []
        hidden: list[Vanished] = []
        world = self.world
        now_ms = world.now_ms if answers is None else answers.read_ms
        pinned_ms = world.now_ms if answers is None else answers.pinned_ms  # nothing later was to be read
        self._looks += 1
        for (cluster, name), logs in world.logs.items():
            for log in logs:
                pinned = Pinned(log.start, log.stable_end, log.end) if answers is None else None
                if answers is not None:
                    pinned = answers.pins.get(log.place)
                if pinned is None:
                    continue  # it was added when the others were pinned
                known = until.get(log.place)
                first = pinned.start
                if known is not None and known[1] != log.topic_id:
                    vanished.append(Vanished(cluster, name, now_ms, recreated=True))
                    twice.pop(log.place, None)
                elif known is not None:
                    if pinned.start > known[0]:
                        vanished.append(Vanished(cluster, name, pinned_ms))
                    upto = min([known[0], *log.cuts[known[2] :]])
                    first = max(pinned.start, upto)
                    if upto < known[0] and first < known[0]:
                        vanished.append(Vanished(cluster, name, now_ms, recreated=True, cut=(log, known[3])))
                        twice.setdefault(log.place, []).append((first, known[0]))
                        bounds.setdefault(log.place, set()).update((first, known[0]))
                        if upto <= pinned.start > 0:  # and of what was written since, retention took some
                            vanished.append(Vanished(cluster, name, pinned_ms))
                elif pinned.start > 0:
                    vanished.append(Vanished(cluster, name, pinned_ms))
                cut, sure = self._cut(log, first, pinned, answers)
                if max(first, pinned.start) < log.start and first < cut:  # taken before it was read
                    vanished.append(Vanished(cluster, name, pinned_ms))
                elif max(cut, first) < log.start and cut < pinned.stable_end:
                    hidden.append(Vanished(cluster, name, pinned_ms))
                look = (self._looks, sorted({*bounds.get(log.place, ()), *self._began(log)}))
                behind = set() if answers is None else answers.behind.get(log.place, set())
                kept += _shown(log, first, cut, look, behind, 0 if sure else cut)
                tail += _shown(log, cut, pinned.stable_end, look, behind)
                upto = max(cut, first)
                until[log.place] = (upto, log.topic_id, len(log.cuts), log.epoch_before(upto))
                if pinned.stable_end < pinned.end:
                    hidden.append(Vanished(cluster, name, None))
        self.shown, self.gone = kept + tail, vanished + hidden
        self._carried = {}
        if world.foreign:
            sources = [each for each in self.shown if each.cluster in world.sources and each.rec.stream]
            upstream = [counted for counted, _ in counted_together(sources)]
            for aggregate in world.aggregates:
                here = [each for each in self.shown if each.cluster == aggregate]
                self._carried[aggregate] = passages(upstream, here)
        self.given_twice = twice
        if not dies:
            self.until, self.kept, self.vanished = until, kept, vanished
            self.twice, self.bounds = twice, bounds

    def carried(self, aggregate: str, counted: Counted) -> bool:
        """Whether a foreign mirror has passed all of this, as far as what arrived tells."""
        cluster, name, partition = counted.place
        now = {log.partition: str(log.topic_id) for log in self.world.logs[cluster, name]}
        if now.get(partition, str(counted.topic_id)) != str(counted.topic_id):
            return True  # of a topic that is gone nothing can come any more
        return counted.last < self._carried[aggregate].get((counted.place, str(counted.topic_id)), 0)

    def untrusted(self) -> dict[str, int]:
        """What had an identity that cannot be read, as the summary counts it: once for each audited topic
        that the log is read for."""
        found: Counter[str] = Counter()
        for each in self.shown:
            for topic in self.world.topics.audited if each.rec.stream == NO_IDENTITY else ():
                if self.world.name_at(each.cluster, topic) == each.name:
                    found[f"header of an unknown version, in {each.cluster}, topic {topic}"] += 1
        return dict(found)

    def _began(self, log: Log) -> list[int]:
        """Where a group told that it began in this partition, which its cells do not cross."""
        return [
            min(offsets)
            for group in self.world.groups
            if group.cluster == log.cluster
            for offsets in [
                [
                    group.began[key][log.partition]
                    for key in group.told
                    if key[1] == log.name and log.partition in group.began.get(key, {})
                ]
            ]
            if offsets
        ]

    def _cut(self, log: Log, first: int, pinned: Pinned, answers: Answers | None) -> tuple[int, bool]:
        """Above the mirrors' positions everything is read again next time. And whether every mirror had told
        of the cluster, and all gaps that it had told of by then were known."""
        world = self.world
        if log.cluster not in world.sources or world.foreign:
            # Of a group that told meanwhile where it began, its cells do not know yet.
            return pinned.stable_end, answers is None or not (world.foreign and world.groups)
        cuts = []
        mirrors = [mirror for mirror in world.mirrors if log.cluster in mirror.sources]
        for mirror in mirrors:
            if not any(self._position(mirror, each, answers) for each in world.cluster_logs(log.cluster)):
                continue
            told = mirror.stands(log) if answers is None else self._position(mirror, log, answers)
            cuts.append(0 if told is None or told[1] != str(log.topic_id) else told[0])
        sure = len(cuts) == len(mirrors) and answers is None
        # Before any mirror told a position of the cluster, nothing of it is kept.
        cut = min(max(min(cuts, default=0), first), pinned.stable_end)
        return cut, sure

    @staticmethod
    def _position(mirror: Mirror, log: Log, answers: Answers | None) -> tuple[int, str] | None:
        return (
            mirror.position(log) if answers is None else answers.positions.get((mirror.aggregate, log.place))
        )

    def told(self) -> dict[str, Told]:
        found: dict[str, Told] = {}
        for sent in self.world.sent:
            event = sent.event
            if sent.lost or not isinstance(event, CountEvent | StreamEvent):
                continue
            told = found.setdefault(event.stream, Told(event.stream))
            told.clusters.add(sent.where)
            if isinstance(event, CountEvent):
                known = told.reports.get(event.window_start_ms)
                if known is None or event.report > known.report:
                    told.reports[event.window_start_ms] = event
                continue
            if RANK[event.state] > RANK.get(told.state, -1):
                told.state = event.state
            told.at_ms = max(told.at_ms, event.at_ms)
            told.last_assigned = max(told.last_assigned, event.last_assigned)
            told.last_settled = max(told.last_settled, event.last_settled)
            if event.no_earlier_than_ms is not None:
                told.promise_ms = max(told.promise_ms or 0, event.no_earlier_than_ms)
            if event.state == "opened":
                told.opened_ms = min(event.at_ms, told.opened_ms or event.at_ms)
        return found

    def streams(self) -> set[str]:
        seen = {each.rec.stream for each in self.shown if each.rec.stream}
        seen |= {rec.stream for group in self.world.groups for _, rec in told_by(group)}
        return seen | set(self.told())


def _shown(
    log: Log, first: int, end: int, look: tuple[int, list[int]], behind: set[int], uncut_to: int = 0
) -> list[Shown]:
    number, bounds = look
    return [
        Shown(
            log.cluster, log.name, log.partition, log.topic_id, copy.offset, copy.rec, len(log.cuts),
            (number, bisect_right(bounds, copy.offset)), uncut_to,
        )
        for copy in log.visible(first, end, behind)
    ]  # fmt: skip


def told_by(group) -> list[tuple[str, Rec]]:
    """(topic, record) of everything that a group's events tell."""
    return [
        (topic, rec)
        for (number, topic, stream, start_ms), count in group.told.items()
        for rec in group.sessions_told(number, (topic, stream, start_ms), count)
    ]
