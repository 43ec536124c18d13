"""What a run of the audit said, held against the truth of its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from tests.simulation.audit_case import Case
from tests.simulation.audit_expected import Expected, Told
from tests.simulation.audit_logs import Rec
from tests.simulation.audit_oracle import Oracle
from tests.simulation.audit_outcome import PROVEN, Outcome, RowSaid, Sums
from tests.simulation.audit_result import Result
from tests.simulation.audit_upkeep import Upkeep, is_older
from tests.simulation.audit_world import World
from tests.verdicts import overall_verdict


def members(ranges) -> set[int]:
    return {sequence for first, last in ranges for sequence in range(first, last + 1)}


def allow_late_groups(row: WindowVerdict, expected: Expected) -> None:
    """While a group has not come to the end, its commit may lie within a cell, which is decided when it was
    passed in whole: until then what the group lost may be called in flight."""
    for hop in [hop for hop in expected.lost if hop[1].startswith("group:")]:
        said = members(row.missing.get(hop, ()))
        if said < expected.lost[hop]:
            expected.in_flight[hop] = expected.in_flight.get(hop, set()) | expected.lost[hop] - said
            expected.lost[hop] = said
            if not said:
                del expected.lost[hop]
    for hop, ranges in row.in_flight.items():
        if hop[1].startswith("group:") and members(ranges) & expected.unknown:
            expected.in_flight.setdefault(hop, set()).update(members(ranges) & expected.unknown)
            expected.unknown -= members(ranges) - members(row.unknown)
    for hop in [
        hop for hop in expected.lost_count if hop[1].startswith("group:") and hop not in row.missing_count
    ]:
        del expected.lost_count[hop]
        expected.undecided = True
    expected.decide(expected.proven)


def allow_cells_across_begins(row: WindowVerdict, expected: Expected) -> None:
    """What a group lost behind where it began is unknown where its cell was kept before that was told."""
    for hop in [hop for hop in expected.lost if hop[1].startswith("group:")]:
        named = members(row.missing[hop]) if hop in row.missing else set()
        unsure = (expected.lost[hop] & expected.answered_for & members(row.unknown)) - named
        expected.lost[hop] -= unsure
        expected.unknown |= unsure
        if not expected.lost[hop]:
            del expected.lost[hop]
    expected.decide(expected.proven)


def adopt(row: WindowVerdict, expected: Expected) -> None:
    """What the rules leave open is as the row has it, within what they do say: it is told as missing, and
    nothing is named that is not. All else of the row is exact, and so is what its verdict makes of this."""
    open_ = expected.open
    allowed = open_ & set().union(*expected.lost.values(), *expected.in_flight.values())
    allowed |= open_ & (expected.explained | expected.unknown)
    told = [
        *map(members, row.missing.values()), *map(members, row.in_flight.values()),
        *map(members, row.explained.values()), members(row.unknown),
    ]  # fmt: skip
    assert allowed == open_ and open_ <= set().union(*told), "something missing is not told"
    for mine, theirs in ((expected.lost, row.missing), (expected.in_flight, row.in_flight)):
        for hop in {*mine, *theirs}:
            both = (mine.get(hop, set()) - open_) | (members(theirs.get(hop, ())) & open_)
            mine[hop] = both
            if not both:
                del mine[hop]
    expected.explained -= open_
    expected.explained |= set().union(*map(members, row.explained.values())) & open_
    expected.unknown -= open_
    expected.unknown |= members(row.unknown) & open_
    for tier, open_ in expected.open_copies.items():
        named = members(row.duplicates.get(tier, ())) & open_
        expected.doubled[tier] = (expected.doubled.get(tier, set()) - open_) | named
        expected.extra[tier] = row.extra_copies.get(tier, 0)
        if not expected.doubled[tier]:
            del expected.doubled[tier]
        if not expected.extra[tier]:
            del expected.extra[tier]
    expected.decide(expected.proven)


def compare(row: WindowVerdict, expected: Expected, found: Counter[str], quiet: bool) -> None:
    """One row must say exactly what is expected."""
    own = row.window_start_ms is None
    if not own:
        assert (row.published, row.ambiguous) == (expected.published, expected.ambiguous), "reported"
        assert (dict(row.consumed), dict(row.seen)) == (expected.consumed, expected.seen), "consumed"
    if expected.approximate:
        check_bounds(row, expected)
        return
    if not own:
        groups_miss = any(
            hop[1].startswith("group:") for hop in (*expected.lost, *expected.lost_count, *row.in_flight)
        )
        if groups_miss or expected.open or expected.open_copies:
            before = deepcopy(expected)
            allow_cells_across_begins(row, expected)
            if not quiet:
                allow_late_groups(row, expected)
            if expected.open or expected.open_copies:
                adopt(row, expected)
            expected.softened = expected != before
    assert members(row.unknown) == expected.unknown, "unknown"
    if not own:
        assert {hop: members(r) for hop, r in row.missing.items()} == expected.lost, "lost"
        assert {hop: members(r) for hop, r in row.in_flight.items()} == expected.in_flight, "in flight"
        assert set().union(*map(members, row.explained.values())) == expected.explained, "explained"
        assert members(row.unreported) == expected.unreported, "unreported"
        named = {tier: members(r) for tier, r in row.duplicates.items()}
        assert dict(row.missing_count) == expected.lost_count, "count short"
        assert named == expected.doubled, "duplicates"
        assert dict(row.extra_copies) == expected.extra, "extra copies"
        if expected.content_open and row.content_checked == "differs" and not expected.differs:
            assert expected.contents_vary, "contents are the same"
            expected.differs = True
            expected.decide(expected.proven)
        assert (row.content_checked == "differs") == expected.differs, "content"
    assert str(row.verdict) == expected.verdict, f"{row.verdict}, not {expected.verdict}: {row.reasons}"
    assert str(row.state) == expected.state, f"{row.state}, not {expected.state}"
    found[str(row.verdict)] += 1
    for name, there in (
        ("in flight", row.in_flight), ("explained", row.explained), ("unreported", row.unreported),
        ("unknown", row.unknown), ("content differs", expected.differs), ("count short", row.missing_count),
        ("count over", row.extra_copies and not row.duplicates),
        ("lost in group", any(hop[1].startswith("group:") for hop in row.missing)),
    ):  # fmt: skip
        found[name] += bool(there)


def check_bounds(row: WindowVerdict, expected: Expected) -> None:
    """A row of which the rules lay down no more than this: less may be decided, nothing wrongly."""
    missing = set().union(*expected.lost.values(), *expected.in_flight.values())
    named = set().union(*map(members, row.missing.values()))
    assert named <= missing | expected.explained | expected.unknown, "lost"
    told = named.union(*map(members, row.in_flight.values()), *map(members, row.explained.values()))
    assert missing <= told | members(row.unknown), "something missing is not told"
    assert not (missing or expected.unreported) or row.verdict > Verdict.COUNT_MATCH, "a false proof"
    expected.verdict = str(row.verdict)
    assert str(row.state) == expected.state, f"{row.state}, not {expected.state}"


def check_truth(
    world: World,
    result: Result,
    acknowledged: dict[str, list[Rec]],
    *,
    raced: bool = False,
    waived: Collection[tuple[str, int]] = (),
    pruned: Mapping[str, Collection[int]] | None = None,
    late: Collection[tuple[str, int]] = (),
) -> None:
    """Against the world itself: a proof is true, and so is all below the watermark. What came `late` for a
    window whose evidence was `pruned` is told as that.

    `acknowledged` as it was when the audit began to look. Of a stream whose every event and record vanished
    only a roster could tell.
    """
    known = {row.stream for row in result.rows if row.stream} | set(pruned or ())
    numbered = {
        rec: (stream, world.topic_of[stream])
        for stream, recs in acknowledged.items()
        if stream in known
        for rec in recs
    }
    arrived = {
        aggregate: Counter(
            (copy.rec.stream, copy.rec.sequence)
            for log in world.cluster_logs(aggregate)
            for copy in log.copies
            if copy.state == "written"
        )
        for aggregate in world.aggregates
    }
    proven = overall_verdict(result.rows) <= Verdict.COUNT_MATCH
    settled = {(row.stream, row.window_start_ms) for row in result.rows if row.state is WindowState.SETTLED}
    for rec, (stream, topic) in numbered.items():
        if (stream, rec.sequence) in late:
            continue
        watermark = result.watermarks[topic]
        safe = watermark is not None and rec.created_ms < watermark and (topic, rec.window) not in waived
        if safe or (proven and (stream, rec.window) in settled):
            for aggregate in world.aggregates:
                times = arrived[aggregate][stream, rec.sequence]
                # What was seen was there, and may be gone by now, with the log that it was in.
                gone = world.vanished_below[aggregate, stream, rec.sequence]
                # A copy that came after the audit looked is the next run's; one that expired before is gone.
                once = times == 1 or gone or (times and (raced or world.kinds["expired"]))
                assert once, f"{rec} is {times} times in {aggregate}, and proven"


def check_named(world: World, result: Result, pruned: Mapping[str, Collection[int]] | None = None) -> None:
    """Whatever happened while the audit looked: what it names as lost is nowhere below.

    A record whose time was changed on its way, so that it is of a window whose evidence was `pruned` by then,
    is told as one that came late there; where it was from, it is lost.

    A foreign mirror's progress is told by what arrived. A record that arrived with the number of a later one
    of the same window cannot be told from that one, so that what stands between them looks passed.
    """
    misled = world.foreign and world.renumbered & {
        (copy.rec.stream, copy.rec.sequence, copy.rec.window)
        for log in world.source_logs()
        for copy in log.copies
    }
    held = {
        cluster: {
            (copy.rec.stream, copy.rec.sequence)
            for log in logs
            for copy in log.visible(0, log.end)
            # Another record that got this number on the way is not the lost one.
            if cluster in world.sources
            or (copy.rec.stream, copy.rec.sequence, copy.rec.window) not in world.renumbered
            if copy.rec.window not in (pruned or {}).get(copy.rec.stream, ())
        }
        for cluster in [*world.sources, *world.aggregates]
        for logs in [world.cluster_logs(cluster)]
    }
    for row in result.rows:
        for (_, tier), ranges in row.missing.items():
            for cluster in tier.split("+"):
                if cluster in held and not (misled and cluster in world.aggregates):
                    there = {
                        sequence for sequence in members(ranges) if (row.stream, sequence) in held[cluster]
                    }
                    assert not there, f"{sorted(there)} of {row.stream} are in {cluster}, and called lost"
        for tier, ranges in row.duplicates.items():
            if tier in held:
                copies = Counter(
                    copy.rec.sequence
                    for log in world.cluster_logs(tier)
                    for copy in log.copies
                    if copy.rec.stream == row.stream
                )
                # One may have stood in a log that is not there any more, or not so long.
                gone = world.kinds["topic recreated"] or world.kinds["log shortened"]
                old = gone and tier in world.sources
                old = old or tier in {cluster for cluster, _, _ in world.vanished_below}
                assert old or all(copies[sequence] > 1 for sequence in members(ranges)), "no such duplicate"


def check_run(
    world: World,
    oracle: Oracle,
    result: Result,
    acknowledged: dict[str, list[Rec]],
    seen: Seen,
    *,
    dies: bool = False,
) -> None:
    told = oracle.told()
    said: dict[str, dict[int | None, WindowVerdict]] = {}
    owed = [row for row in result.rows if not row.stream]
    for row in result.rows:
        if not row.stream:
            continue
        assert row.window_start_ms not in said.setdefault(row.stream, {}), "two rows for one window"
        said[row.stream][row.window_start_ms] = row
    upkeep, late = seen.upkeep, seen.upkeep.untrusted(oracle, told, world.topic_of, dies=dies)
    untrusted = dict(Counter(oracle.untrusted()) + late)
    outcome = Outcome(told, world.topic_of, untrusted, waivers=dict(seen.waivers), gone=list(upkeep.gone))
    outcome.now_ms = result.now_ms
    exactly, came_late = True, set(upkeep.late_copies(oracle))
    for stream in sorted(oracle.streams() | set(said)):
        case = Case(oracle, told.get(stream, Told(stream)), came_late)
        expected = upkeep.remaining(stream, case.rows())
        rows = said.get(stream, {})
        assert set(rows) == set(expected), f"{stream}: windows {sorted(rows, key=str)}"
        for start_ms, row in rows.items():
            each = expected[start_ms]
            try:
                compare(row, each, seen.findings, bool(world.kinds["quiesced"]))
            except AssertionError as problem:
                raise AssertionError(f"{problem}\n{row}\nexpected {each}") from problem
            inexact = each.approximate or each.softened or each.open or each.open_copies
            seen.rows["by inequality" if inexact else "exactly"] += 1
            exactly = exactly and not inexact
            said_of = (each.verdict, each.state, each.silent, each.not_before_ms)
            made_ms = result.made_ms[row.topic, stream, start_ms, row.producer]
            outcome.rows.append(
                RowSaid(
                    row.topic,
                    stream,
                    start_ms,
                    *said_of,
                    *sizes(row),
                    made_ms,
                    each.silent_from_ms,
                    differs=row.content_checked == "differs",
                )
            )
            if not world.racing:
                upkeep.check_made(outcome.rows[-1], each, result.now_ms, dies=dies)
    said_of_roster = Counter((row.topic, row.window_start_ms, row.not_before_ms) for row in owed)
    outcome.rows += [
        replace(each, made_ms=result.made_ms.get((each.topic, "", each.start_ms, each.producer)))
        for topic in world.topics.audited
        for each in outcome.owed(topic, world.members, world.name_of)
    ]
    outcome.carried = upkeep.carried(outcome.rows)
    outcome.older = {row for row in outcome.rows if is_older(row, result.since_ms)}
    due = [row for row in outcome.rows if not row.stream]
    assert said_of_roster == Counter((row.topic, row.start_ms, row.not_before_ms) for row in due), "roster"
    seen.findings["owed"] += any(row.start_ms is not None for row in due)
    seen.findings["never came"] += any(row.start_ms is None and row.not_before_ms is None for row in due)
    seen.findings["never came back"] += any(row.not_before_ms is not None for row in due)
    seen.rows["looks exactly" if exactly else "looks by inequality"] += 1
    check_outcome(world, oracle, result, outcome)
    known_late = {(each.rec.stream, each.rec.sequence) for each in came_late}
    check_truth(world, result, acknowledged, waived=outcome.waived(), pruned=upkeep.windows, late=known_late)
    upkeep.prune(result.pruned, outcome.rows, outcome.waived(), oracle, told, result.now_ms)
    world.kinds["pruned"] += bool(result.pruned)
    world.kinds["late for a pruned window"] += bool(late)
    seen.findings["pruned waived"] += any(row.verdict not in PROVEN for row in upkeep.gone)
    seen.findings["late record"] += bool(came_late)
    seen.findings["older than the horizon"] += bool(outcome.older)
    seen.findings["still deciding"] += bool(result.since_ms and len(outcome.older) < len(outcome.rows))
    seen.waivable = outcome.waivable()
    seen.findings["waiver stands"] += bool(outcome.waived())
    seen.findings["waiver lapsed"] += outcome.waived() != set(seen.waivers)
    seen.findings["all proven"] += overall_verdict(result.rows) <= Verdict.COUNT_MATCH
    seen.findings["all proven at rest"] += bool(world.kinds["quiesced"]) and result.exit_status == 0
    seen.findings["watermark"] += any(each is not None for each in result.watermarks.values())
    seen.findings["untrusted"] += bool(outcome.untrusted)
    seen.findings["watermark held"] += any(
        result.watermarks[topic] != outcome.proven_to(topic) for topic in result.watermarks
    )
    seen.findings[f"status {result.exit_status}"] += 1


def check_outcome(world: World, oracle: Oracle, result: Result, outcome: Outcome) -> None:
    """What users and their programs read of the whole run."""
    assert result.untrusted == outcome.untrusted, f"{result.untrusted} untrusted, not {outcome.untrusted}"
    expected = {topic: outcome.watermark(topic, oracle.watermarks.get(topic)) for topic in result.watermarks}
    assert result.watermarks == expected, f"watermarks {result.watermarks}, not {expected}"
    summary = result.summary
    standing = {(each["topic"], each["window_start"]) for each in summary["waivers"] if each["stands"]}
    assert standing == {(topic, iso_time(start_ms)) for topic, start_ms in outcome.waived()}, "waivers"
    assert summary["watermarks"] == {topic: iso_time(at) for topic, at in expected.items()}
    assert summary["untrusted"] == [
        {"what": what, "count": count} for what, count in sorted(outcome.untrusted.items())
    ]
    assert (summary["verdict"], result.exit_status) == (outcome.verdict(), outcome.exit_status())
    assert summary["exit_status"] == result.exit_status
    assert summary["windows"] == dict(sorted(outcome.windows().items()))
    past = summary["older"]["windows"] if "older" in summary else {}
    assert past == outcome.windows(older=True), f"older: {past}, not {outcome.windows(older=True)}"
    for row in result.rows:
        told = row.stream in outcome.told or any(
            each.rec.stream == row.stream and each.cluster in world.sources for each in oracle.shown
        )
        # Of a stream that is only in an aggregate which merges topics, nobody can tell which one it was of.
        if told and row.stream in world.topic_of:
            assert row.topic == world.topic_of[row.stream], f"{row.stream} is not of topic {row.topic}"


@dataclass(slots=True)
class Seen:
    """Of a scenario: what happened, what was said, and how the rows and looks were compared."""

    kinds: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    waivers: dict[tuple[str, int], Sums] = field(default_factory=dict)
    waivable: dict[tuple[str, int], Sums] = field(default_factory=dict)
    upkeep: Upkeep = field(default_factory=Upkeep)


def sizes(row: WindowVerdict) -> tuple[int, int, int]:
    """How many are missing, extra copies, and in doubt."""
    doubtful = [*row.in_flight.values(), row.unreported, row.unknown, *row.explained.values()]
    missing = sum(len(members(each)) for each in row.missing.values()) + sum(row.missing_count.values())
    return missing, sum(row.extra_copies.values()), sum(len(members(each)) for each in doubtful)
