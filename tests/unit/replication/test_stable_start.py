"""Where readers of committed data end when the start of the log has passed that of an open transaction."""

from __future__ import annotations

from pathlib import Path

from millrace.broker.protocol.control_records import build_marker
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from tests.unit.replication.test_replica_manager import TOPIC_ID, append, batch, led, run


def test_readers_of_committed_data_end_at_the_start_where_an_open_transaction_began_before_it(
    tmp_path: Path,
) -> None:
    """An end below the start would send who begins at the end there, out of range, and back, for ever."""

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        opening = batch(b"open", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
        manager.append_now("t", 0, opening, ACKS_ALL)
        append(manager, b"a", b"b", b"c")
        local = manager.leader_of("t", 0)
        assert local.last_stable_offset == 0
        assert await manager.delete_records("t", 0, 2) == 2
        assert local.last_stable_offset == 2
        read = manager.read_now("t", 0, 2, 1 << 20, at_least_one=True, read_committed=True)
        assert (len(read.records), read.last_stable_offset, read.log_start_offset) == (0, 2, 2)
        await manager.delete_records("t", 0, -1)
        assert local.last_stable_offset == local.replica.high_watermark == 4
        marker = memoryview(build_marker(7, 0, 0, True, 1))
        manager.append_now("t", 0, marker, ACKS_ALL, "internal")
        assert local.last_stable_offset == 5

    run(tmp_path, scenario)
