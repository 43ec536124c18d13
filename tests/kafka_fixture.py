"""The pytest fixture of a real Apache Kafka node, one for the whole test session.

`conftest.py` imports `kafka_peer`. A test that stops, kills or moves the node makes a `KafkaPeer` of its
own: this one is shared, so tests use topic and group names of their own and leave it running.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peers.kafka import KafkaPeer


@pytest.fixture(scope="session")
def kafka_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaPeer]:
    with KafkaPeer(tmp_path_factory.mktemp("kafka")) as peer:
        yield peer
