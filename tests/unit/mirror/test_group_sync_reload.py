"""A config that is read again takes effect in steps: it is in force before the sources that it adds are
there, which wait for those that it removes to be given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.mirror.config import parse_config
from millrace.mirror.offsets import group_sync
from millrace.mirror.offsets.group_sync import GroupSync, _Source
from tests.unit.mirror.test_group_sync import NOW_MS, settings
from tests.waiting import until_async as until


def test_a_source_that_is_added_after_the_config_is_in_force_is_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_sync, "CHECK_PAUSE_S", 0.0)
    synced: list[tuple[str, object]] = []
    looks = 0

    async def sync_source(_sync: GroupSync, source: _Source) -> None:
        synced.append((source.name, source.cluster))

    monkeypatch.setattr(GroupSync, "_sync_source", sync_source)

    async def story() -> None:
        before, after = parse_config(settings()), parse_config(settings(include=["a"]))
        now: list[Any] = [before, {}]

        def look() -> Any:
            nonlocal looks
            looks += 1
            return now[0], dict(now[1])

        nobody: Any = None
        sync = GroupSync(nobody, lambda: NOW_MS, lambda: True, look)
        running = asyncio.create_task(sync.run())
        now[0], seen = after, looks
        await until(lambda: looks > seen + 3)
        cluster = object()
        now[1] = {"ewr": cluster}
        await until(lambda: bool(synced) or running.done())
        running.cancel()
        assert synced[0] == ("ewr", cluster)

    asyncio.run(story())
