"""One group's offset of partition 0, committed and asked for at one broker: what exactly that broker says."""

from __future__ import annotations

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient
from tests.servers import BrokerProcess


def find_coordinator(broker: BrokerProcess, group: str) -> int:
    """The coordinator's id, -1 while there is none; makes the offsets topic on first use."""
    with RawClient(broker.port) as client:
        return int(client.ask(Api.FIND_COORDINATOR, 3, key=group, key_type=0).node_id)


def commit(broker: BrokerProcess, group: str, topic: str, offset: int) -> int:
    """The error code of a commit by nobody's member."""
    part = {"partition_index": 0, "committed_offset": offset, "committed_leader_epoch": -1}
    with RawClient(broker.port) as client:
        answer = client.ask(
            Api.OFFSET_COMMIT,
            8,
            group_id=group,
            generation_id_or_member_epoch=-1,
            topics=[{"name": topic, "partitions": [part]}],
        )
    return int(answer.topics[0].partitions[0].error_code)


def committed(broker: BrokerProcess, group: str, topic: str) -> int | None:
    """The group's offset; None where this broker does not coordinate it (yet)."""
    wanted = [{"name": topic, "partition_indexes": [0]}]
    with RawClient(broker.port) as client:
        answer = client.ask(Api.OFFSET_FETCH, 7, group_id=group, topics=wanted)
    return None if answer.error_code else int(answer.topics[0].partitions[0].committed_offset)
