"""Where sources merge: the position that leaves nothing out of any of them, and reads no more again than it
must. And when there is none."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.client.offsets import LATEST
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.offsets import translate
from millrace.mirror.offsets.translate import Outcome, Question, Row, Translator
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.on_record import Clusters, OnRecord

EWR, JFK = SourcePartition("ewr", "departures", 0), SourcePartition("jfk", "arrivals", 0)
HERE = TargetPartition("flights", 0)
EWR_ENDS, JFK_ENDS, END = 1_000, 700, 1_700


def config(delivery: str = "exactly_once", departures: str = "flights") -> MirrorConfig:
    return parse_config(
        {
            "name": "m",
            "delivery": delivery,
            "target": {"cluster": "agg", "bootstrap": ["b:1"]},
            "sources": [
                {"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": ["departures"]}},
                {"cluster": "jfk", "bootstrap": ["c:1"], "topics": {"include": ["arrivals"]}},
            ],
            "naming": {"rename": {"departures": departures, "arrivals": "flights"}},
        }
    )


class Merged:
    """Of jfk 700 records went to the target partition, and 1,000 of ewr behind them: all that there is."""

    def __init__(self) -> None:
        self.config = config()
        self.on_record = OnRecord()
        self.on_record.position(EWR, EWR_ENDS, HERE)
        self.on_record.carried(EWR, range(EWR_ENDS), HERE, JFK_ENDS)
        self.on_record.position(JFK, JFK_ENDS, HERE)
        self.on_record.carried(JFK, range(JFK_ENDS), HERE, 0)
        self.clusters = Clusters()
        self.clusters.ends |= {EWR[1:]: EWR_ENDS, JFK[1:]: JFK_ENDS, HERE: END}

    def row(self, *, ewr: int | None = None, jfk: int | None = None, allow_rereads: bool = True) -> Row:
        """The first one, for a group that has committed so."""
        commits = {}
        if ewr is not None:
            commits["ewr"] = {EWR[1:]: CommittedOffset(ewr)}
        if jfk is not None:
            commits["jfk"] = {JFK[1:]: CommittedOffset(jfk)}
        clusters: Any = self.clusters
        reader: Any = self.on_record
        translator = Translator(self.config, clusters, {"ewr": clusters, "jfk": clusters}, reader)
        return asyncio.run(translator.rows(commits, allow_rereads=allow_rereads))[0]

    def place(self, **committed: int) -> int | None:
        found = self.row(**committed)
        assert found.outcome is Outcome.REREADS, found
        return found.target_offset


@pytest.fixture
def merged() -> Merged:
    return Merged()


def test_the_first_unread_record_of_any_source_is_where_it_goes_on(merged: Merged) -> None:
    assert merged.place(ewr=900, jfk=100) == 100
    assert merged.place(ewr=900, jfk=699) == 699
    assert merged.place(ewr=0, jfk=699) == 699


def test_source_that_was_read_to_its_end_makes_nothing_be_read_again(merged: Merged) -> None:
    """What it brings from now on comes behind all that is there."""
    assert merged.place(ewr=900, jfk=JFK_ENDS) == 1_600
    assert merged.place(ewr=EWR_ENDS, jfk=200) == 200
    assert merged.place(ewr=EWR_ENDS, jfk=JFK_ENDS) == END
    merged.on_record.position(JFK, JFK_ENDS - 5, HERE)
    assert merged.place(ewr=900, jfk=JFK_ENDS) == 1_600, "what the mirror has yet to bring was read there"
    merged.clusters.ends[JFK[1:]] = JFK_ENDS + 1
    assert merged.place(ewr=900, jfk=JFK_ENDS) == JFK_ENDS, "one more may be on its way, in between"
    assert merged.place(ewr=900, jfk=JFK_ENDS + 1) == 1_600


def test_control_records_at_a_sources_end_are_not_waited_for(merged: Merged) -> None:
    """A group stands before the marker of the last transaction, where some clients leave it."""
    merged.on_record.position(JFK, JFK_ENDS + 1, HERE)
    merged.clusters.ends[JFK[1:]] = JFK_ENDS + 1
    assert merged.place(ewr=900, jfk=JFK_ENDS) == 1_600


def test_source_whose_topic_was_made_anew_is_not_read_out(merged: Merged) -> None:
    """Its log ends before the position, which is of another."""
    merged.clusters.ends[JFK[1:]] = 3
    assert merged.place(ewr=900, jfk=JFK_ENDS) == 1_600
    merged.clusters.topic_ids[JFK.topic] = UUID(int=8)
    assert merged.place(ewr=900, jfk=JFK_ENDS) == JFK_ENDS


def test_source_that_was_never_read_begins_with_the_first_record_that_is_left(merged: Merged) -> None:
    assert merged.place(ewr=900) == 0
    merged.clusters.begins[HERE] = 300
    assert merged.place(ewr=900) == 300
    assert merged.row(ewr=900, jfk=299).outcome is Outcome.TOO_OLD, "it would miss what it has not read"
    assert merged.place(ewr=900, jfk=300) == 300


@pytest.mark.parametrize(
    ("began", "outcome", "place"),
    [
        (0, Outcome.TOO_OLD, None),  # what was carried from there on has left the target, and the map
        (400, Outcome.REREADS, 400),  # nothing was
        (-1, Outcome.REREADS, 50),  # nobody knows
    ],
)
def test_what_the_map_has_forgotten_of_one_source_is_too_old_for_all(
    merged: Merged, began: int, outcome: Outcome, place: int | None
) -> None:
    del merged.on_record.maps[JFK]
    merged.on_record.carried(JFK, range(400, JFK_ENDS), HERE, 400)
    merged.on_record.position(JFK, JFK_ENDS, HERE, began=began)
    merged.clusters.begins[HERE] = 50
    found = merged.row(ewr=900, jfk=100)
    assert (found.outcome, found.target_offset) == (outcome, place)
    if outcome is Outcome.TOO_OLD:
        assert found.note == f"of {JFK}, the map begins with offset 400"
    assert merged.place(ewr=900, jfk=400) == 400


def test_source_that_has_only_begun_asks_for_nothing_before_what_it_may_bring(merged: Merged) -> None:
    """Its first transaction may be open, with records that stand before the next of the other."""
    del merged.on_record.maps[JFK]
    merged.on_record.position(JFK, 0, HERE)
    assert merged.place(ewr=900) == 1_600
    # Ewr has gone on since the target's end was looked at; jfk's first may stand between.
    merged.on_record.position(EWR, EWR_ENDS + 5, HERE)
    merged.on_record.carried(EWR, range(EWR_ENDS, EWR_ENDS + 5), HERE, 1_800)
    stable = merged.clusters.list_offsets

    async def grows(asked: dict[Any, int], *_: object, **__: object) -> Any:
        found = await stable(asked)
        if asked.get(HERE) == LATEST:
            merged.clusters.ends[HERE] = 1_805
        return found

    merged.clusters.list_offsets = grows  # type: ignore[method-assign]
    assert merged.place(ewr=EWR_ENDS) == END


def test_source_that_begins_while_the_map_is_read_is_in_the_way(merged: Merged) -> None:
    """Also of a group that stands where the mirror stood: the next record lies behind the other's first."""
    on_record = merged.on_record
    del on_record.maps[JFK], on_record.positions.known[JFK]
    on_record.position(EWR, EWR_ENDS, HERE)
    assert merged.row(ewr=EWR_ENDS, allow_rereads=False).outcome is Outcome.EXACT
    read = on_record.refresh_map

    async def begins(topics: Any = None) -> None:
        on_record.position(JFK, 0, HERE)
        on_record.carried(EWR, range(EWR_ENDS, EWR_ENDS + 5), HERE, END + 10)
        merged.clusters.ends[HERE] = END + 15
        await read(topics)

    on_record.refresh_map = begins  # type: ignore[method-assign]
    found = merged.row(ewr=EWR_ENDS, allow_rereads=False)
    assert (found.outcome, found.target_offset) == (Outcome.MERGED, None)


def test_log_that_ends_before_what_the_map_knows_is_another(merged: Merged) -> None:
    """Whatever is by now at the offsets that the map speaks of."""
    del merged.on_record.maps[JFK], merged.on_record.positions.known[JFK]
    assert merged.row(ewr=5).target_offset == 705
    merged.clusters.ends[HERE] = 800
    for committed in (0, 5, 900):
        found = merged.row(ewr=committed)
        assert (found.outcome, found.target_offset) == (Outcome.ANOTHER_LOG, None)
        assert found.note == "the target's log ends at 800: it was made anew or cut"
    # What has been carried to the new one since is exact there.
    merged.on_record.carried(EWR, range(EWR_ENDS, 1_100), HERE, 0)
    merged.on_record.position(EWR, 1_100, HERE)
    assert merged.row(ewr=1_050, allow_rereads=False).target_offset == 50
    assert merged.row(ewr=900, allow_rereads=False).outcome is Outcome.REREADS


def test_question_about_one_topic_counts_what_was_read_of_the_others(
    merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which go to the same partition under another name."""
    commits = {"ewr": {EWR[1:]: CommittedOffset(900)}, "jfk": {JFK[1:]: CommittedOffset(650)}}

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name
            self.metadata, self.list_offsets = merged.clusters.metadata, merged.clusters.list_offsets

        async def close(self) -> None: ...

    async def fetch_offsets(cluster: Named, *_: object, **__: object) -> Any:
        return commits[cluster.name]

    monkeypatch.setattr(translate, "_connect", lambda each: Named(each.cluster))
    monkeypatch.setattr(translate, "fetch_offsets", fetch_offsets)
    monkeypatch.setattr(translate, "MapReader", lambda *_: merged.on_record)
    question = Question("billing", topics=(EWR.topic,), allow_rereads=True)
    (row,) = asyncio.run(translate.answer(config(), question)).rows
    assert (row.source, row.target_offset) == (EWR, 650)


def test_source_that_left_the_config_is_taken_as_the_map_knows_it(merged: Merged) -> None:
    """Nobody is there to say whether anything is left of it."""
    gone = SourcePartition("lga", "arrivals", 0)
    del merged.on_record.maps[JFK], merged.on_record.positions.known[JFK]
    merged.on_record.position(gone, JFK_ENDS, HERE)
    merged.on_record.carried(gone, range(JFK_ENDS), HERE, 0)
    assert merged.place(ewr=900) == 0


def test_at_least_once_what_the_map_does_not_tell_of_yet_may_be_there_all_the_same(merged: Merged) -> None:
    """Data goes before map and position; exactly once they come with it."""
    for each in (EWR, JFK):
        del merged.on_record.maps[each]
        merged.on_record.position(each, 0, HERE)
    merged.clusters.begins[HERE] = 40
    assert merged.place(ewr=500, jfk=100) == END
    merged.config = config("at_least_once")
    assert merged.place(ewr=500, jfk=100) == 40
    merged.on_record.position(EWR, EWR_ENDS, HERE)
    merged.on_record.carried(EWR, range(EWR_ENDS), HERE, JFK_ENDS)
    assert merged.place(ewr=EWR_ENDS, jfk=100) == 40
    merged.on_record.position(JFK, JFK_ENDS, HERE)
    merged.on_record.carried(JFK, range(JFK_ENDS), HERE, 0)
    assert merged.place(ewr=EWR_ENDS, jfk=JFK_ENDS) == END, "nothing is on its way"


@pytest.mark.parametrize("began", [0, -1])
def test_what_went_elsewhere_is_in_the_way_of_who_still_comes_here_alone(merged: Merged, began: int) -> None:
    """A source whose names have changed: what it left here before is begun with, where it goes elsewhere now;
    where it comes here now, what went elsewhere would be missed."""
    there = TargetPartition("dep2", 0)
    merged.on_record.position(EWR, 2_000, HERE, there, began=began)
    merged.on_record.carried(EWR, range(EWR_ENDS, 2_000), there, 0)
    merged.clusters.ends[EWR[1:]] = 2_000
    merged.config = config(departures="dep2")
    for committed in (900, EWR_ENDS, 1_500, 1_999):
        assert merged.row(jfk=650).outcome is Outcome.REREADS
        clusters: Any = merged.clusters
        reader: Any = merged.on_record
        translator = Translator(merged.config, clusters, {"ewr": clusters, "jfk": clusters}, reader)
        commits = {
            "ewr": {EWR[1:]: CommittedOffset(committed)},
            "jfk": {JFK[1:]: CommittedOffset(650)},
        }
        _, of_jfk = asyncio.run(translator.rows(commits, allow_rereads=True))
        assert (of_jfk.outcome, of_jfk.target_offset) == (Outcome.REREADS, 650)
    del merged.on_record.maps[EWR]
    merged.on_record.carried(EWR, range(500), there, 0)
    merged.on_record.carried(EWR, range(500, EWR_ENDS), HERE, JFK_ENDS)
    merged.on_record.position(EWR, EWR_ENDS, there, HERE, began=began)
    merged.config = config()
    found = merged.row(ewr=300, jfk=650)
    assert (found.outcome, found.target_offset) == (Outcome.TOO_OLD, None)
    assert merged.place(ewr=500, jfk=650) == 650
