"""EVENTS.md is the contract: its examples are this code's bytes, its tables this code's fields."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pyroaring import BitMap64

import millrace.audit
from millrace.audit.contract import sequence_set
from millrace.audit.contract.event_json import FIELD_NAMES
from millrace.audit.contract.events import EventLedger, decode_event, encode_event
from millrace.audit.contract.header import (
    MAX_PRODUCER_NAME_SIZE,
    RecordIdentity,
    decode_identity,
    encode_identity,
    encode_prefix,
)
from millrace.broker.protocol.system_topics import AUDIT_TOPIC_SETTINGS
from tests.unit.audit.content_vectors import VECTORS

DOCUMENT = (Path(millrace.audit.__path__[0]) / "contract" / "EVENTS.md").read_text(encoding="utf-8")
TYPES = ("stream", "count", "gap", "tier")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)\n```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("header"))
def test_the_headers_are_these_bytes(block):
    words, text = block.split("\n")
    told = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
    value = bytes.fromhex(text)
    identity = RecordIdentity(
        told["stream"], int(told["sequence"]), int(told["created_ms"]), told["producer"]
    )
    assert decode_identity(value) == identity
    prefix = encode_prefix(identity.stream)
    assert (
        encode_identity(prefix, identity.sequence, identity.created_ms, identity.producer.encode()) == value
    )


@pytest.mark.parametrize("block", blocks("event"))
def test_the_events_are_these_bytes(block):
    key, value = block.encode().split(b"\n")
    event = decode_event(value)
    assert event is not None and encode_event(event) == (key, value)
    ledger = EventLedger()
    ledger.add(key, value)
    assert ledger.untrusted == []


def test_every_type_has_an_example_and_its_table_names_exactly_its_fields():
    shown = {json.loads(block.split("\n")[1])["type"] for block in blocks("event")}
    assert shown == set(TYPES) == set(FIELD_NAMES)
    sections = dict(re.findall(r"^### `(\w+)`.*?\n(.*?)(?=^##)", DOCUMENT, re.MULTILINE | re.DOTALL))
    for kind in TYPES:
        rows = re.findall(r"^\| (`[^|]*?`) \|", sections[kind], re.MULTILINE)
        named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        assert sorted(named) == sorted(["version", "type", *FIELD_NAMES[kind]])


def test_the_set_and_the_digests_are_these():
    ((told, text),) = (block.split("\n") for block in blocks("set"))
    assert told == "2-198 step 2, from 4294967296"
    members = BitMap64([(1 << 32) + number for number in range(2, 200, 2)])
    assert sequence_set.from_json(json.loads(text)) == members
    assert sequence_set.to_json(members) == json.loads(text)
    known = {(sequence, *rest): digest for sequence, *rest, digest in VECTORS}
    digests = [known[sequence, b"key", b"value", ()] for sequence in (1, 2)]
    assert all(f"{digest:016x}" in DOCUMENT for digest in digests)
    (example,) = [block for block in blocks("event") if '"digest":"' in block]
    assert f'"digest":"{sum(digests) % (1 << 64):016x}"' in example


def test_the_topics_settings_and_limits_are_these():
    for name, value in AUDIT_TOPIC_SETTINGS.items():
        assert f"{name}={value}" in DOCUMENT
    assert f"at most {MAX_PRODUCER_NAME_SIZE} bytes" in DOCUMENT
