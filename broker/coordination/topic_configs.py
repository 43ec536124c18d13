"""What a broker must know of topics before it opens their logs: whether the cluster has them, and by which
settings. A log is recovered by its topic's own settings, because the offsets of a compacted one have holes
that the defaults would take for damage; so would the settings of another topic that has its name by now.

Called by `server/broker.py` at its start, before there is a picture of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import NamedTuple
from uuid import UUID

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import NodeMissing, Session
from millrace.broker.storage.log_config import LogConfig


class TopicSettings(NamedTuple):
    """`topic_id` is None where it cannot be read; the settings are as `paths.decode_topic_config` gives
    them."""

    topic_id: UUID | None
    config: dict[str, str]


async def read_topic_settings(session: Session, topics: Collection[str]) -> dict[str, TopicSettings]:
    """Those of `topics` that the cluster has. Raises SessionError."""
    present = sorted(set(topics).intersection(await session.children(paths.TOPICS)))

    async def read_id(topic: str) -> UUID | None:
        try:
            return paths.decode_topic((await session.get(paths.topic_path(topic))).data).topic_id
        except (NodeMissing, ValueError):
            return None

    async def read_config(topic: str) -> dict[str, str]:
        try:
            node = await session.get(paths.topic_config_path(topic))
        except NodeMissing:
            return {}
        return paths.decode_topic_config(topic, node.data)

    ids, configs = await asyncio.gather(
        asyncio.gather(*map(read_id, present)), asyncio.gather(*map(read_config, present))
    )
    return {
        topic: TopicSettings(topic_id, config)
        for topic, topic_id, config in zip(present, ids, configs, strict=True)
    }


def recovery_config(
    known: Mapping[str, TopicSettings], topic: str, topic_id: UUID | None, defaults: LogConfig
) -> LogConfig | None:
    """By what a log that was made for `topic_id` (None: it does not say) is recovered; None where the cluster
    does not know its topic, or has another of its name: then it may have been compacted."""
    found = known.get(topic)
    if found is None or (topic_id is not None and found.topic_id != topic_id):
        return None
    return LogConfig.for_recovery(found.config, defaults)
