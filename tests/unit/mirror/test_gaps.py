from __future__ import annotations

import json

from millrace.mirror.gaps import Gap, GapClass, gap_event
from millrace.mirror.routes import SourcePartition


def test_event_has_the_documented_key_and_fields() -> None:
    gap = Gap(SourcePartition("ewr", "flights", 3), 10, 20, GapClass.EXPIRED, "retention", 99)
    key, value = gap_event("aggregate", gap)
    assert key == b"gap/aggregate/ewr/flights/3/10"
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
    assert "10..19" in gap.describe()
