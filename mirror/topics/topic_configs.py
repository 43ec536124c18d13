"""Which settings of a source topic its target gets, and what to change so that it has them. Pure.

Called by `topics` at creation and at every synchronisation, and by `check`.

The rule, for every setting that is not excluded: set on the source means set to the same value on the target;
not set on the source (never, or no longer) means not set on the target. It compares what is now with what is
now, so a change that happened while no mirror ran is caught up with; an operator who wants a setting of the
target's own names it in `config_sync.exclude`. Where sources merge into one topic, the source that stands
first in the config decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millrace.broker.client.admin import ConfigValue
from millrace.broker.protocol.system_topics import AUDIT_TOPIC, AUDIT_TOPIC_SETTINGS

# Settings that belong to the target, not to the data: durability and durability's price, what the target does
# to batches, clocks, and where replicas and tiers are.
TARGET_OWN_CONFIGS = frozenset(
    {
        "min.insync.replicas",
        "compression.type",
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.zstd.level",
        "message.timestamp.type",
        "message.timestamp.difference.max.ms",
        "message.timestamp.before.max.ms",
        "message.timestamp.after.max.ms",
        "message.format.version",
        "message.downconversion.enable",
        "unclean.leader.election.enable",
        "leader.replication.throttled.replicas",
        "follower.replication.throttled.replicas",
        "remote.storage.enable",
        "remote.log.copy.disable",
        "remote.log.delete.on.disable",
        "local.retention.ms",
        "local.retention.bytes",
    }
)


def carried(source: Mapping[str, ConfigValue], excluded: Iterable[str] = ()) -> dict[str, str]:
    """The settings that a target topic gets from its source. Values that the source keeps secret are not
    known here and are left out."""
    own = TARGET_OWN_CONFIGS.union(excluded)
    return {
        key: each.value
        for key, each in source.items()
        if each.is_set and each.value is not None and key not in own
    }


def settings_to_begin_with(
    target_topic: str, source: Mapping[str, ConfigValue], excluded: Iterable[str] = ()
) -> dict[str, str]:
    """Those that a target topic is made with. The audit topic has its own, whatever the source's are: there
    it may have been made by the first producer that nobody had prepared it for."""
    settings = carried(source, excluded)
    return {**settings, **AUDIT_TOPIC_SETTINGS} if target_topic == AUDIT_TOPIC else settings


def differences(
    source: Mapping[str, ConfigValue], target: Mapping[str, ConfigValue], excluded: Iterable[str] = ()
) -> dict[str, str | None]:
    """What to write to the target: a value to set, None to give back to the default. Empty when in step."""
    own = TARGET_OWN_CONFIGS.union(excluded)
    wanted = carried(source, excluded)
    changes: dict[str, str | None] = {
        key: value
        for key, value in sorted(wanted.items())
        if key not in target or not target[key].is_set or target[key].value != value
    }
    for key, each in sorted(target.items()):
        is_secret = key in source and source[key].is_set and source[key].value is None
        if each.is_set and key not in wanted and key not in own and not is_secret:
            changes[key] = None
    return changes


def follows_its_source(target_topic: str) -> bool:
    """Whether a topic's settings are kept in step. The audit topic's are not: it also has the mirror's own
    gap events, which must not expire because a source's events do."""
    return target_topic != AUDIT_TOPIC


def deciding_source(
    feeding: Iterable[str], sources_in_order: Iterable[str], seen: Iterable[str]
) -> str | None:
    """The source whose settings a merged topic has: the first in the config's order that feeds it. None
    while a source that stands before it has not been seen, for it may feed it too."""
    feeding, seen = set(feeding), set(seen)
    for source in sources_in_order:
        if source in feeding:
            return source
        if source not in seen:
            return None
    return None
