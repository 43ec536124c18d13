"""Byte rates by client id: for known bytes both servers tell the same throttle times.

A rate is measured over a window that counts as ten to eleven seconds long, whatever has passed since a
client's first byte. So after B bytes under a limit of L a second, within its first seconds, a client is told
to wait B / L less ten to eleven seconds: it is let have a tenth more than L at the very most, over the window
and the time that it waits. Nothing here is measured by a stopwatch, but that these seconds were no more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, FetchResponse, PartitionFetch
from tests.raw_client import RawClient, batch_of
from tests.waiting import until
from tests.wire.foreign_clients import error_name

PRODUCED, FETCHED = "producer_byte_rate", "consumer_byte_rate"
LIMIT = 200_000
BATCH_SIZE = 900_000
WINDOW_MS = range(10_000, 11_001)
IN_TIME_S = 9.0
"""Beyond that the first bytes may have left the window, and the try says nothing."""
FETCH_VERSION, PRODUCE_VERSION = 12, 9

Entity = list[tuple[str, str | None]]


def altered(raw: RawClient, entity: Entity, *, validate_only: bool = False, **rates: float | None) -> str:
    ops = [{"key": key, "value": value or 0.0, "remove": value is None} for key, value in rates.items()]
    entry = {"entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity], "ops": ops}
    answer = raw.ask(Api.ALTER_CLIENT_QUOTAS, 1, entries=[entry], validate_only=validate_only)
    return error_name(answer.entries[0].error_code)


class Limited:
    """Clients of one server, each request on a connection of its own: one that was throttled is not read."""

    def __init__(self, port: int, topic: str) -> None:
        self.port = port
        self.topic = topic

    def produce(self, client_id: str, *sizes: int) -> tuple[int, int]:
        """A record of each size to a partition each; (bytes of the request, throttle time)."""
        batches = {(self.topic, number): batch_of(bytes(size)) for number, size in enumerate(sizes)}
        request = b"".join(hot_produce.encode_request(PRODUCE_VERSION, 1, client_id, batches, acks=1))
        with RawClient(self.port) as connection:
            connection.send(request)
            answers, throttle_ms = hot_produce.decode_response(connection.receive(), PRODUCE_VERSION)
        assert [answer.error_code for answer in answers] == [0] * len(sizes), "what is throttled is stored"
        return len(request) - 4, throttle_ms

    def fetch(self, client_id: str, max_bytes: int, partition: int = 0) -> tuple[int, FetchResponse]:
        """(bytes of the answer's records, the answer)"""
        asked = FetchRequest(0, 1, 50 << 20, False, [PartitionFetch(self.topic, partition, 0, max_bytes)])
        with RawClient(self.port) as connection:
            connection.send(hot_fetch.encode_request(FETCH_VERSION, 1, client_id, asked))
            answer = hot_fetch.decode_response(connection.receive(), FETCH_VERSION)
        return sum(len(part.records or b"") for part in answer.partitions), answer


@pytest.fixture
def limited(server: Any, new_topic: Callable[..., str]) -> Limited:
    return Limited(server.port, new_topic(partitions=4))


@pytest.fixture
def limit(
    raw: RawClient, limited: Limited, fresh_name: Callable[[str], str]
) -> Iterator[Callable[..., None]]:
    """`limit(client_id, **rates)` sets limits (client id None: the default of all), and returns once they
    hold: a client that is limited after it is throttled for its first bytes."""
    changed: set[str | None] = set()

    def set_limits(client_id: str | None, **rates: float | None) -> None:
        canary = fresh_name("canary")
        changed.update({client_id, canary})
        assert altered(raw, [("client-id", client_id)], **rates) == "NONE"
        assert altered(raw, [("client-id", canary)], **{PRODUCED: 1.0}) == "NONE"
        until(lambda: limited.produce(canary, 100)[1] > 0, "the limits hold")

    yield set_limits
    for client_id in changed:
        altered(raw, [("client-id", client_id)], **{PRODUCED: None, FETCHED: None})


def check_throttle(throttle_ms: int, size: int, rate: int = LIMIT) -> None:
    """The time that is told for `size` bytes, to a sample of a second: 1 ms more or less is rounding."""
    least, most = (max(0, size * 1000 // rate - window_ms) for window_ms in (WINDOW_MS[-1], WINDOW_MS[0]))
    assert least - 1 <= throttle_ms <= most + 1, (size, throttle_ms)


def test_throttle_times_of_a_producer_keep_it_to_its_rate(limited, limit, fresh_name):
    def attempt():
        name = fresh_name("producer")
        limit(name, **{PRODUCED: LIMIT})
        began = time.monotonic()
        told = [limited.produce(name, BATCH_SIZE) for _ in range(5)]
        other = limited.produce(fresh_name("other"), *[BATCH_SIZE] * 4)[1]
        return (told, other) if time.monotonic() - began < IN_TIME_S else None

    told, other = until(attempt, "five requests within the window")
    sizes = list(itertools.accumulate(size for size, _ in told))
    assert [throttle_ms > 0 for _, throttle_ms in told] == [False, False, True, True, True], (
        "ten seconds' worth may go at once"
    )
    for size, (_, throttle_ms) in zip(sizes, told, strict=True):
        check_throttle(throttle_ms, size)
    assert other == 0, "each client id has a rate of its own"


def test_throttle_times_of_a_consumer_keep_it_to_its_rate(limited, limit, fresh_name):
    """What is too much is answered empty, and is not counted: so the time is for what the client has had and
    would have had by this answer."""
    for _ in range(4):
        limited.produce("writer", BATCH_SIZE)

    def attempt():
        name = fresh_name("consumer")
        limit(name, **{FETCHED: LIMIT})
        began = time.monotonic()
        told = [limited.fetch(name, 1) for _ in range(4)]
        return told if time.monotonic() - began < IN_TIME_S else None

    told = until(attempt, "four fetches within the window")
    sizes = [size for size, _ in told]
    assert sizes[0] == sizes[1] > BATCH_SIZE and sizes[2:] == [0, 0]
    assert [answer.throttle_ms for _, answer in told[:2]] == [0, 0]
    for _, answer in told[2:]:
        assert answer.error_code == 0
        check_throttle(answer.throttle_ms, 3 * sizes[0])


def test_one_fetch_carries_no_more_than_a_window_s_worth(limited, limit, fresh_name):
    for _ in range(4):
        limited.produce("writer", BATCH_SIZE)
    unlimited, _ = limited.fetch(fresh_name("consumer"), 50 << 20)
    name = fresh_name("consumer")
    limit(name, **{FETCHED: LIMIT})
    size, answer = limited.fetch(name, 50 << 20)
    assert answer.throttle_ms == 0
    assert BATCH_SIZE < size <= 10 * LIMIT < unlimited


def test_default_holds_for_ids_without_a_limit_of_their_own(limited, limit, fresh_name):
    def attempt():
        own, any_one, another = (fresh_name(kind) for kind in ("own", "any", "another"))
        limit(None, **{PRODUCED: LIMIT / 2})
        limit(own, **{PRODUCED: LIMIT})
        began = time.monotonic()
        told = {name: limited.produce(name, *[BATCH_SIZE] * 3) for name in (own, any_one, another)}
        nameless = limited.produce("", *[BATCH_SIZE] * 3)[1]
        if time.monotonic() - began >= IN_TIME_S:
            return None
        limit(None, **{PRODUCED: None})
        return [told[own], told[any_one], told[another], nameless, limited.produce(any_one, 100)[1]]

    own, any_one, another, nameless, afterwards = until(attempt, "three clients within the window")
    check_throttle(own[1], own[0])
    for size, throttle_ms in (any_one, another):
        check_throttle(throttle_ms, size, LIMIT // 2)
    assert (nameless, afterwards) == (0, 0), "who has no name has no limit; nor has anybody once it is gone"


def test_limits_that_can_be_set(raw, server, fresh_name):
    def code(entity: Entity, key: str, value: float = 1000.0) -> str:
        return altered(raw, entity, validate_only=True, **{key: value})

    client: Entity = [("client-id", fresh_name("client"))]
    user: Entity = [("user", fresh_name("user"))]
    assert [code(client, key) for key in (PRODUCED, FETCHED)] == ["NONE", "NONE"]
    assert code([("client-id", None)], PRODUCED) == "NONE"
    assert code(client, PRODUCED, -1.0) == code(client, "no_such_rate") == "INVALID_REQUEST"
    assert code([("planet", "x")], PRODUCED) == code([], PRODUCED) == "INVALID_REQUEST"
    outside = {
        "user": code(user, PRODUCED),
        "user and client": code(user + client, PRODUCED),
        "address": code([("ip", "127.0.0.1")], "connection_creation_rate"),
        "share of time": code(client, "request_percentage", 50.0),
        "changes of topics": code(client, "controller_mutation_rate"),
    }
    expected = server.outcome("other-quotas", kafka="NONE", millrace="INVALID_REQUEST")
    assert set(outside.values()) == {expected}, outside
