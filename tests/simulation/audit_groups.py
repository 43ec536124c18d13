"""A consumer group of the audit's world, which tells what it got and then commits; and where somebody stands
who committed, or told a position, in a log that was cut since.

Used by `audit_world`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from millrace.audit.contract.content_digest import digest_sum
from millrace.audit.contract.event_values import TierEvent
from millrace.audit.contract.group_counts import commit_mark
from tests.simulation.audit_logs import NO_IDENTITY, WINDOW_MS, Log, Rec

if TYPE_CHECKING:
    from tests.simulation.audit_world import World


def stands_at(log: Log, next_offset: int, epoch: int, cuts: list[int]) -> int:
    """How much of this log somebody had who stood at the offset before these cuts. What an epoch between
    those that are left tells is nothing, and so does one from before a log's begin."""
    if next_offset <= log.start and cuts and epoch < log.history()[0][0]:
        return next_offset
    known = epoch in {each for each, _ in log.history()}
    return min([next_offset, *cuts]) if known or not cuts or next_offset <= min(cuts) else 0


class Group:
    """An online consumer group on one cluster: it tells what it got, then commits."""

    def __init__(self, world: World, cluster: str, name: str):
        self.world, self.cluster, self.name = world, cluster, name
        self.committed: dict[tuple[str, str, int], int] = {}
        self.epochs: dict[tuple[str, str, int], int] = {}  # committed with the offset
        self.cuts_known: dict[tuple[str, str, int], int] = {}  # when it committed
        self.cuts_seen: dict[tuple[str, str, int], int] = {}
        self.read: dict[tuple[str, str, int], int] = {}
        self.sessions: list[dict[tuple[str, str, int], list[Rec]]] = [{}]
        self.told: dict[tuple[int, str, str, int], int] = {}
        self.began: dict[tuple[int, str, str, int], dict[int, int]] = {}  # by the window that tells it
        self.mark = ""
        self.firsts: set[tuple[int, tuple[str, str, int]]] = set()

    def step(self, all_of_it: bool = False) -> None:
        rng, world = self.world.rng, self.world
        for log in world.cluster_logs(self.cluster):
            first = min([self.read.get(log.place, 0), *log.cuts[self.cuts_seen.get(log.place, 0) :]])
            self.cuts_seen[log.place] = len(log.cuts)
            end = log.stable_end if all_of_it else rng.randint(min(first, log.stable_end), log.stable_end)
            for copy in log.visible(first, end):
                if copy.rec.stream == NO_IDENTITY:
                    continue
                if rng.random() < world.group_drop:
                    world.note("lost by group")
                    continue
                key = (log.name, copy.rec.stream, copy.rec.window)
                self.sessions[-1].setdefault(key, []).append(copy.rec)
                number = len(self.sessions) - 1
                if (number, log.place) not in self.firsts:
                    self.firsts.add((number, log.place))
                    self.began.setdefault((number, *key), {})[log.partition] = copy.offset
            self.read[log.place] = max(first, end)
        if all_of_it or rng.random() < 0.7:
            self.tell()
            told = sum(map(len, self.sessions[-1].values()))
            self.mark = commit_mark(f"{len(self.sessions):016x}", told)
            self.committed = dict(self.read)
            self.cuts_known = dict(self.cuts_seen)
            self.epochs = {
                log.place: log.epoch_before(self.committed[log.place])
                for log in world.cluster_logs(self.cluster)
            }

    def stands(self, log: Log) -> int | None:
        """The committed offset, as far as this log is still the one in which it was committed."""
        offset = self.committed.get(log.place)
        cuts = log.cuts[self.cuts_known.get(log.place, 0) :]
        return None if offset is None else stands_at(log, offset, self.epochs[log.place], cuts)

    def restart(self) -> None:
        """A member dies: what it had not told is forgotten, what was not committed comes again."""
        self.world.note("group restarted")
        if self.world.rng.random() < 0.5:
            self.tell()
        self.sessions.append({})
        self.read, self.cuts_seen = dict(self.committed), dict(self.cuts_known)

    def sessions_told(self, number: int, key: tuple[str, str, int], count: int) -> list[Rec]:
        """What a session's events tell of a window: its first `count` records."""
        return self.sessions[number][key][:count]

    def tell(self) -> None:
        number = len(self.sessions) - 1
        session = self.sessions[-1]
        total = sum(map(len, session.values()))
        for (topic, stream, start_ms), recs in session.items():
            key = (number, topic, stream, start_ms)
            if self.told.get(key) == len(recs):
                continue
            self.told[key] = len(recs)
            copies = Counter(rec.sequence for rec in recs)
            seen = BitMap64(s for s in copies if s)
            digests = [rec.digest for rec in recs if not rec.sequence]
            digests += {rec.sequence: rec.digest for rec in recs if rec.sequence}.values()
            self.world.publish(
                TierEvent(
                    tier=self.name, stream=stream, topic=topic, producer=recs[0].producer,
                    window_start_ms=start_ms, window_ms=WINDOW_MS, report=len(recs), count=len(recs),
                    byte_count=0, seen=seen,
                    at_ms=self.world.now_ms, session=f"{number + 1:016x}", session_count=total,
                    repeats=BitMap64(s for s, n in copies.items() if s and n > 1), unsequenced=copies[0],
                    digest=digest_sum(digests) if self.world.content else None,
                    began=tuple(sorted(self.began.get(key, {}).items())),
                ),
                self.cluster, surely=True,
            )  # fmt: skip
