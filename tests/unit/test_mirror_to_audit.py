"""What a mirror writes for the audit, the audit reads as it was meant: the two know nothing of each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from uuid import UUID

import pytest

import millrace.audit
from millrace.audit.contract.event_ledger import EventLedger
from millrace.audit.contract.event_values import GapEvent
from millrace.audit.runs.capture import MirrorPosition, _parse_position
from millrace.audit.runs.told_routes import ToldRoutes
from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.mirror_positions import LOST, Position, encode_value
from millrace.mirror.delivery import checkpoints
from millrace.mirror.gaps.gaps import Gap, GapClass, gap_event
from millrace.mirror.topics import route_records
from millrace.mirror.topics.routes import Route, SourcePartition

PARTITION = SourcePartition("ewr", "flights", 3)
TOPIC_ID = UUID(int=7)


def test_position_that_a_mirror_writes_is_read_whole() -> None:
    position = Position(12, "E", TOPIC_ID, 4, 1_000, log_end=20, waiting_since_ms=900, began=5)
    key, value = checkpoints.encode_key(PARTITION), encode_value(position)
    read = _parse_position(key, value, "agg", "m", {"E": "newark"})
    assert read == MirrorPosition(
        aggregate="agg",
        mirror="m",
        source="newark",
        topic="flights",
        partition=3,
        next_offset=12,
        topic_id=str(TOPIC_ID),
        leader_epoch=4,
        began=5,
    )


def test_position_that_a_mirror_lost_is_refused() -> None:
    with pytest.raises(UnreadableRecord, match="its mirror lost"):
        _parse_position(checkpoints.encode_key(PARTITION), LOST, "agg", "m", {})


@pytest.mark.parametrize("gap_class", GapClass)
@pytest.mark.parametrize("topic_id", ["", str(TOPIC_ID)])
def test_gap_that_a_mirror_tells_is_read_whole(gap_class: GapClass, topic_id: str) -> None:
    gap = Gap(PARTITION, 3, 9, gap_class, "the broker says so", 1_000, topic_id)
    ledger = EventLedger()
    ledger.add(*gap_event("m", gap, "T"))
    assert list(ledger.gaps.values()) == [
        GapEvent(
            "m",
            "ewr",
            "flights",
            3,
            3,
            9,
            gap_class.value,
            1_000,
            topic_id,
            target="T",
            has_open_end=gap.has_open_end,
        )
    ]


def test_the_contract_names_the_classes_that_a_mirror_writes_and_no_others() -> None:
    document = (Path(millrace.audit.__path__[0]) / "contract" / "EVENTS.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^### `gap`.*?\n(.*?)(?=^### )", document, re.MULTILINE | re.DOTALL)
    told = dict(re.findall(r"^- `(\w+)`: (.+)$", section, re.MULTILINE))
    assert set(told) == {each.value for each in GapClass}
    shown = {
        each["class"]: each.get("open", False)
        for each in map(json.loads, re.findall(r"^{.*}$", section, re.M))
    }
    assert shown.keys() <= set(told)
    for each in GapClass:
        has_open_end = Gap(PARTITION, 3, 9, each, "", 0).has_open_end
        assert ("always `open`" in told[each.value]) == has_open_end == shown.get(each.value, has_open_end)


def test_route_that_a_mirror_tells_is_read_and_a_proposal_is_none() -> None:
    told = ToldRoutes()
    route = Route("E", "flights", "T", "ewr.flights", "m", 1_000)
    proposal = Route("E", "flights", "T", "elsewhere", "m", is_proposed=True, proposed_at_ms=5, proposer="p")
    told.learn(route_records.encode_key("ewr", "flights"), route_records.encode_value(route))
    told.learn(route_records.encode_proposal_key("ewr", "flights", "p"), route_records.encode_value(proposal))
    assert told.leads_to("ewr", "flights", ["ewr.flights"])
    assert not told.leads_to("ewr", "flights", ["flights"])
