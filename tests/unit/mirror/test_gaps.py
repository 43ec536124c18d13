from __future__ import annotations

import json
from uuid import UUID

from millrace.mirror.control.metrics import MirrorMetrics
from millrace.mirror.gaps.gaps import Gap, GapClass, gap_event
from millrace.mirror.topics.routes import SourcePartition


def test_event_has_the_documented_key_and_fields() -> None:
    gap = Gap(SourcePartition("ewr", "flights", 3), 10, 20, GapClass.EXPIRED, "retention", 99)
    key, value = gap_event("aggregate", gap)
    assert key == b"gap/aggregate/ewr/flights/3/10/expired"
    assert json.loads(value) == {
        "version": 1,
        "type": "gap",
        "mirror": "aggregate",
        "source": "ewr",
        "topic": "flights",
        "partition": 3,
        "from": 10,
        "to": 20,
        "class": "expired",
        "at_ms": 99,
    }
    assert "10..19 cannot be carried (" in gap.describe()


def test_of_a_log_that_is_gone_the_end_is_open() -> None:
    """Acknowledged records came after the mirror's last look, and before the topic was deleted."""
    where = SourcePartition("ewr", "flights", 3)
    for following, words in [(20, "10..19 and what came after them"), (10, "what came from offset 10 on")]:
        gap = Gap(where, 10, following, GapClass.RECREATED, "made anew", 99)
        event = json.loads(gap_event("aggregate", gap)[1])
        assert (event["from"], event["to"], event["open"]) == (10, following, True)
        assert f"{words}, if anything did, cannot be carried (recreated: made anew)" in gap.describe()
    others = [each for each in GapClass if each is not GapClass.RECREATED]
    events = [json.loads(gap_event("aggregate", Gap(where, 10, 20, each, "", 99))[1]) for each in others]
    assert not [event for event in events if "open" in event]


def test_the_event_names_the_topic_by_its_id_where_that_is_known() -> None:
    """Of a topic that was made anew, offsets come twice."""
    of = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    gap = Gap(SourcePartition("ewr", "flights", 3), 10, 20, GapClass.EXPIRED, "retention", 99, of)
    key, value = gap_event("aggregate", gap)
    assert key == f"gap/aggregate/ewr/flights/3/10/expired/{of}".encode()
    assert json.loads(value)["topic_id"] == of


def test_the_event_names_the_cluster_into_which_it_was_not_carried() -> None:
    """Another mirror of the same name may have carried it into another one."""
    gap = Gap(SourcePartition("ewr", "flights", 3), 10, 20, GapClass.EXPIRED, "retention", 99)
    key, value = gap_event("aggregate", gap, "A")
    assert (key, json.loads(value)["target"]) == (gap_event("aggregate", gap)[0], "A")


def counted(metrics: MirrorMetrics) -> dict[str, float]:
    lines = [line for line in metrics.text().decode().splitlines() if "gaps_total{" in line]
    return {line.split('class="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_a_topic_made_again_twice_at_one_offset_has_two_events_and_counts_two() -> None:
    """In a compacted topic one of two events of one key is gone, and the alert is about a growing counter."""
    metrics = MirrorMetrics(lambda: 0, list, list)
    where, ids = SourcePartition("ewr", "flights", 3), [str(UUID(int=number)) for number in (1, 2)]
    events = {}
    for gap_class, of in [
        (GapClass.RECREATED, ids[0]),
        (GapClass.RECREATED, ids[1]),
        (GapClass.RECREATED, ids[1]),  # met again
        (GapClass.EXPIRED, ids[1]),
    ]:
        key, value = gap_event("aggregate", Gap(where, 10, 20, gap_class, "", 99, of))
        events[key] = value
        metrics.count_gap(key, "ewr", gap_class.value)
    assert len(events) == 3
    assert counted(metrics) == {"recreated": 2, "expired": 1}


def test_what_was_counted_is_never_taken_back() -> None:
    metrics = MirrorMetrics(lambda: 0, list, list)
    for gap_class in ("too_large", "refused", "too_large"):
        metrics.count_gap(b"one key", "ewr", gap_class)
        assert counted(metrics)["too_large"] == 1
    assert counted(metrics) == {"too_large": 1, "refused": 1}
