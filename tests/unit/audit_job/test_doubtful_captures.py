"""What the job makes of evidence that is stale, foreign, doubled or cut short: nothing of it may pass for a
proof, and nothing for a loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from pyroaring import BitMap64

from millrace.audit.config import parse_config
from millrace.audit.contract.events import (
    CLOSED,
    HEARTBEAT,
    OPENED,
    CountEvent,
    EventLedger,
    GapEvent,
    StreamEvent,
    StreamFacts,
    TierEvent,
    encode_event,
)
from millrace.audit.job import _judge, _reconcile, _reconciler
from millrace.audit.keeping.state import Commit, ReadPosition, StateFolder, UnreadNote
from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.reconciliation.settled import unnumbered
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.runs import capture as capture_module
from millrace.audit.runs import event_reading
from millrace.audit.runs.capture import Capture, MirrorPosition
from millrace.audit.runs.event_reading import EventsRead
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.runs.reading_plan import passages, plan_backfill, plan_ranges
from millrace.audit.runs.reconciling import streams_of
from millrace.audit.runs.run import Run
from millrace.audit.runs.state_checks import check_clusters, check_names, check_window
from millrace.audit.runs.untrusted import Doubts
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.scanning.cells import Cell
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.offsets import EARLIEST
from millrace.broker.errors import ConfigError, MillraceError
from millrace.broker.protocol.mirror_positions import Position, encode_key, encode_value
from tests.cells import encode_bitmaps, table_of
from tests.settling import OnePart
from tests.verdicts import overall_verdict

STREAM, SESSION = "00000000000000ab", "00000000000000cd"
PLACE = ("ewr", "flights", 0)


def config(**changes):
    clusters = {
        "ewr": {"bootstrap": ["h:1"], "tier": "source"},
        "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
    }
    for name, fields in changes.pop("clusters", {}).items():
        clusters[name] = clusters.get(name, {}) | fields
    return parse_config({"clusters": clusters, "topics": ["flights"], **changes})


def pin(cluster="ewr", topic_id="new", end=10, **changes):
    return PartitionPin(cluster, "flights", "flights", 0, topic_id, 0, end, **changes)


def position(next_offset, topic_id="", **changes):
    fields = {"aggregate": "agg", "mirror": "m", "source": "ewr", "topic": "flights", "partition": 0}
    return MirrorPosition(**{**fields, **changes}, next_offset=next_offset, topic_id=topic_id)


def events(sequences, topic="flights", at_ms=0):
    about = {"stream": STREAM, "session": SESSION, "topic": topic, "producer": "AA", "window_ms": 60_000}
    return [
        CountEvent(
            **about, window_start_ms=0, report=1, count=len(sequences), byte_count=0, at_ms=at_ms,
            acknowledged=BitMap64(sequences), ambiguous=BitMap64(), failed=BitMap64(),
        ),
        StreamEvent(
            **about, state=CLOSED, host="", application="", datacenter="", last_assigned=max(sequences),
            last_settled=max(sequences), no_earlier_than_ms=None, lease_ms=60_000, at_ms=at_ms,
        ),
    ]  # fmt: skip


def cell(cluster, sequences, topic="flights", topic_id="new", first=0):
    ((base, bitmap),) = encode_bitmaps(np.array(sorted(sequences), dtype=np.uint64))
    return Cell(
        tier=cluster, cluster=cluster, topic=topic, partition=0, stream=STREAM, producer="AA",
        window_start_ms=0, chunk_start=first, count=len(sequences), byte_count=0, first_offset=first,
        last_offset=first + len(sequences) - 1, base=base, bitmap=bitmap, topic_id=topic_id,
    )  # fmt: skip


def run_of(captured, settings=None, before=None):
    settings = settings or config()
    ranges, unread = plan_ranges(captured, settings, before or Commit())
    return Run(
        config=settings, state=SimpleNamespace(), before=before or Commit(), captured=captured,
        now_ms=10_000_000, number=1, name="none", ranges=ranges, unread=unread,
        facts=facts_table(captured.ledger, captured.origins, None, settings.group_names()),
    )  # fmt: skip


def verdicts(captured, cells, settings=None, after=None, doubts=()):
    job = run_of(captured, settings)
    after = after or Commit(unread=job.unread)
    reconciler = _reconciler(job, after, doubts)
    return [row for row, _ in reconciler.verdicts(table_of(cells), job.facts.to_pylist())]


def captured_of(sequences=(1, 2), origins=("ewr",), topic="flights", pins=None, positions=(), gaps=()):
    ledger = EventLedger()
    ledger.learn_all([*events(list(sequences), topic), *gaps])
    captured = Capture(10_000_000, ledger, {STREAM: set(origins)})
    captured.pins = list(pins if pins is not None else [pin(), pin("agg")])
    captured.positions = list(positions)
    return captured


def test_the_position_of_a_deleted_topic_has_passed_nothing_of_the_new_one():
    """The topic was made anew, and the mirror has not told a position in it yet."""
    captured = captured_of(positions=[position(5000, "old")])
    rows = verdicts(captured, [cell("ewr", [1, 2])])
    assert not rows[0].missing and rows[0].in_flight
    assert passages(captured) == {"agg": {PLACE: Passage(0, "new")}}


def test_a_deleted_topics_position_does_not_hide_the_new_one_of_another_mirror():
    captured = captured_of(positions=[position(5000, "old"), position(2, "new", mirror="m2")])
    assert passages(captured) == {"agg": {PLACE: Passage(2, "new")}}


def test_records_of_the_deleted_topic_itself_are_lost():
    captured = captured_of(positions=[position(0, "old")])
    rows = verdicts(captured, [cell("ewr", [1, 2], topic_id="old")])
    assert rows[0].missing == {("ewr", "agg"): ((1, 2),)}


def test_a_topic_made_anew_before_the_first_look_is_known_by_the_mirrors_position():
    """What the deleted topic held was never read: it may have been carried on and expired since."""
    captured = captured_of(positions=[position(5, "old")])
    rows = verdicts(captured, [])
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing
    assert [note.cause for note in run_of(captured).unread] == ["recreated"]
    known = Commit(offsets={"ewr/flights/0": ReadPosition(3, "new")})
    assert run_of(captured, before=known).unread == []


def test_nor_is_what_it_held_a_loss_once_the_mirror_has_gone_on_in_the_new_one():
    """Its position tells of the old topic no more; that the topic is another one, its gap does."""
    made_anew = GapEvent("m", "ewr", "flights", 0, 5, 5, "recreated", 0, "old", has_open_end=True)
    captured = captured_of(positions=[position(0, "new")], gaps=[made_anew])
    (row,) = verdicts(captured, [])
    assert (row.verdict, row.missing, row.unknown) == (Verdict.UNKNOWN, {}, ((1, 2),))
    known = Commit(offsets={"ewr/flights/0": ReadPosition(0, "new")})
    assert run_of(captured, before=known).unread == [], "it has looked since"
    assert plan_backfill(captured, config(), known)[1] == [], "and so it has for who counts anew"
    assert [note.cause for note in plan_backfill(captured, config(), Commit())[1]] == ["recreated"]


@pytest.mark.parametrize(
    ("seen_ms", "cause", "unknown"),
    [(-600_001, "recreated", ()), (-599_999, "recreated", ((1, 2),)), (-599_999, "expired", ())],
)
def test_what_came_when_the_old_topic_was_long_gone_is_lost_all_the_same(seen_ms, cause, unknown):
    """The gap tells when the mirror saw the new topic; clocks may differ by the grace (ten minutes here)."""
    gap = GapEvent("m", "ewr", "flights", 0, 5, 5, cause, seen_ms, "old", has_open_end=True)
    captured = captured_of(positions=[position(0, "new")], gaps=[gap])
    _, closed = events([1, 2])
    captured.ledger.learn(replace(closed, state=OPENED, last_assigned=0, last_settled=0))
    (row,) = verdicts(captured, [], config(grace="10m"))
    assert (row.unknown, row.missing) == (unknown, {} if unknown else {("produced", "ewr"): ((1, 2),)})


class FakeCluster:
    def __init__(self, name, cluster_id=None, topics=(), ends=None, refused=()):
        self.name, self.cluster_id, self.topics, self.ends = name, cluster_id, topics, ends or {}
        self.refused = dict(refused)

    async def metadata(self, topics=None, max_age_ms=0):
        names = self.topics if topics is None else [t for t in topics if t in self.topics]
        described = SimpleNamespace(topic_id=NO_TOPIC_ID)
        return SimpleNamespace(
            cluster_id=self.cluster_id,
            topics=dict.fromkeys(names, described),
            topic_errors=self.refused,
            partitions=lambda topic: [(topic, 0)] if topic in names else [],
        )

    async def list_offsets(self, timestamps, read_committed=False):
        (at,) = set(timestamps.values())
        offset = 0 if at == EARLIEST else self.ends.get(read_committed, 0)
        return {key: SimpleNamespace(offset=offset, leader_epoch=-1) for key in timestamps}


async def no_sizes(cluster, bounds):
    return {}


def test_what_an_open_transaction_hides_is_in_doubt_and_not_lost(monkeypatch):
    """Another producer's open transaction keeps acknowledged records above the last stable offset."""
    captured = captured_of(pins=[])
    cluster = FakeCluster("ewr", topics=["flights"], ends={True: 1, False: 2})
    monkeypatch.setattr(capture_module, "bytes_per_offset", no_sizes)
    asyncio.run(capture_module._pin_cluster(captured, config(), cluster))
    assert captured.pins[0].end_offset == 1
    rows = verdicts(captured, [cell("ewr", [1]), cell("agg", [1])])
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing
    job = run_of(captured)
    assert job.unread == [], "it is over when the transaction ends, so it is not kept"


def test_a_groups_word_tells_of_a_stream_and_not_where_it_was_produced(monkeypatch):
    """What is told is not forgotten: a group's event would bring a stream back without its cells."""
    group = TierEvent("a/b", "0" * 15 + "1", "flights", "AA", 0, 60_000, 1, 1, 0, BitMap64([1]), 5)

    async def read(cluster, topic, **options):
        for offset, event in enumerate([group, *events([1])]):
            key, value = encode_event(event)
            yield SimpleNamespace(key=key, value=value, offset=offset, partition=0)

    monkeypatch.setattr(event_reading, "read_topic_to_end", read)
    captured = captured_of()
    captured.origins = {}
    clusters = {"ewr": FakeCluster("ewr", topics=["millrace.audit"])}
    asyncio.run(event_reading.read_events(captured, config(), clusters, EventsRead(), Commit()))
    assert captured.told == {group.stream, STREAM}
    assert captured.origins == {STREAM: {"ewr"}}


def read_positions(monkeypatch, records, ids):
    async def read(cluster, topic):
        for key, value in records:
            yield SimpleNamespace(key=key, value=value, offset=0, partition=0)

    monkeypatch.setattr(capture_module, "read_topic_to_end", read)
    captured = captured_of()
    clusters = {name: FakeCluster(name, ids[name], ["millrace.positions.m"]) for name in ids}
    metadata = {name: SimpleNamespace(cluster_id=ids[name]) for name in ids}
    asyncio.run(capture_module._read_positions(captured, config(), clusters, metadata))
    return captured


POSITION_KEY = encode_key("ewr", "flights", 0)


def position_in(cluster_id, next_offset):
    return encode_value(Position(next_offset, cluster_id, NO_TOPIC_ID, -1, 0))


def test_the_position_in_another_cluster_of_the_same_name_says_nothing(monkeypatch):
    """The cluster was replaced by a new one: the old one's offsets mean nothing in it."""
    ids = {"ewr": "E2", "agg": "A"}
    assert read_positions(monkeypatch, [(POSITION_KEY, position_in("E1", 5000))], ids).positions == []
    assert len(read_positions(monkeypatch, [(POSITION_KEY, position_in("E2", 5000))], ids).positions) == 1
    unknown = {"ewr": None, "agg": "A"}
    assert len(read_positions(monkeypatch, [(POSITION_KEY, position_in("E1", 5000))], unknown).positions) == 1


def test_the_gap_of_a_mirror_that_calls_the_cluster_otherwise_is_understood(monkeypatch):
    key = encode_key("newark", "flights", 0)
    captured = read_positions(monkeypatch, [(key, position_in("E", 2))], {"ewr": "E", "agg": "A"})
    captured.ledger.learn(GapEvent("m", "newark", "flights", 0, 0, 2, "too_large", 0))
    captured.pins = [pin(topic_id=""), pin("agg")]
    rows = verdicts(captured, [cell("ewr", [1, 2])])
    assert rows[0].explained == {"too_large": ((1, 2),)} and not rows[0].missing


def test_one_cluster_under_two_names_is_refused():
    """An aggregate that points at its source would prove everything without a look at the aggregate."""
    metadata = {name: SimpleNamespace(cluster_id="E") for name in ("ewr", "agg")}
    with pytest.raises(ConfigError, match="agg"):
        capture_module.check_distinct(config(), metadata)
    renamed = config(clusters={"agg": {"topics": {"flights": "all-flights"}}})
    capture_module.check_distinct(renamed, metadata)
    metadata["agg"].cluster_id = "A"
    capture_module.check_distinct(config(), metadata)


def test_topics_merged_by_a_rename_are_no_conflict():
    settings = config(
        clusters={"agg": {"topics": {"flights": "all", "hotels": "all"}}}, topics=["flights", "hotels"]
    )
    captured = captured_of(positions=[position(2)])
    cells = [cell("ewr", [1, 2]), cell("agg", [1, 2]), cell("agg", [1, 2], topic="hotels")]
    rows = verdicts(captured, cells, settings)
    assert overall_verdict(rows) is Verdict.PROVEN


def test_a_stream_of_a_cluster_that_is_not_audited_is_in_doubt_and_not_lost():
    """Its events came through the mirror; how far its records are on their way is not known."""
    rows = verdicts(captured_of(origins=()), [cell("agg", [1])])
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing


def test_a_stream_produced_into_the_only_audited_cluster_is_judged():
    settings = parse_config(
        {"clusters": {"agg": {"bootstrap": ["h:2"], "tier": "aggregate"}}, "topics": ["flights"]}
    )
    rows = verdicts(captured_of(origins=(), pins=[pin("agg")]), [cell("agg", [1])], settings)
    assert rows[0].missing == {("produced", "agg"): ((2, 2),)}


def test_cells_of_another_window_length_are_refused():
    check_window(config(window="60s"), Commit())
    check_window(config(window="60s"), Commit(number=3, window_ms=60_000))
    with pytest.raises(MillraceError, match="window"):
        check_window(config(window="60s"), Commit(number=3, window_ms=600_000))


def test_what_is_read_when_makes_a_missing_record_a_loss_and_not_lag(monkeypatch):
    """A group commits after it reports, a mirror writes its position after the aggregate has the records:
    what says "passed" is read before what says "seen", and what producers acknowledged before both."""
    order = []

    class Silent(FakeCluster):
        def __init__(self, name, *_, **__):
            super().__init__(name, f"id of {name}")

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    def noting(step, result=None):
        async def note(*given):
            order.append(step if step != "pins" else f"pins of {', '.join(given[3])}")
            return result

        return note

    monkeypatch.setattr(capture_module, "Cluster", Silent)
    monkeypatch.setattr(capture_module, "_committed", noting("commits", {}))
    monkeypatch.setattr(capture_module, "read_events", noting("events"))
    monkeypatch.setattr(capture_module, "_pin", noting("pins"))
    monkeypatch.setattr(capture_module, "_read_positions", noting("positions"))
    monkeypatch.setattr(capture_module, "read_new_gaps", noting("gaps"))
    asyncio.run(capture_module.capture(config(groups={"ewr": ["billing"]}), EventLedger(), lambda: 1))
    assert order == ["commits", "events", "pins of ewr", "positions", "gaps", "gaps", "pins of agg"]


def test_counts_are_read_where_producers_tell_them_and_gaps_where_mirrors_do(monkeypatch):
    """`audit_topic` is the producers' `millrace.audit.topic`; a mirror's topic has one name only."""
    told = {"counts": b"stream/0000000000000001", "millrace.audit": b"stream/0000000000000002"}
    read = []

    async def read_to_end(cluster, topic, since=None, until=None, **options):
        read.append((topic, since, until))
        yield SimpleNamespace(key=told[topic], value=b"{}", partition=0, offset=6)

    monkeypatch.setattr(event_reading, "read_topic_to_end", read_to_end)
    settings = config(audit_topic="counts")

    async def look(*topics):
        captured, cluster = Capture(1, EventLedger()), FakeCluster("ewr", topics=topics, ends={True: 7})
        await event_reading.read_events(captured, settings, {"ewr": cluster}, EventsRead(), Commit())
        await event_reading.read_new_gaps(captured, cluster)
        return captured

    captured = asyncio.run(look("counts", "millrace.audit"))
    assert captured.told == {"0000000000000001", "0000000000000002"} == set(captured.origins)
    events = [(topic, {0: 0}, {0: 7}) for topic in ("counts", "millrace.audit")]
    assert read == [*events, ("millrace.audit", {0: 7}, None)]
    captured = asyncio.run(look("counts"))
    assert captured.told == {"0000000000000001"} and captured.silent_sources == []
    (silent,) = asyncio.run(look("millrace.audit")).silent_sources
    assert silent == "cluster ewr has no topic counts: its producers tell nothing"


def test_other_names_of_a_topic_need_another_state():
    """Its places would be others: every record would be read again, and look doubled."""
    known = Commit(number=1, window_ms=60_000, offsets={"agg/flights/0": ReadPosition(5, "id")})
    check_names(config(), known)
    check_names(config(clusters={"agg": {"topics": {"flights": "ewr.flights"}}}), known)
    with pytest.raises(ConfigError, match="for others use another"):
        check_names(config(clusters={"agg": {"topics": {"flights": ["a", "b"]}}}), known)
    several = Commit(number=1, offsets={"agg/flights@a/0": ReadPosition(5, "id")})
    check_names(config(clusters={"agg": {"topics": {"flights": ["a", "b"]}}}), several)
    with pytest.raises(ConfigError):
        check_names(config(), several)


def test_a_state_of_other_clusters_is_refused():
    known = Commit(number=1, offsets={"agg/flights/0": ReadPosition(5, "id")}, clusters={"agg": "one"})
    for ids in ({}, {"agg": "one"}, {"agg": "", "ewr": "new"}):  # one cluster more is the same audit
        check_clusters(config(), known, ids)
    check_clusters(config(), Commit(), {"agg": "one"})
    with pytest.raises(
        ConfigError, match=r"clusters\.agg\.bootstrap: got 'cluster two', expected cluster one"
    ):
        check_clusters(config(), known, {"agg": "two", "ewr": "new"})
    elsewhere = Commit(number=1, offsets={"hub/flights/0": ReadPosition(5, "id")})
    with pytest.raises(ConfigError, match=r"it is of another, of the clusters hub$"):
        check_clusters(config(), elsewhere, {})


def test_no_cell_lies_across_an_end_of_the_offsets_that_were_given_again():
    """A mirror's position from before the truncation is not believed within them, and is beyond them."""
    note = UnreadNote("ewr", "flights", 0, 3, 7, "truncated", 0)
    ranges, _ = plan_ranges(captured_of(pins=[pin()]), config(), Commit(unread=[note]))
    assert [(each.first_offset, each.end_offset) for each in ranges if each.size] == [(0, 3), (3, 7), (7, 10)]
    other = UnreadNote("ewr", "flights", 1, 3, 7, "truncated", 0)
    ranges, _ = plan_ranges(captured_of(pins=[pin()]), config(), Commit(unread=[other]))
    assert [(each.first_offset, each.end_offset) for each in ranges if each.size] == [(0, 10)]


def renamed(no_earlier_than_ms=10):
    """The source calls the topic otherwise, and so do its producer's events; its promise ends at 10."""
    settings = config(clusters={"ewr": {"topics": {"flights": "raw"}}}, producers=["AA"])
    captured = captured_of(topic="raw")
    captured.ledger.streams[STREAM] = StreamFacts(
        STREAM, topic="raw", producer="AA", state=HEARTBEAT, no_earlier_than_ms=no_earlier_than_ms
    )
    return settings, captured


def proven(start_ms):
    return WindowVerdict(
        topic="flights", producer="AA", stream="02", window_ms=10, window_start_ms=start_ms,
        verdict=Verdict.PROVEN, state=WindowState.SETTLED,
    )  # fmt: skip


def test_streams_are_known_by_the_audited_topic_in_whose_source_their_events_were_read():
    settings = config(
        clusters={"ewr": {"topics": {"flights": "raw"}}, "jfk": {"bootstrap": ["h:3"], "tier": "source"}}
    )
    captured = captured_of()
    told = {"a": ("raw", {"ewr"}), "b": ("flights", {"jfk"}), "c": ("raw", set()), "d": ("raw", {"jfk"})}
    captured.ledger.streams = {name: StreamFacts(name, topic=topic) for name, (topic, _) in told.items()}
    captured.origins = {name: origins for name, (_, origins) in told.items() if origins}
    found = {facts.stream: facts.topic for facts in streams_of(settings, captured)}
    assert found == {"a": "flights", "b": "flights", "c": "flights", "d": "raw"}
    assert captured.ledger.streams["a"].topic == "raw", "the state keeps what was told"


def test_a_promise_bounds_the_watermark_where_the_source_calls_the_topic_otherwise(tmp_path):
    settings, captured = renamed()
    job = run_of(captured, settings)
    job.state = StateFolder.open(tmp_path)
    assert _judge(job, unnumbered(verdict_rows([proven(0), proven(10)])), Doubts()).watermarks == {
        "flights": 10
    }


def test_a_producer_of_the_roster_is_heard_where_the_source_calls_the_topic_otherwise():
    settings, captured = renamed()
    found = SimpleNamespace(
        notes=lambda tail: CELL_SCHEMA.empty_table(),
        reconcile=lambda *_: OnePart(unnumbered(verdict_rows([proven(0)]))),
    )
    (rows,) = _reconcile(run_of(captured, settings), Commit(), found).parts()
    rows = rows.to_pylist()
    assert [(row["producer"], row["verdict"]) for row in rows] == [("AA", "PROVEN")]
