"""How the audit reaches the cluster for its events topic."""

from __future__ import annotations

import pytest

from millrace.audit.clients.events_topic import TopicState, connection_settings, ensure_events_topic


@pytest.mark.parametrize(
    "key", ["https.ca.location", "enable.sasl.oauthbearer.unsecure.jwt", "sasl.username", "ssl.ca.location"]
)
def test_all_that_a_connection_needs_is_taken_over(key):
    assert connection_settings({key: "given", "acks": "all"}) == {key: "given"}


def test_a_cluster_that_cannot_be_reached_is_told_in_a_line(caplog):
    nowhere = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    assert ensure_events_topic(nowhere, "millrace.audit", 0.1) is TopicState.UNREACHABLE
    (line,) = caplog.messages
    assert "millrace.audit" in line
