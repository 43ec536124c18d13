"""One stream as the audit should judge it: its tiers, what each holds, and every row that must be said.

Made of what `audit_oracle` was shown and of what the events that are left say: plain sets over single
records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from millrace.audit.contract.content_digest import digest_sum
from tests.simulation.audit_arrivals import Counted, counted_together
from tests.simulation.audit_expected import Expected, Told
from tests.simulation.audit_logs import GRACE_MS, LEASE_MS, WINDOW_MS, Rec
from tests.simulation.audit_oracle import PRODUCED, Oracle, Shown, Vanished, told_by
from tests.simulation.audit_world import Mirror


class Case:
    """One stream: its tiers and what each holds, as single records. What came `late` for a window whose
    evidence was pruned is told as that alone: it proves nothing, and fills no hole in the reports."""

    def __init__(self, oracle: Oracle, told: Told, late: Collection[Shown] = ()):
        self.oracle, self.told, self.world = oracle, told, oracle.world
        world = self.world
        own = [each for each in oracle.shown if each.rec.stream == told.stream and each not in late]
        clusters = {each.cluster for each in own} | told.clusters
        sources = [name for name in world.sources if name in clusters]
        self.source = "+".join(sources) if sources else PRODUCED
        topics = {self.topic()} if self.topic() else set(world.topics.audited)
        self.copies: dict[str, list[Shown]] = {}
        self.upstream: dict[str, str] = {}
        self.gone: dict[str, list[Vanished]] = {}
        if sources:
            self.copies[self.source] = [each for each in own if each.cluster in sources]
            self.upstream[self.source] = PRODUCED
            self.gone[self.source] = [v for v in oracle.gone if v.cluster in sources and v.name in topics]
        for name in world.aggregates:
            here = {world.name_at(name, topic) for topic in topics}
            self.copies[name] = [each for each in own if each.cluster == name]
            self.upstream[name] = self.source
            self.gone[name] = [v for v in oracle.gone if v.cluster == name and v.name in here]
            if not sources:
                self.gone[name].append(Vanished(name, "", None))
        for group in world.groups:
            upstream = self.source if group.cluster in sources else group.cluster
            if upstream not in self.copies or (
                group.cluster in world.sources and group.cluster not in sources
            ):
                continue
            name = f"group:{group.name}"
            recs = [rec for _, rec in told_by(group) if rec.stream == told.stream]
            self.copies[name] = [Shown(group.cluster, "", -1, None, -1, rec) for rec in recs]
            self.upstream[name] = upstream
            began = min((rec.window for _, rec in told_by(group)), default=None)
            self.gone[name] = [Vanished(group.cluster, "", began)]
        self.by_sequence = {name: _by_sequence(copies) for name, copies in self.copies.items()}
        self.counted: dict[Shown, Counted] = {}
        if world.foreign:
            for counted, copies in counted_together(self.copies.get(self.source, ())):
                self.counted.update(dict.fromkeys(copies, counted))
        self.arrived: dict[str, set[int]] = {}
        for name in reversed(list(self.copies)):
            below = [self.arrived[lower] for lower, upper in self.upstream.items() if upper == name]
            self.arrived[name] = set(self.by_sequence[name]).union(*below)

    def topic(self) -> str:
        return self.world.topic_of.get(self.told.stream, "")

    def unknowable(
        self,
        tier: str,
        window: int,
        *,
        recreated: bool = False,
        cut_off: bool = True,
        shortened: bool = False,
    ) -> bool:
        """Whether this window's record may have been in what vanished from the tier, or only in its topics
        that were made anew and its logs that were shortened, or only in those; or only in what is not surely
        lost."""
        opened = self.told.opened_ms
        if opened is not None and opened > self.world.now_ms + GRACE_MS:
            opened = None  # a clock that is ahead of now says nothing
        since = None if opened is None else min(opened, window) - GRACE_MS
        # Who promises dates its records by its clock: none of a later window can have been in it.
        promised = self.told.promise_ms
        is_group = tier.startswith("group:")
        if promised is not None and promised <= self.world.now_ms + GRACE_MS and not is_group:
            by_clock = min(promised, window) - GRACE_MS
            since = by_clock if since is None else max(since, by_clock)
        gone = [v for v in self.gone[tier] if v.recreated or not recreated]
        gone = [v for v in gone if v.cut is not None or not shortened]
        gone = [v for v in gone if cut_off or not self.cut_off(v)]
        return any(v.at_ms is None or since is None or since <= v.at_ms for v in gone)

    def cut_off(self, vanished: Vanished) -> bool:
        """A log was shortened, every mirror has told of what was written since, and nothing was missed of any
        aggregate: what was in it and is nowhere below is lost."""
        world = self.world
        if vanished.cut is None or vanished.cluster not in world.sources or world.foreign:
            return False
        if any(group.cluster == vanished.cluster for group in world.groups):
            return False
        log, epoch = vanished.cut
        for mirror in (each for each in world.mirrors if vanished.cluster in each.sources):
            if log not in world.logs[log.cluster, log.name]:
                return False
            told = mirror.position(log)
            if told is None or told[1] != str(log.topic_id) or mirror.epoch_of(log) <= epoch:
                return False
            if mirror.stands(log) != told or mirror.epoch_of(log) not in {each for each, _ in log.history()}:
                return False  # that was told of a log that is gone as well
            here = world.name_at(mirror.aggregate, vanished.name)
            if any(v.cluster == mirror.aggregate and v.name == here for v in self.oracle.gone):
                return False
        return True

    def passed(self, tier: str, copy: Shown) -> bool:
        world = self.world
        if tier.startswith("group:"):
            (group,) = world.groups
            log = next(x for x in world.logs[copy.cluster, copy.name] if x.partition == copy.partition)
            committed = group.stands(log)
            return committed is not None and copy.offset < committed
        if world.foreign:
            return self.oracle.carried(tier, self.counted[copy])
        mirror = world.mirror_of(tier, copy.cluster)
        log = next((x for x in world.logs[copy.cluster, copy.name] if x.partition == copy.partition), None)
        told = None if log is None else mirror.stands(log)
        if told is None:
            return False
        if copy.topic_id != log.topic_id:  # type: ignore[union-attr]
            return True
        return told[1] == str(copy.topic_id) and copy.offset < told[0]

    def in_gap(self, tier: str, copy: Shown) -> bool:
        if tier.startswith("group:"):
            return False
        if self.world.foreign:
            return self.counted[copy].lies_in(self.oracle.given_twice)
        mirror = self.world.mirror_of(tier, copy.cluster)
        return any(
            first <= copy.offset < end and topic_id == str(copy.topic_id)
            for (topic_id, first), end in self._gaps(mirror, copy).items()
        )

    def _may_hide_a_gap(self, tier: str, copy: Shown) -> bool:
        """A gap of a later topic of that name may have taken the place of one of this topic, for whoever does
        not know what events there were: they have one key where they begin at one offset."""
        if tier.startswith("group:"):
            return False
        mine, gaps = str(copy.topic_id), self._gaps(self.world.mirror_of(tier, copy.cluster), copy)
        now = {str(log.topic_id) for log in self.world.logs[copy.cluster, copy.name]}
        return mine not in now and any(
            topic_id != mine and (mine, first) not in gaps for topic_id, first in gaps
        )

    @staticmethod
    def _gaps(mirror: Mirror, copy: Shown) -> dict[tuple[str, int], int]:
        return mirror.gaps.get((copy.cluster, copy.name, copy.partition), {})

    def settled(self, window: int) -> bool:
        told, now = self.told, self.world.now_ms
        end = window + WINDOW_MS
        if not told.state:
            return False
        if told.state == "closed" or now > told.at_ms + LEASE_MS + GRACE_MS:
            return now >= min(end, told.at_ms) + GRACE_MS
        return told.promise_ms is not None and told.promise_ms >= end and now >= end + GRACE_MS

    def rows(self) -> dict[int | None, Expected]:
        told = self.told
        windows = set(told.reports) | {each.rec.window for copies in self.copies.values() for each in copies}
        rows: dict[int | None, Expected] = {window: Expected() for window in windows}
        for window in windows:
            rows[window].settled = self.settled(window)
            rows[window].over = self.world.now_ms >= window + WINDOW_MS + GRACE_MS
        if told.counted_only:
            self._count(rows)
        else:
            self._missing(rows)
            self._doubled(rows)
            self._rest(rows)
        self._content(rows)
        self._counts(rows)
        for row in rows.values():
            row.decide("COUNT_MATCH" if told.counted_only else "PROVEN")
        own = self._own_row()
        if own is not None:
            rows[None] = own
        return rows

    def _counts(self, rows) -> None:
        """What an audit that only counts would say: published and consumed, and how many of them differ."""
        for window, row in rows.items():
            report = self.told.reports.get(window)
            if report is not None:
                row.published, row.ambiguous = report.count, len(report.ambiguous)
            for tier, copies in self.copies.items():
                here = [copy.rec.sequence for copy in copies if copy.rec.window == window]
                row.consumed[tier] = len(here)
                row.seen[tier] = len(set(here) - {0}) + here.count(0)

    def windows_of(self) -> dict[int, set[int]]:
        """{sequence: windows that a report acknowledges it in, or that anybody has it in}"""
        found: dict[int, set[int]] = {}
        for window, report in self.told.reports.items():
            for sequence in report.acknowledged:
                found.setdefault(sequence, set()).add(window)
        for by_sequence in self.by_sequence.values():
            for sequence, copies in by_sequence.items():
                found.setdefault(sequence, set()).update(copy.rec.window for copy in copies)
        found.pop(0, None)
        return found

    def _windows_of(self, sequence: int) -> set[int]:
        found = {w for w, report in self.told.reports.items() if sequence in report.acknowledged}
        for by_sequence in self.by_sequence.values():
            found |= {copy.rec.window for copy in by_sequence.get(sequence, ())}
        return found

    def _missing(self, rows) -> None:
        for tier, upstream in self.upstream.items():
            expected = self.told.sets("acknowledged") if upstream == PRODUCED else self.arrived[upstream]
            for sequence in expected - self.arrived[tier] - {0}:
                for window in self._windows_of(sequence):
                    row = rows[window]
                    fate = "lost" if upstream == PRODUCED else self._fate(tier, upstream, sequence)
                    if (
                        self._in_gap_of_another_log(tier, upstream, sequence)
                        or self._in_old_log(tier, upstream, sequence)
                        or any(self._may_lie_across(tier, copy) for copy in self._above(upstream, sequence))
                    ):
                        row.open.add(sequence)
                    if fate == "lost" and self.unknowable(tier, window, cut_off=False):
                        fate = "unknown"
                        if self._after_it_began(tier, upstream, sequence):
                            row.answered_for.add(sequence)
                            fate = "lost"
                    if fate in ("lost", "in_flight"):
                        getattr(row, fate).setdefault((upstream, tier), set()).add(sequence)
                    else:
                        getattr(row, fate).add(sequence)

    def _in_gap_of_another_log(self, tier: str, upstream: str, sequence: int) -> bool:
        """A gap event does not say of which log it speaks of one that was shortened: it may lie across cells
        of the other."""
        if upstream == PRODUCED or tier.startswith("group:") or self.world.foreign:
            return False
        above = self._above(upstream, sequence)
        if any(self._may_hide_a_gap(tier, copy) for copy in above):
            return True
        return any(
            (c.cluster, c.name, c.partition, str(c.topic_id)) in self.world.shortened
            and any(
                topic_id == str(c.topic_id)
                for topic_id, _ in self._gaps(self.world.mirror_of(tier, c.cluster), c)
            )
            for c in above
        )

    def _above(self, upstream: str, sequence: int) -> list[Shown]:
        return [] if upstream == PRODUCED else self.by_sequence[upstream].get(sequence, [])

    def _may_lie_across(self, tier: str, copy: Shown) -> bool:
        """Whether its cell may lie across a mirror's position or the bound of a gap that was told after the
        cell had been kept. Across a position it is in flight until that has left it, however much of it was
        passed; of what lies across a gap's bound, nobody can tell what lies within.
        """
        if not copy.uncut_to or tier.startswith("group:"):
            return False
        mirror = self.world.mirror_of(tier, copy.cluster)
        place = (copy.cluster, copy.name, copy.partition)
        if self.world.foreign or place in mirror.gaps:
            return True
        log = next(each for each in self.world.logs[copy.cluster, copy.name] if each.place == place)
        told = mirror.stands(log)
        return told is None or (told[1] == str(copy.topic_id) and told[0] < copy.uncut_to)

    def _after_it_began(self, tier: str, upstream: str, sequence: int) -> bool:
        """Whether the group had told of an earlier record of a partition that has this one."""
        if not tier.startswith("group:"):
            return False
        (group,) = self.world.groups
        told = {
            (key[1], partition): offset
            for key in sorted(group.told, reverse=True)
            for partition, offset in group.began.get(key, {}).items()
        }
        for key in group.told:
            for partition, offset in group.began.get(key, {}).items():
                told[key[1], partition] = min(offset, told[key[1], partition])
        return any(
            copy.cluster == group.cluster and copy.offset >= told.get((copy.name, copy.partition), 1 << 60)
            for copy in self.by_sequence[upstream].get(sequence, ())
        )

    def _in_old_log(self, tier: str, upstream: str, sequence: int) -> bool:
        """A cell that was read before the log was shortened may lie across the position of a mirror that went
        back, and is decided when that has passed it in whole."""
        if self.world.foreign and tier in self.world.aggregates:
            return False  # there the cells themselves are counted out
        return any(
            copy.life < len(log.cuts)
            for copy in self._above(upstream, sequence)
            for log in self.world.logs[copy.cluster, copy.name]
            if (log.partition, log.topic_id) == (copy.partition, copy.topic_id)
        )

    def _fate(self, tier: str, upstream: str, sequence: int) -> str:
        copies = self.by_sequence[upstream].get(sequence, [])
        if not copies:
            return "unknown"
        free = [copy for copy in copies if not self.in_gap(tier, copy)]
        if not free:
            return "explained"
        if not all(self.passed(tier, copy) for copy in free):
            return "in_flight"
        across = self.world.foreign and tier in self.world.aggregates
        if across and any(self.counted[copy].touches(self.oracle.given_twice) for copy in free):
            return "unknown"
        return "lost"

    def _doubled(self, rows) -> None:
        extra: dict[str, Counter[int]] = {PRODUCED: Counter()}
        for tier, upstream in self.upstream.items():
            by_sequence = self.by_sequence[tier]
            extra[tier] = Counter(
                {s: len(copies) - 1 for s, copies in by_sequence.items() if len(copies) > 1 and s}
            )
            if tier.startswith("group:"):
                extra[tier] = self._told_again(tier, extra[upstream], rows)
            for sequence, count in extra[tier].items():
                new = count - extra[upstream][sequence]
                if new <= 0:
                    continue
                windows = {copy.rec.window for copy in by_sequence[sequence]}
                for window in windows:
                    row = rows[window]
                    if len(windows) > 1:
                        row.open_copies.setdefault(tier, set()).add(sequence)
                    found = new
                    if self.unknowable(tier, window, recreated=True):
                        found = self._sure_copies(tier, sequence, window) - extra[upstream][sequence]
                    if found < new:
                        row.undecided = True  # the other copy may lie in the topic that is gone
                    if found > 0:
                        row.doubled.setdefault(tier, set()).add(sequence)
                        row.extra[tier] = row.extra.get(tier, 0) + found

    def _sure_copies(self, tier: str, sequence: int, window: int) -> int:
        """Extra copies beside one in the very same topic. Of a log that was shortened nobody can tell."""
        if self.unknowable(tier, window, recreated=True, shortened=True):
            return 0
        here = [copy for copy in self.by_sequence[tier][sequence] if copy.rec.window == window]
        return sum(n - 1 for n in Counter((copy.cluster, copy.topic_id) for copy in here).values())

    def _told_again(self, tier: str, above: Counter[int], rows) -> Counter[int]:
        """Extra copies that a group certainly got of each sequence. An event tells which came again and how
        many copies in all: where that leaves a choice, the rest is counted in the row as far as the upstream
        had not as many, and whose they are is not said."""
        (group,) = (each for each in self.world.groups if f"group:{each.name}" == tier)
        windows: dict[int, list[Counter[int]]] = {}
        for (number, topic, stream, start_ms), count in group.told.items():
            if stream == self.told.stream:
                recs = group.sessions_told(number, (topic, stream, start_ms), count)
                windows.setdefault(start_ms, []).append(Counter(rec.sequence for rec in recs if rec.sequence))
        total: Counter[int] = Counter()
        for start_ms, events in windows.items():
            sure: Counter[int] = Counter()
            choice: set[int] = set()
            rest = 0
            for event in events:
                again = {sequence: copies - 1 for sequence, copies in event.items() if copies > 1}
                sure.update(set(event))
                left = sum(again.values()) - len(again)
                if len(again) > 1 and left:
                    sure.update(set(again))
                    choice |= set(again)
                    rest += left
                else:
                    sure.update(again)
            sure.subtract({sequence for event in events for sequence in event})
            rest -= sum(max(above[sequence] - sure[sequence], 0) for sequence in choice)
            if rest > 0:
                rows[start_ms].extra[tier] = rows[start_ms].extra.get(tier, 0) + rest
            several = {
                each for each in choice if len({copy.rec.window for copy in self.by_sequence[tier][each]}) > 1
            }
            if several:
                rows[start_ms].open_copies.setdefault(tier, set()).update(several)
            total += sure
        for sequence, copies in self.by_sequence[tier].items():
            if sequence:
                total[sequence] += len({copy.rec.window for copy in copies}) - 1
        return +total

    def _rest(self, rows) -> None:
        told = self.told
        known = told.sets("acknowledged") | told.sets("ambiguous")
        for sequence in set().union(*self.arrived.values()) - known - {0}:
            for window in self._windows_of(sequence):
                rows[window].unreported.add(sequence)
        for windows in self.windows_of().values():
            for window in windows if len(windows) > 1 else ():  # which has the record, nobody can tell
                rows[window].undecided = True
        for copies in self.copies.values():
            for copy in copies:
                if copy.rec.sequence == 0:
                    rows[copy.rec.window].undecided = True

    def _content(self, rows) -> None:
        """A window's contents are compared where two tiers hold the same records; what is proven was.

        Where some came again, more may be told: whether their copies can be looked at depends on cells.
        """
        if not self.world.content:
            return
        for window, row in rows.items():
            held = {PRODUCED: self._told_contents(window)}
            unsure: set[str] = set()
            there = set(self._acknowledged_in(window))
            for tier, upstream in self.upstream.items():
                recs = [copy.rec for copy in self.copies[tier] if copy.rec.window == window]
                numbers = Counter(rec.sequence for rec in recs)
                held[tier] = (numbers, digest_sum(rec.digest for rec in recs)) if recs else None
                row.content_open |= len(numbers - Counter({0: len(recs)})) < len(recs) - numbers[0]
                there.update(recs)
                if not recs:
                    continue
                if self.told.counted_only != (set(numbers) == {0}) or (0 in numbers and len(numbers) > 1):
                    held[tier] = None
                here, above = held[tier], [held[each] for each in (upstream, PRODUCED)]
                comparable = [each for each in above if each and here and each[0] == here[0]]
                if not comparable:
                    unsure.add(tier)
                row.differs |= any(here != each for each in comparable)
                if here is not None and here == held[PRODUCED]:
                    while tier != PRODUCED:
                        unsure.discard(tier)
                        tier = self.upstream[tier]
            row.undecided |= bool(unsure) and not self.told.counted_only
            kinds = {(rec.sequence, rec.digest) for rec in there}
            row.contents_vary = len(kinds) > len({sequence for sequence, _ in kinds})

    def _told_contents(self, window) -> tuple[Counter[int], int] | None:
        report = self.told.reports.get(window)
        if report is None or report.digest is None:
            return None
        if not report.sequenced:
            return Counter({0: report.count}), report.digest
        return Counter(report.acknowledged), digest_sum(rec.digest for rec in self._acknowledged_in(window))

    def _acknowledged_in(self, window) -> list[Rec]:
        """The records that the window's report acknowledges, as they were sent."""
        report = self.told.reports.get(window)
        sent = {rec.sequence: rec for rec in self.world.acknowledged.get(self.told.stream, ())}
        return [] if report is None else [sent[sequence] for sequence in report.acknowledged]

    def _count(self, rows) -> None:
        told = self.told
        for window, row in rows.items():
            if window not in told.reports:
                row.undecided = True
                continue
            counts = {PRODUCED: told.reports[window].count}
            for tier, upstream in self.upstream.items():
                counts[tier] = sum(copy.rec.window == window for copy in self.copies[tier])
                surplus = counts[tier] - counts[upstream]
                if not surplus:
                    continue
                doubt = self.unknowable(tier, window) or not row.settled
                if upstream == PRODUCED:
                    doubt = doubt or (surplus > 0 and (told.state != "closed" or self._uncounted()))
                elif surplus > 0:
                    doubt = doubt or self.unknowable(upstream, window)
                else:
                    above = [copy for copy in self.copies[upstream] if copy.rec.window == window]
                    doubt = doubt or any(self.in_gap(tier, c) or not self.passed(tier, c) for c in above)
                    if self.world.foreign and tier in self.world.aggregates:
                        twice = self.oracle.given_twice
                        doubt = doubt or any(self.counted[c].touches(twice) for c in above)
                    row.approximate = row.approximate or any(
                        self._may_hide_a_gap(tier, c) or self._may_lie_across(tier, c) for c in above
                    )
                if doubt:
                    row.undecided = True
                elif surplus < 0:
                    row.lost_count[upstream, tier] = -surplus
                else:
                    row.extra[tier] = surplus

    def _uncounted(self) -> bool:
        """Whether a report was lost: the producer said how many records they tell of together."""
        return sum(report.count for report in self.told.reports.values()) < self.told.last_settled

    def _own_row(self) -> Expected | None:
        told, now = self.told, self.world.now_ms
        silent = told.state not in ("", "closed") and now > told.at_ms + LEASE_MS + GRACE_MS
        holes: set[int] = set()
        if not told.counted_only:
            known = told.sets("acknowledged") | told.sets("ambiguous") | told.sets("failed")
            known |= set().union(*self.arrived.values())
            last = told.last_settled
            if not told.state or told.state == "closed" or silent:
                last = max([told.last_assigned, *known])
            holes = set(range(1, last + 1)) - known
        uncounted = told.counted_only and self._uncounted()
        if told.state and not silent and not holes and not uncounted:
            return None
        own = Expected("UNKNOWN", settled=True, unknown=holes, silent=silent)
        own.silent_from_ms = told.at_ms if silent else None
        if silent and not holes and not uncounted:
            own.not_before_ms = told.promise_ms
        return own


def _by_sequence(copies: list[Shown]) -> dict[int, list[Shown]]:
    found: dict[int, list[Shown]] = {}
    for copy in copies:
        found.setdefault(copy.rec.sequence, []).append(copy)
    return found
