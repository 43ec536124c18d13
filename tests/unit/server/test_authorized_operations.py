"""Who asks what it may do is told all that there is (there is no authorizer), and who does not is told that
nothing is said (KIP-430)."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.protocol.frames import Api
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.unit.server.test_large_answers import ask

# Read, write, create, delete, alter, describe, and the two of configs: the bits that Apache Kafka has set.
ON_TOPIC, ON_CLUSTER, NOT_ASKED = 3_576, 8_096, -(1 << 31)


def services() -> Any:
    cache = MetadataCache()
    cache.set_assignment("t", TopicAssignment(uuid.uuid4(), {0: (1,)}))
    config = SimpleNamespace(settings=BrokerSettings(), id=1)
    return SimpleNamespace(metrics=BrokerMetrics(), config=config, metadata_cache=cache)


@pytest.mark.parametrize("is_asked", [True, False])
def test_who_asks_what_it_may_do_is_told_everything(is_asked: bool) -> None:
    on_topic, on_cluster = (ON_TOPIC, ON_CLUSTER) if is_asked else (NOT_ASKED, NOT_ASKED)
    of_topics = {"include_topic_authorized_operations": is_asked}
    of_cluster = {"include_cluster_authorized_operations": is_asked}
    answer = ask(Api.METADATA, 10, None, services(), topics=None, **of_topics, **of_cluster)
    assert [topic.topic_authorized_operations for topic in answer.topics] == [on_topic]
    assert answer.cluster_authorized_operations == on_cluster
    answer = ask(Api.DESCRIBE_CLUSTER, 0, None, services(), **of_cluster)
    assert answer.cluster_authorized_operations == on_cluster
