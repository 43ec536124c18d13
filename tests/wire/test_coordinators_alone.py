"""One broker where the brokers' own topics are to have three replicas, as they have by default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from tests.kafka_fixture import JVM_OPTIONS, SAME_SETTINGS
from tests.peers.kafka import KafkaPeer
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import until
from tests.wire.subjects import KAFKA, MILLRACE, PARAMETERS, Apart, millrace_settings

FACTORS = ("offsets.topic.replication.factor", "transaction.state.log.replication.factor")


@pytest.fixture(params=PARAMETERS)
def alone(request: pytest.FixtureRequest, tmp_path) -> Iterator[tuple[str, int]]:
    """(which of the two servers, its port)"""
    if request.param == MILLRACE:
        settings = {name: value for name, value in millrace_settings().items() if name not in FACTORS}
        path = request.getfixturevalue("zookeeper").chroot()
        server: BrokerProcess | KafkaPeer = BrokerProcess(path, tmp_path, settings=settings)
    else:
        defaults = {**SAME_SETTINGS, **dict.fromkeys(FACTORS, "3")}
        server = KafkaPeer(tmp_path, settings=defaults, jvm_options=JVM_OPTIONS)
    try:
        server.start()
        yield request.param, int(server.bootstrap.rpartition(":")[2])
    finally:
        server.kill()


def test_coordinators_of_one_broker_whose_topics_want_three(alone):
    name, port = alone
    apart = Apart("coordinators-alone", kafka=ErrorCode.coordinator_not_available, millrace=ErrorCode.none)
    expected = apart.kafka if name == KAFKA else apart.millrace
    with RawClient(port) as raw:
        for key_type in (0, 1):
            answers = []

            def asked(key_type=key_type, answers=answers):
                answer = raw.ask(Api.FIND_COORDINATOR, 4, key_type=key_type, coordinator_keys=["any"])
                answers.append(answer.coordinators[0].error_code)
                return len(answers) >= 20 or answers[-1] is ErrorCode.none

            until(asked, "twenty answers, or one that names a coordinator")
            assert answers[-1] is expected, answers
