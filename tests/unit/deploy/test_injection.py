"""Which records are harmed, what the hook does to a batch, and whether the audit's words agree with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.broker.errors import FatalError
from millrace.broker.protocol.batch import iterate_batches, verify_crc
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.deploy.demo.events import Events, Feed
from millrace.deploy.demo.injection import (
    DUPLICATE,
    LOSE,
    Deeds,
    Injected,
    Target,
    Verification,
    choose_targets,
    named_by_audit,
    read_targets,
    write_targets,
)
from millrace.deploy.demo.sabotage import Sabotage

STREAM = "00112233445566ff"


class NoValues:
    def take(self, rows: Any) -> Any:
        raise AssertionError("the choice needs no values")


EVENTS = Events("t", {Feed("a", "p"): np.arange(3), Feed("b", "q"): np.arange(3, 10)}, None, NoValues(), 1000)


def record(sequence: int, producer: str = "p", value: bytes | None = b"v") -> Record:
    identity = encode_identity(encode_prefix(STREAM), sequence, 1_700_000_000_000, producer.encode())
    headers = (("other", b"\x00"), (HEADER_KEY, identity))
    return Record(key=b"k", value=value, headers=headers, timestamp_ms=1_700_000_000_000 + sequence)


def batch(*records: Record, compression: int = 0) -> memoryview:
    return memoryview(bytes(build_batch(records, compression=compression, base_offset=50)))


def sequences_in(buffers: Any) -> list[int]:
    found = []
    for buffer in buffers:
        for position, header in iterate_batches(memoryview(buffer)):
            verify_crc(buffer, position, header)
            for each in read_records(memoryview(buffer)[position : position + header.size]):
                value = dict(each.headers)[HEADER_KEY]
                assert value is not None
                found.append(int.from_bytes(value[9:17], "big"))
    return found


# The choice.


def test_same_seed_chooses_the_same_records_and_another_seed_others() -> None:
    assert choose_targets(EVENTS, 2, 1, 42) == choose_targets(EVENTS, 2, 1, 42)
    assert choose_targets(EVENTS, 2, 1, 42) != choose_targets(EVENTS, 2, 1, 43)


def test_all_events_chosen_are_all_different_and_numbered_from_one() -> None:
    targets = choose_targets(EVENTS, 4, 6, 1)
    places = {(target.datacenter, target.producer, target.sequence) for target in targets}
    assert places == {("a", "p", n) for n in (1, 2, 3)} | {("b", "q", n) for n in range(1, 8)}
    assert [target.action for target in targets] == [LOSE] * 4 + [DUPLICATE] * 6


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(FatalError, match="cannot lose or repeat 11 of 10 events"):
        choose_targets(EVENTS, 6, 5, 1)


def test_targets_written_and_read_are_the_same(tmp_path: Path) -> None:
    targets = choose_targets(EVENTS, 2, 2, 7)
    write_targets(targets, tmp_path / "targets.json")
    assert read_targets(tmp_path / "targets.json") == targets


# The hook.


@pytest.fixture
def deeds_path(tmp_path: Path) -> Path:
    return tmp_path / "deeds.json"


def sabotage(deeds: Path, **actions: list[int]) -> Sabotage:
    targets = [Target(action, "ewr", "t", "p", n) for action, numbers in actions.items() for n in numbers]
    return Sabotage(targets, deeds)


@pytest.mark.parametrize("compression", [0, 1, 2, 3, 4])
def test_chosen_records_are_dropped_and_repeated_in_place(compression: int, deeds_path: Path) -> None:
    hook = sabotage(deeds_path, lose=[2], duplicate=[4])
    given = batch(*(record(n) for n in range(1, 6)), compression=compression)
    assert sequences_in(hook("ewr", "t", 0, given)) == [1, 3, 4, 4, 5]
    written = json.loads(deeds_path.read_text())
    assert written == {
        "lost": [{"topic": "t", "producer": "p", "stream": STREAM, "sequence": 2}],
        "duplicated": [{"topic": "t", "producer": "p", "stream": STREAM, "sequence": 4}],
    }


def test_neighbours_of_a_dropped_record_keep_every_byte(deeds_path: Path) -> None:
    hook = sabotage(deeds_path, lose=[2])
    kept = [record(1, value=None), record(3)]
    (buffer,) = hook("ewr", "t", 0, batch(kept[0], record(2), kept[1]))
    found = read_records(memoryview(buffer))
    assert [(r.key, r.value, r.headers, r.timestamp_ms) for r in found] == [
        (r.key, r.value, r.headers, r.timestamp_ms) for r in kept
    ]


def test_batch_of_only_dropped_records_vanishes(deeds_path: Path) -> None:
    assert sabotage(deeds_path, lose=[1, 2])("ewr", "t", 0, batch(record(1), record(2))) == []


@pytest.mark.parametrize(
    ("source", "topic", "producer"), [("jfk", "t", "p"), ("ewr", "u", "p"), ("ewr", "t", "q")]
)
def test_same_sequence_elsewhere_passes_untouched(
    source: str, topic: str, producer: str, deeds_path: Path
) -> None:
    given = batch(record(2, producer))
    (passed,) = sabotage(deeds_path, lose=[2])(source, topic, 0, given)
    assert passed is given
    assert not deeds_path.exists()


def test_records_without_identity_pass_untouched(deeds_path: Path) -> None:
    # The sequence's bytes are there, but in the value.
    plain = Record(key=None, value=(2).to_bytes(8, "big"), timestamp_ms=1)
    broken = Record(key=None, value=None, headers=((HEADER_KEY, b"\x01"),), timestamp_ms=1)
    given = batch(plain, broken)
    (passed,) = sabotage(deeds_path, lose=[2])("ewr", "t", 0, given)
    assert passed is given


def test_same_batch_again_after_a_restart_is_the_same_deed(deeds_path: Path) -> None:
    hook = sabotage(deeds_path, duplicate=[1])
    for _ in range(2):
        hook("ewr", "t", 0, batch(record(1)))
    assert len(Deeds.merge([json.loads(deeds_path.read_text())]).duplicated) == 1


def test_mirror_that_follows_a_killed_one_adds_to_its_deeds(deeds_path: Path) -> None:
    sabotage(deeds_path, lose=[1, 2])("ewr", "t", 0, batch(record(1)))
    sabotage(deeds_path, lose=[1, 2])("ewr", "t", 0, batch(record(2)))
    assert [each["sequence"] for each in json.loads(deeds_path.read_text())["lost"]] == [1, 2]


# The comparison.


def finding(*ranges: list[int]) -> dict[str, Any]:
    return {"topic": "t", "producer": "p", "stream": STREAM, "sequences": list(ranges)}


def deeds(lost: list[int], duplicated: list[int]) -> Deeds:
    return Deeds(
        frozenset(Injected("t", "p", STREAM, n) for n in lost),
        frozenset(Injected("t", "p", STREAM, n) for n in duplicated),
    )


def verify(done: Deeds, named: Deeds, lost: int = 2, duplicated: int = 1) -> Verification:
    return Verification(done, named, lost, duplicated)


def test_exactly_what_was_done_was_named() -> None:
    done = deeds([1, 2], [9])
    named = named_by_audit({"losses": [finding([1, 2])], "duplicates": [finding([9, 9])]})
    assert verify(done, named).holds
    assert verify(done, named).sentence() == "audit named all 2 losses and 1 duplicate, and nothing else"


@pytest.mark.parametrize(
    ("named_lost", "named_duplicated"),
    [([1], [9]), ([1, 2, 3], [9]), ([1, 2], []), ([1, 2], [9, 10]), ([1, 3], [9]), ([1, 2], [8])],
)
def test_anything_else_does_not_hold(named_lost: list[int], named_duplicated: list[int]) -> None:
    verification = verify(deeds([1, 2], [9]), deeds(named_lost, named_duplicated))
    assert not verification.holds
    assert "disagree" in verification.sentence()


def test_deed_that_was_not_done_does_not_hold_even_if_the_audit_agrees() -> None:
    assert not verify(deeds([1], [9]), deeds([1], [9])).holds


def test_deeds_of_two_mirrors_come_together() -> None:
    merged = Deeds.merge([deeds([1], []).as_json(), deeds([2], [9]).as_json()])
    assert merged == deeds([1, 2], [9])
    assert merged.as_json()["lost"] == [asdict(Injected("t", "p", STREAM, n)) for n in (1, 2)]
