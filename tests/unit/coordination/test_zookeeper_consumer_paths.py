"""Payloads of the old model as Kafka 0.8 writes them."""

from __future__ import annotations

import json

import pytest

from millrace.broker.coordination.zookeeper_consumer import paths as paths
from millrace.broker.coordination.zookeeper_consumer.rules import (
    Pattern,
    Subscription,
    filter_subscription,
    static_subscription,
)


def test_paths_are_those_of_kafka_0_8() -> None:
    assert paths.ids_path("g") == "/consumers/g/ids"
    assert paths.id_path("g", "g_h-1-a") == "/consumers/g/ids/g_h-1-a"
    assert paths.owners_path("g", "t") == "/consumers/g/owners/t"
    assert paths.owner_path("g", "t", 3) == "/consumers/g/owners/t/3"
    assert paths.offsets_path("g", "t") == "/consumers/g/offsets/t"
    assert paths.offset_path("g", "t", 3) == "/consumers/g/offsets/t/3"


def test_a_registration_has_the_fields_of_the_source_documents() -> None:
    data = paths.encode_registration(static_subscription({"open_platform_opt_push_plus1": 5}), 1411294187842)
    assert json.loads(data) == {
        "version": 1,
        "subscription": {"open_platform_opt_push_plus1": 5},
        "pattern": "static",
        "timestamp": "1411294187842",
    }


@pytest.mark.parametrize(
    "subscription",
    [
        static_subscription({"a": 1, "b": 2}),
        filter_subscription("a.*", None, 3),
        filter_subscription(None, "b", 1),
    ],
)
def test_a_registration_is_read_as_it_was_written(subscription: Subscription) -> None:
    assert paths.decode_registration(paths.encode_registration(subscription, 1)) == subscription


def test_registrations_of_others_are_read() -> None:
    """Escapes of a regex as Kafka's JSON writes them; a number for the timestamp; no pattern at all."""
    data = rb'{"version":1,"subscription":{"log-\\d+":2},"pattern":"white_list","timestamp":1}'
    assert paths.decode_registration(data) == Subscription(Pattern.WHITE_LIST, {r"log-\d+": 2})
    assert paths.decode_registration(b'{"subscription":{"a":1}}').pattern is Pattern.STATIC


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7",
        b"{}",
        b'{"subscription":[]}',
        b'{"subscription":{"a":"1"}}',
        b'{"subscription":{"a":0}}',
        b'{"subscription":{"a":1},"pattern":"striped"}',
        b'{"subscription":{"a(":1},"pattern":"white_list"}',
    ],
)
def test_a_registration_that_makes_no_sense_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        paths.decode_registration(data)


def test_offsets_are_decimal_and_not_negative() -> None:
    assert paths.encode_offset(1 << 40) == b"1099511627776"
    assert paths.decode_offset(b"17") == 17
    for data in (b"-1", b"x", b""):
        with pytest.raises(ValueError):
            paths.decode_offset(data)
