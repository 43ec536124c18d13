"""The events topic is made once by many producers at a time, and asking for it leaves nothing behind."""

from __future__ import annotations

import weakref

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient

from millrace.audit.clients import events_topic
from millrace.audit.clients.events_topic import TopicState, ensure_events_topic
from tests.servers import BrokerProcess

DEADLINE_S = 60.0


def test_an_answer_that_is_still_held_keeps_no_client(
    shared_broker: BrokerProcess, topic: str, monkeypatch: pytest.MonkeyPatch
):
    # librdkafka's own thread holds the answer for a moment longer than the one that asked. A client that is
    # freed by it ends the process: "calling rd_kafka_destroy() from librdkafka owned thread is prohibited".
    clients, answers = [], []

    class LateAdmin(AdminClient):
        """Sees no topic that is there, as one that looked just before another made it."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            clients.append(weakref.ref(self))

        def list_topics(self, *arguments, **settings):
            metadata = super().list_topics(*arguments, **settings)
            metadata.topics.clear()
            return metadata

        def create_topics(self, *arguments, **settings):
            answers.append(super().create_topics(*arguments, **settings))
            return answers[-1]

    monkeypatch.setattr(events_topic, "AdminClient", LateAdmin)
    connection = {"bootstrap.servers": shared_broker.bootstrap}
    assert ensure_events_topic(connection, topic, DEADLINE_S) is TopicState.READY
    assert ensure_events_topic(connection, topic, DEADLINE_S) is TopicState.READY
    assert answers[-1][topic].exception().args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    assert [client() for client in clients] == [None, None]
