"""A sample of `make fuzz`, and hypothesis on the readers: no input does anything but a value or a refusal."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.frames import decode_entity, decode_request
from millrace.broker.server.answers import request_type
from millrace.broker.server.handlers import list_offsets
from millrace.broker.server.registry import handlers
from tests import seeds
from tests.fuzz.frames import Seeds, broken_inside, mutate
from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[2]
HANDLERS = handlers()


@pytest.mark.java
def test_sample_of_the_fuzzer_finds_nothing() -> None:
    seed = seeds.given()
    command = [sys.executable, "-m", "tests.fuzz", "--runs", "10000", "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(240))
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def read(frame: bytes) -> None:
    """What the dispatcher does with a frame before a handler sees the request."""
    view = memoryview(bytearray(frame))
    head, position = decode_request(view)
    handler = next((handler for handler in HANDLERS if handler.api_key == head.api_key), None)
    if handler is None or head.version not in handler.versions:
        return
    if head.api_key == hot_produce.Api.PRODUCE:
        hot_produce.decode_request(view, position, head.version)
    elif head.api_key == hot_produce.Api.FETCH:
        hot_fetch.decode_request(view, position, head.version)
    elif (head.api_key, head.version) == (hot_produce.Api.LIST_OFFSETS, 0):
        list_offsets.decode_v0(view, position)
    else:
        decode_entity(request_type(head.api_key, head.version), view, position, most_items=100_000)


@settings(max_examples=seeds.examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read(data)
    except ProtocolError:
        return


@settings(max_examples=seeds.examples(600), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**63), st.sampled_from(HANDLERS), st.data())
def test_any_damage_to_a_request_is_read_or_refused(seed: int, handler: object, data: st.DataObject) -> None:
    rng = random.Random(seed)
    seeds = Seeds(HANDLERS, rng)
    version = data.draw(st.sampled_from(handler.versions))  # type: ignore[attr-defined]
    frame = seeds.frame(handler.api_key, version)  # type: ignore[attr-defined]
    read(frame[4:])  # as it was made it is fine
    try:
        read(mutate(frame, seeds.next(), rng)[4:])
    except ProtocolError:
        return


def test_same_seed_gives_the_same_frames() -> None:
    def frames(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        seeds = Seeds(HANDLERS, rng)
        return [mutate(seeds.next(), seeds.next(), rng) for _ in range(50)]

    assert frames(5) == frames(5)
    assert frames(5) != frames(6)


def test_broken_batches_keep_a_checksum_that_fits() -> None:
    from crc32c import crc32c

    from millrace.broker.protocol.records import Record, build_batch

    batch = build_batch([Record(key=b"k", value=b"v" * 50, headers=(), timestamp_ms=1)])
    rng = random.Random(1)
    for _ in range(100):
        broken = broken_inside(batch, rng)
        assert int.from_bytes(broken[17:21], "big") == crc32c(broken[21:])
