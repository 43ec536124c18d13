"""The settings that hold now: those that a broker was started with, under those that were set while it runs.

Made by `server/broker.py`, which calls `refresh` whenever the cluster's picture of broker settings has
changed (and so before the broker serves anything: what was set survives its restarts). Each part that keeps
to settings of the table in `coordination/dynamic_configs.py` follows them by a function of its own; it is
called at once and at every change. What somebody wrote into ZooKeeper that cannot be used is told in the
log; what it would have replaced holds on, but that nothing is removed from topics that inherit it.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.dynamic_configs import settings_in_force, usable
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import DEFAULT_BROKER
from millrace.broker.storage.log_config import SETTINGS, UNREADABLE, LogConfig

log = structlog.get_logger("millrace.broker")

Follower = Callable[[BrokerSettings], None]


class DynamicSettings:
    """`current` are the settings in force."""

    def __init__(self, settings: BrokerSettings, broker_id: int, cache: MetadataCache) -> None:
        self.current = settings
        self._of_start = settings
        self._names = (DEFAULT_BROKER, str(broker_id))
        self._cache = cache
        self._followers: list[Follower] = []
        self._unusable: dict[str, dict[str, str]] = {name: {} for name in self._names}

    def follow(self, follower: Follower) -> None:
        """Call this now and whenever settings change."""
        self._followers.append(follower)
        follower(self.current)

    def log_defaults(self) -> LogConfig:
        """What topics do not set themselves. While something of it that was set cannot be known, they are
        served as a topic is whose own settings cannot: what would replace it might take records away that it
        was set to keep."""
        defaults = LogConfig.from_broker_config(self.current.texts())
        unusable = {name for bad in self._unusable.values() for name in bad}
        unknown = [
            setting.name
            for setting in SETTINGS.values()
            if setting.broker_name in unusable or UNREADABLE in unusable
        ]
        return defaults.without_knowing(unknown) if unknown else defaults

    def refresh(self) -> None:
        """The picture of the cluster may show other settings than before."""
        levels, unusable = [], {}
        for name in self._names:
            good, unusable[name] = usable(self._cache.broker_configs.get(name, {}))
            levels.append(good)
            if unusable[name] != self._unusable.get(name, {}):
                for reason in unusable[name].values():
                    log.error("a broker setting cannot be used and does not count", of=name, error=reason)
        settings = settings_in_force(self._of_start, levels)
        if settings == self.current and unusable == self._unusable:
            return
        self._unusable = unusable
        before, self.current = self.current.texts(), settings
        changed = {key: text for key, text in settings.texts().items() if text != before[key]}
        if changed:
            log.info("broker settings changed", settings=changed)
        for follower in self._followers:
            follower(settings)
