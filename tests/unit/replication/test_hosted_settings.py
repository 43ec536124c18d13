"""With which settings a log is hosted, from the first moment and where some cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.broker.replication import hosting
from millrace.broker.replication.local_partition import (
    LocalPartition,
)
from millrace.broker.storage.log_config import UNREADABLE, LogConfig
from tests.unit.replication.replicated_stage import TOPIC_ID, Bench, run


@pytest.mark.parametrize("is_opened_before", [True, False])
def test_a_log_is_hosted_with_its_own_settings_from_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_opened_before: bool
) -> None:
    """Retention, on its thread, looks at whatever is hosted; a start opens logs with the defaults."""
    of_hosted: list[LogConfig] = []

    class Noted(LocalPartition):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            of_hosted.append(self.log.config)

    async def scenario(bench: Bench) -> None:
        if is_opened_before:
            bench.logs.create(("t", 0), topic_id=TOPIC_ID)
        monkeypatch.setattr(hosting, "LocalPartition", Noted)
        await bench.lead(1, retention_ms="-1")
        assert [config.retention_ms for config in of_hosted] == [-1]

    run(tmp_path, scenario)


def test_settings_that_cannot_be_used_keep_everything(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, cleanup_policy="compact", retention_ms="for ever")
        config = bench.manager.leader_of("t", 0).log.config
        assert (config.retention_ms, config.retention_bytes, config.is_compacted) == (-1, -1, False)

    run(tmp_path, scenario)


def test_a_setting_that_cannot_be_used_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, min_insync_replicas="2", flush_messages="7", segment_bytes="a lot")
        local = bench.manager.leader_of("t", 0)
        assert (local.replica.min_insync_replicas, local.flush_messages) == (2, 7)
        assert local.log.config.retention_ms == -1

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "settings",
    [
        {UNREADABLE: "/config/topics/t in ZooKeeper: no JSON"},
        {"min.insync.replicas": "two", "flush.messages": "always"},
    ],
    ids=["unreadable", "unusable"],
)
def test_what_protects_acknowledged_records_is_at_its_strictest_while_it_is_not_known(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, **{name.replace(".", "_"): value for name, value in settings.items()})
        local = bench.manager.leader_of("t", 0)
        assert (local.replica.effective_min_insync, local.flush_messages) == (len(local.replica.replicas), 1)
        await bench.lead(1, 2, epoch=1)
        assert (local.replica.effective_min_insync, local.log.config) == (1, hosting._of_log(LogConfig()))

    run(tmp_path, scenario)
