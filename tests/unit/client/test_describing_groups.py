"""A group that the coordinator cannot tell of now is not taken for one that does not exist."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.groups import Group, describe_group
from millrace.broker.errors import (
    CoordinatorLoadInProgress,
    GroupAuthorizationFailed,
    GroupIdNotFound,
    KafkaError,
    UnsupportedVersion,
)
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import coordinator_answer, nested, response


def described(code: int) -> Group:
    """What is told of a group that is no classic one, where the API of the others answers with `code`."""

    def classic(head: RequestHead, request: Any) -> Any:
        group = nested(
            Api.DESCRIBE_GROUPS,
            head.version,
            "DescribedGroup",
            error_code=0,
            group_id="payments",
            group_state="Dead",
            protocol_type="",
            protocol_data="",
            members=(),
        )
        return response(Api.DESCRIBE_GROUPS, head.version, groups=(group,))

    def consumer(head: RequestHead, request: Any) -> Any:
        group = nested(
            Api.CONSUMER_GROUP_DESCRIBE,
            head.version,
            "DescribedGroup",
            error_code=code,
            error_message=None,
            group_id="payments",
            group_state="",
            group_epoch=0,
            assignment_epoch=0,
            assignor_name="",
            members=(),
        )
        return response(Api.CONSUMER_GROUP_DESCRIBE, head.version, groups=(group,))

    async def main() -> Group:
        handlers = {
            Api.FIND_COORDINATOR: lambda head, _: coordinator_answer(head.version, broker.server.port),
            Api.DESCRIBE_GROUPS: classic,
            Api.CONSUMER_GROUP_DESCRIBE: consumer,
        }
        async with (
            FakeBroker(handlers) as broker,
            cluster(broker.server.address, request_timeout_ms=1_000) as ewr,
        ):
            return await describe_group(ewr, "payments")

    return asyncio.run(main())


@pytest.mark.parametrize("error", [GroupIdNotFound, UnsupportedVersion])
def test_group_of_neither_kind_does_not_exist(error: type[KafkaError]) -> None:
    assert not described(error.code).exists


@pytest.mark.parametrize("error", [CoordinatorLoadInProgress, GroupAuthorizationFailed])
def test_group_that_cannot_be_told_of_is_an_error(error: type[KafkaError]) -> None:
    with pytest.raises(error, match="group payments: description"):
        described(error.code)
