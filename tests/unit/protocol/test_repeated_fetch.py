"""Fetches that are read by their form, and their answers, beside those that are read and written whole."""

from __future__ import annotations

import random
import uuid

import pytest

from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import decode_request
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionData, PartitionFetch
from millrace.broker.protocol.repeated_fetch import FIRST_VERSION, AnswerForm, FetchForm, Repeated

VERSIONS = range(FIRST_VERSION, hot_fetch.VERSIONS.stop)
TOPIC_ID = uuid.UUID("2b6c1f0e-9a51-4a41-8f25-1f1e7f8a2d11")


def _topic_of(version: int) -> hot_fetch.Topic:
    return TOPIC_ID if version >= hot_fetch.FIRST_WITH_TOPIC_IDS else "flights"


def _frame_of(version: int, correlation_id: int, session_epoch: int, offset: int) -> bytes:
    epochs = (4, 3) if version >= hot_fetch.FIRST_FLEXIBLE else ()
    asked = PartitionFetch(_topic_of(version), 7, offset, 200_000, *epochs)
    request = FetchRequest(500, 1, 1 << 20, False, [asked], 99, session_epoch, rack_id="r")
    return hot_fetch.encode_request(version, correlation_id, "reader-1", request)[4:]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_is_read_by_the_form_of_an_earlier_one_and_no_other_is(version: int) -> None:
    first = _frame_of(version, 1, 1, 0)
    _, position = decode_request(memoryview(first))
    form = FetchForm.of(first, position, version)
    assert form is not None
    new = Repeated(-(2**31), 2**31 - 1, 2**62 + 5)
    later = _frame_of(version, *new)
    assert form.read(memoryview(later)) == new
    changing = [number for number in range(len(first)) if later[number] != first[number]]
    assert len(changing) < 4 + 4 + 8 + 1
    free = set()
    for number in range(len(first)):
        other = bytearray(first)
        other[number] ^= 1
        if form.read(memoryview(other)) is not None:
            free.add(number)
    assert free >= set(changing), "what was changed above"
    assert len(free) == 4 + 4 + 8, "nothing besides correlation id, session epoch and fetch offset"
    assert form.read(memoryview(first[:-1])) is None
    assert form.read(memoryview(first + b"\x00")) is None


@pytest.mark.parametrize("read_committed", [False, True])
@pytest.mark.parametrize("session_id", [0, 77])
@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_is_the_one_that_is_written_whole(
    version: int, session_id: int, read_committed: bool
) -> None:
    rng = random.Random(version)
    topic = _topic_of(version)
    form = AnswerForm(version, topic, 7, read_committed=read_committed, session_id=session_id)
    for size in (0, 1, 126, 127, 128, 16_382, 16_383, 200_000):
        records = rng.randbytes(size)
        high, stable, start, correlation_id = (rng.randrange(2**31) for _ in range(4))
        aborted = () if read_committed else None
        part = PartitionData(topic, 7, 0, high, stable, start, records, aborted)
        whole = hot_fetch.encode_response(version, correlation_id, [part], session_id=session_id)
        assert b"".join(form.encode(correlation_id, high, stable, start, records)) == b"".join(whole)


@pytest.mark.parametrize("version", [9, 12, 13])
@pytest.mark.parametrize("names", [(), ("t", "u"), ("t", "t")])
def test_no_other_number_of_partitions_has_a_form(version: int, names: tuple[str, ...]) -> None:
    ids = {"t": uuid.UUID(int=1), "u": uuid.UUID(int=2)}
    asked = [
        PartitionFetch(ids[name] if version >= hot_fetch.FIRST_WITH_TOPIC_IDS else name, number, 5, 100)
        for number, name in enumerate(names)
    ]
    request = FetchRequest(500, 1, 1 << 20, False, asked, 99, 1)
    frame = hot_fetch.encode_request(version, 1, "reader-1", request)[4:]
    _, position = decode_request(memoryview(frame))
    assert FetchForm.of(frame, position, version) is None
