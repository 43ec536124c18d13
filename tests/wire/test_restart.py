"""A server that is killed and comes back, as foreign clients live through it."""

from __future__ import annotations

import pytest

from tests.wire.foreign_clients import CLIENTS, Sent, wait_until


def numbered(first: int, count: int) -> list[Sent]:
    return [Sent(b"%d" % n, timestamp_ms=1_700_000_000_000 + n) for n in range(first, first + count)]


@pytest.mark.parametrize("library", CLIENTS, ids=lambda library: library.name)
def test_group_goes_on_after_its_coordinator_was_killed(mortal_server, fresh_name, library):
    """Records, committed offsets and membership come back from the logs alone."""
    client = library(mortal_server.bootstrap)
    topic, group = fresh_name("flights"), fresh_name("readers")
    client.produce(topic, numbered(0, 50))
    member = client.member(group, topic)
    wait_until(lambda: len(member.records) == 50, "the member reads")
    wait_until(lambda: client.committed(group, topic, 0) == 50, "the commit is taken")

    mortal_server.kill()
    mortal_server.start()

    # aiokafka takes "still being loaded" for "none": it does not look at the answer's own error.
    wait_until(lambda: client.committed(group, topic, 0) == 50, "the commit comes back")
    assert client.bounds(topic, 0) == (0, 50)
    client.produce(topic, numbered(50, 50))
    wait_until(lambda: len(member.records) >= 100 or member.failure is not None, "the member reads on")
    member.leave()
    # A client that rejoins before its commit was taken reads the uncommitted part again, or leaves it to the
    # next member.
    first_seen = dict.fromkeys(int(record.value) for record in member.records)
    assert list(first_seen) == list(range(100))
    heir = client.member(group, topic)
    wait_until(lambda: client.committed(group, topic, 0) == 100, "the next member goes on")
    heir.leave()
    assert {int(record.value) for record in heir.records} <= set(range(50, 100))
