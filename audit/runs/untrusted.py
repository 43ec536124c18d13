"""What a run read and could not believe, and what follows from it. Pure.

Headers of an unknown version, batches and events that cannot be read, records for windows whose evidence is
pruned, streams whose own events contradict each other, topics that are nowhere or that a cluster does not
tell of: each is a `Doubt`, counted by its name. Called by `job` and `watermark_holds`; the names stand in the
summary as `untrusted`.

What must stay true:

- While one stands that could belong to a topic, the topic's watermark does not move forward (`held`), and the
  job's exit status is 2 at least; the status only until nothing was added to it for as long as the verdict's
  horizon reaches back (`reconciliation.horizon`), the watermark for ever.
- A waiver that stands (`untrusted_waivers`) ends both for the things that it covers, and never the verdict:
  what is not understood is not proven.
- One that nobody waived is told for ever. One that is waived and was not added to for `keep` is pruned: from
  then on it is a note, which names who accepted it. Its count stays in the state, so that one more of it is
  seen to be one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow.compute as pc

from millrace.audit.config import AuditConfig, audited_topic
from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit
from millrace.audit.keeping.untrusted_waivers import Accepted, StandingAccepted, standing_accepted, waiver_of
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdicts import WindowState
from millrace.audit.report.text import visible
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.doubtful_names import doubtful_names
from millrace.audit.runs.reconciling import streams_of

IN_TOPIC = ", topic "


@dataclass(frozen=True, slots=True)
class Doubt:
    """`topic` is the only one that it can belong to, "" where it may be any. With `in_rows` its stream has
    settled rows, which say UNKNOWN themselves and can be waived themselves: it is told, and they decide.
    `last_ms` is when it was last added to, None for what is read anew by every run."""

    what: str
    count: int
    topic: str = ""
    in_rows: bool = False
    last_ms: int | None = None


@dataclass(slots=True)
class Doubts:
    """A run's doubts, and the waivers for them."""

    all: list[Doubt] = field(default_factory=list)
    waivers: list[StandingAccepted] = field(default_factory=list)
    keep_ms: int | None = None
    now_ms: int = 0
    since_ms: int | None = None

    def told(self) -> list[Doubt]:
        """Those that stand in the report."""
        return [each for each in self.all if not self._is_pruned(each)]

    def waived(self) -> set[str]:
        return {each.what for each in self.all if waiver_of(self.waivers, each.what, each.count) is not None}

    def holding(self) -> list[Doubt]:
        """Those that nobody has waived, and that no row tells of."""
        waived = self.waived()
        return [each for each in self.all if each.what not in waived and not each.in_rows]

    def deciding(self) -> list[Doubt]:
        """Those that make a verdict UNKNOWN: what a row tells of is that row's to decide."""
        return [each for each in self.told() if not each.in_rows and not self._is_older(each)]

    def older(self) -> set[str]:
        return {each.what for each in self.told() if self._is_older(each)}

    def held(self, watermarks: Mapping[str, int | None], before: Mapping[str, int]) -> dict[str, int | None]:
        """The watermarks, none further than the last one told where a doubt could belong to the topic."""
        anywhere = {each.topic for each in self.holding()}
        found = dict(watermarks)
        for topic, at_ms in watermarks.items():
            if "" in anywhere or topic in anywhere:
                last_ms = before.get(topic)
                found[topic] = None if at_ms is None or last_ms is None else min(at_ms, last_ms)
        return found

    def holds(self, topics: Collection[str]) -> dict[str, list[str]]:
        """{what stands in the report: those of `topics` whose watermark it holds while nobody waives it}"""
        free = [each for each in self.told() if not each.in_rows]
        return {each.what: [topic for topic in topics if each.topic in ("", topic)] for each in free}

    def notes(self) -> list[str]:
        """A sentence for each that was waived and is pruned."""
        found = []
        for each in self.all:
            waiver = waiver_of(self.waivers, each.what, each.count) if self._is_pruned(each) else None
            if waiver is not None:
                found.append(
                    f"{each.what} ({each.count:,}) could not be trusted; {visible(waiver.who)} accepted it "
                    f"({visible(waiver.why)}) and its evidence is pruned"
                )
        return found

    def _is_older(self, doubt: Doubt) -> bool:
        return self.since_ms is not None and doubt.last_ms is not None and doubt.last_ms < self.since_ms

    def _is_pruned(self, doubt: Doubt) -> bool:
        if self.keep_ms is None or doubt.last_ms is None or self.now_ms - doubt.last_ms < self.keep_ms:
            return False
        return waiver_of(self.waivers, doubt.what, doubt.count) is not None


def doubts_of(
    config: AuditConfig,
    captured: Capture,
    commit: Commit,
    tail: Mapping[str, int],
    late: Mapping[str, int],
    rows: Rows,
    waivers: Sequence[Accepted],
    now_ms: int,
    since_ms: int | None = None,
) -> Doubts:
    """All of a run. `tail` {name: count} is what the part that is read again had, `late` what came for pruned
    windows; `rows` are the report's; `since_ms` is the verdict's horizon."""
    counted = Counter({what: n for what, n in commit.untrusted.items() if not upkeep.is_unaudited(what)})
    counted.update(tail)
    counted.update({what: count for what, count in late.items() if what.startswith(upkeep.LATE)})
    streams = streams_of(config, captured)
    with_rows: set[str] = set()
    for part in parts_of(rows, ["state", "stream"]):
        settled = part.filter(pc.equal(part["state"], str(WindowState.SETTLED)))
        with_rows.update(settled["stream"].unique().to_pylist())
    last_ms = {
        what: at_ms for what, at_ms in commit.untrusted_at.items() if what not in tail and what not in late
    }
    found = [
        *doubts_of_counts(counted, last_ms),
        *doubts_of_events(captured.ledger, {each.stream: each.topic for each in streams}, config.topics),
        *(Doubt(what, 1) for what in dict.fromkeys([*captured.untrusted, *captured.silent_sources])),
        *doubts_of_topics(config, captured),
        *conflicts_of(streams, config.topics, with_rows),
        *(
            Doubt(f"{reason}: stream {stream}{IN_TOPIC}{topic}", 1, topic, stream in with_rows)
            for reason, stream, topic in doubtful_names(rows)
        ),
    ]
    standing = standing_accepted(waivers, {each.what: each.count for each in found})
    return Doubts(found, standing, config.keep_ms, now_ms, since_ms)


def doubts_of_topics(config: AuditConfig, captured: Capture) -> list[Doubt]:
    """Audited topics that could not be looked at: those that a cluster does not tell of, and those that are
    nowhere where producers write and that no producer tells of, which a slip of the pen makes."""
    found = [Doubt(what, 1, audited_topic(place)) for (_, place), what in captured.withheld.items()]
    written = config.sources() or config.clusters
    known = {audited_topic(pin.topic) for pin in captured.pins if pin.cluster in written}
    known |= {each.topic for each in found}
    known |= {facts.topic for facts in streams_of(config, captured)}
    for topic in config.topics:
        if topic not in known:
            where = "source cluster" if config.sources() else "cluster"
            found.append(Doubt(f"no {where} has topic {topic}, and no producer tells of it", 1, topic))
    return found


def doubts_of_counts(counted: Mapping[str, int], last_ms: Mapping[str, int]) -> list[Doubt]:
    """Of {name: count} of records and batches; a name ends with its topic where it belongs to one."""
    return [
        Doubt(what, count, what.rpartition(IN_TOPIC)[2] if IN_TOPIC in what else "", False, last_ms.get(what))
        for what, count in counted.items()
    ]


def doubts_of_events(
    ledger: EventLedger, topic_of: Mapping[str, str], topics: Collection[str]
) -> list[Doubt]:
    """Events that could not be read. `topic_of` {stream: topic}; what names no stream of one of `topics` may
    belong to any."""
    found = []
    for what, count in Counter(ledger.untrusted).items():
        topic = topic_of.get(ledger.untrusted_streams.get(what, ""), "")
        found.append(Doubt(what, count, topic if topic in topics else ""))
    rest = ledger.untrusted_count - len(ledger.untrusted)
    return [*found, Doubt("more events that could not be read", rest)] if rest > 0 else found


def conflicts_of(
    streams: Iterable[StreamFacts], topics: Collection[str], with_rows: Collection[str]
) -> list[Doubt]:
    """Streams of which the events contradict each other; `with_rows` are those that have settled rows."""
    return [
        Doubt(
            f"{conflict}: stream {facts.stream} of {visible(facts.producer)}{IN_TOPIC}{facts.topic}",
            1,
            facts.topic,
            facts.stream in with_rows,
        )
        for facts in streams
        if facts.topic in topics
        for conflict in facts.conflicts
    ]
