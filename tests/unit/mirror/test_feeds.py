"""Groups move by where records went, and not by what today's config would call the place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.protocol.mirror_positions import LOST
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.delivery.checkpoints import Positions, encode_key
from millrace.mirror.offsets.offset_map import UNKNOWN_TARGET
from millrace.mirror.offsets.translate import Outcome, Row, Translator
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.on_record import Clusters, OnRecord

EWR, JFK = SourcePartition("ewr", "flights", 0), SourcePartition("jfk", "flights_jfk", 0)
HERE, ELSEWHERE = TargetPartition("flights", 0), TargetPartition("other", 0)


def config(*, jfk: bool = False, offset: int = 0, **rename: str) -> MirrorConfig:
    sources: list[dict[str, Any]] = [
        {"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": ["flights"]}}
    ]
    if jfk:
        of_jfk = {"cluster": "jfk", "bootstrap": ["c:1"], "topics": {"include": ["flights.*"]}}
        sources.append(of_jfk | {"partition_offset": offset})
    return parse_config(
        {
            "name": "m",
            "target": {"cluster": "agg", "bootstrap": ["b:1"]},
            "sources": sources,
            "naming": {"rename": {key.replace("__", "/"): name for key, name in rename.items()}},
        }
    )


def row(
    found: MirrorConfig,
    on_record: OnRecord,
    committed: int,
    target: Clusters | None = None,
    *,
    allow_rereads: bool = False,
) -> Row:
    """Of ewr's partition."""
    clusters: Any = target or Clusters()
    reader: Any = on_record
    translator = Translator(found, clusters, {"ewr": clusters, "jfk": clusters}, reader)
    commits = {"ewr": {(EWR.topic, EWR.partition): CommittedOffset(committed)}}
    (only,) = asyncio.run(translator.rows(commits, allow_rereads=allow_rereads))
    return only


@pytest.fixture
def merged() -> OnRecord:
    """ewr's 1,000 records went to HERE, behind 700 of jfk."""
    on_record = OnRecord()
    on_record.position(EWR, 1_000, HERE)
    on_record.carried(EWR, range(1_000), HERE, 700)
    on_record.position(JFK, 700, HERE)
    on_record.carried(JFK, range(700), HERE, 0)
    return on_record


def test_records_of_a_source_that_has_left_still_lie_between(merged: OnRecord) -> None:
    """Whatever its topic would be called by the names of today."""
    assert row(config(jfk=True, jfk__flights_jfk="flights"), merged, 900).outcome is Outcome.MERGED
    found = row(config(), merged, 900)
    assert (found.outcome, found.target_offset) == (Outcome.MERGED, None)
    assert found.note == "records of jfk/flights_jfk-0 may be there as well"
    assert merged.asked_of == {("ewr", "flights"), ("jfk", "flights_jfk")}
    assert row(config(), merged, 900, allow_rereads=True).target_offset == 0


def test_records_of_a_topic_that_is_renamed_still_lie_where_they_went(merged: OnRecord) -> None:
    merged.position(JFK, 800, HERE, ELSEWHERE)
    merged.carried(JFK, range(700, 800), ELSEWHERE, 0)
    found = row(config(jfk=True, jfk__flights_jfk="other"), merged, 900)
    assert (found.outcome, found.target_offset) == (Outcome.MERGED, None)


@pytest.mark.parametrize("elsewhere", [TargetPartition("flights", 4), TargetPartition("jfk-flights", 0)])
def test_source_that_has_left_and_went_elsewhere_is_in_nobodys_way(elsewhere: TargetPartition) -> None:
    """Though its partition would be this one by the names that are left."""
    on_record, jfk = OnRecord(), SourcePartition("jfk", "flights", 0)
    on_record.position(EWR, 1_000, HERE)
    on_record.carried(EWR, range(1_000), HERE, 0)
    on_record.position(jfk, 700, elsewhere)
    on_record.carried(jfk, range(700), elsewhere, 0)
    found = row(config(), on_record, 900)
    assert (found.outcome, found.target_offset) == (Outcome.EXACT, 900)


def test_source_that_has_left_is_in_nobodys_way_once_its_records_are_gone(merged: OnRecord) -> None:
    target = Clusters()
    target.begins[HERE] = 699
    assert row(config(), merged, 900, target).outcome is Outcome.MERGED
    target.begins[HERE] = 700
    assert row(config(), merged, 900, target).outcome is Outcome.EXACT
    # One that is still carried may bring more at any time.
    assert row(config(jfk=True, jfk__flights_jfk="flights"), merged, 900, target).outcome is Outcome.MERGED
    merged.carried(JFK, range(700, 710), HERE, UNKNOWN_TARGET)  # and of these nobody knows
    assert row(config(), merged, 900, target).outcome is Outcome.MERGED


def test_source_that_has_left_and_does_not_say_where_it_went_may_have_gone_anywhere() -> None:
    """As programs before wrote it; or its position is lost."""
    on_record = OnRecord()
    on_record.position(EWR, 1_000)
    on_record.carried(EWR, range(1_000), None, 700)
    assert row(config(), on_record, 900).outcome is Outcome.EXACT, "its names say it"
    on_record.position(JFK, 700)
    assert row(config(), on_record, 900).outcome is Outcome.MERGED
    on_record.carried(JFK, range(700), None, 0)
    assert row(config(), on_record, 900).outcome is Outcome.MERGED
    assert row(config(jfk=True), on_record, 900).outcome is Outcome.EXACT
    on_record.positions.apply(encode_key(JFK), LOST)
    assert row(config(), on_record, 900).outcome is Outcome.MERGED
    target = Clusters()
    target.begins[HERE] = 700  # wherever they went: here they are not
    assert row(config(), on_record, 900, target).outcome is Outcome.EXACT


def test_records_of_which_no_map_speaks_are_not_left_out_of_what_is_read_again() -> None:
    """Nobody knows where they lie: then it is the beginning of what is there."""
    on_record, target = OnRecord(), Clusters()
    target.begins[HERE] = 10
    on_record.position(EWR, 1_000, HERE)
    on_record.carried(EWR, range(1_000), HERE, 700)
    on_record.position(JFK, 700, HERE)
    settings = config(jfk=True, jfk__flights_jfk="flights")
    found = row(settings, on_record, 900, target, allow_rereads=True)
    assert (found.outcome, found.target_offset) == (Outcome.REREADS, 10)
    on_record.position(JFK, 700, HERE, began=700)
    found = row(settings, on_record, 900, target, allow_rereads=True)
    assert (found.outcome, found.target_offset) == (Outcome.REREADS, 1_600), "there are none yet"


def test_what_was_carried_since_the_positions_were_read_is_not_translated_yet(merged: OnRecord) -> None:
    """A source may have begun to go there between the two readings: its records would be left out."""
    merged.positions = Positions()
    merged.position(EWR, 899, HERE)
    found = row(config(jfk=True, jfk__flights_jfk="flights"), merged, 900)
    assert (found.outcome, found.target_offset) == (Outcome.NOT_MIRRORED_YET, None)
    assert found.note == "the mirror is at 899"
    merged.position(EWR, 900, HERE)
    assert row(config(jfk=True, jfk__flights_jfk="flights"), merged, 900).outcome is Outcome.EXACT


def test_topic_that_is_renamed_translates_from_where_it_is_carried_under_the_new_name() -> None:
    """What a group has not read before that lies under the old one."""
    on_record = OnRecord()
    on_record.position(EWR, 1_000, HERE, ELSEWHERE)
    on_record.carried(EWR, range(700), HERE, 0)
    on_record.carried(EWR, range(700, 1_000), ELSEWHERE, 50)
    renamed = config(flights="other")
    too_old = row(renamed, on_record, 699)
    assert (too_old.outcome, too_old.target_offset, too_old.target) == (Outcome.TOO_OLD, None, ELSEWHERE)
    found = row(renamed, on_record, 700)
    assert (found.outcome, found.target_offset) == (Outcome.EXACT, 50)
    # And back again: what lies between is not where the rest is.
    on_record.carried(EWR, range(1_000, 1_100), HERE, 900)
    on_record.position(EWR, 1_100, HERE, ELSEWHERE)
    assert [row(config(), on_record, at).outcome for at in (5, 999)] == [Outcome.TOO_OLD] * 2
    assert row(config(), on_record, 1_005).target_offset == 905


def test_chunks_that_do_not_say_where_they_went_are_the_oldest() -> None:
    """So they went where the first that say it went, and not where the name of today leads."""
    on_record = OnRecord()
    on_record.carried(EWR, range(500), None, 0)
    on_record.carried(EWR, range(500, 700), HERE, 500)
    on_record.position(EWR, 700, HERE)
    assert row(config(), on_record, 300).target_offset == 300
    found = row(config(flights="other"), on_record, 300)
    assert (found.outcome, found.target_offset) == (Outcome.TOO_OLD, None)


def test_partition_without_a_leader_holds_up_no_other() -> None:
    """Neither of a group that is moved, nor of what it has left to read."""
    on_record, clusters = OnRecord(), Clusters()
    partitions = [SourcePartition("ewr", "flights", number) for number in range(2)]
    targets = [TargetPartition("flights", number) for number in range(2)]
    for partition, target in zip(partitions, targets, strict=True):
        on_record.position(partition, 1_000, target)
        on_record.carried(partition, range(1_000), target, 0)
    cluster: Any = clusters
    reader: Any = on_record
    translator = Translator(config(), cluster, {"ewr": cluster}, reader)
    committed = {(each.topic, each.partition): CommittedOffset(900) for each in partitions}

    async def rows_of() -> list[Row]:
        clusters.leaderless = {targets[1]}
        rows = await translator.rows({"ewr": committed})
        await translator.add_lags(rows)
        return rows

    led, leaderless = asyncio.run(rows_of())
    assert (led.outcome, led.target_offset, led.lag, led.target_lag) == (Outcome.EXACT, 900, 4_100, 4_100)
    assert (leaderless.outcome, leaderless.target_offset) == (Outcome.NO_LEADER, None)
    assert leaderless.note == "the target names no leader of flights-1"
    assert (leaderless.lag, leaderless.target_lag) == (None, None)
