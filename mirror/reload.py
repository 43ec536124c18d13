"""Which changes of a config take effect without a restart. Pure.

Called by `operators` when a config is read again. A change is named by its path
(`sources[ewr].topics.include`, sources by their cluster). Whatever is not on the list here is refused by
name, so a field that comes later can never be half applied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millrace.mirror.config import MirrorConfig

# A source that comes or goes is a path of its own (`sources[ewr]`), and so is their order (`sources`).
RELOADABLE = re.compile(
    r"sources|sources\[[^\]]+\](\.topics\.(include|exclude)|\.groups(\.\w+)?|\.start|\.wanted_mb_per_s|\.progress_group"
    r"|\.connections)?"
    r"|sources\[[^\]]+\]\.security(\.\w+)*"
    r"|target\.security(\.\w+)*"
    r"|gaps\.\w+"
    r"|fetch\.\w+"
    r"|config_sync\.\w+"
    r"|control\.token(\.\w+)?"
    r"|in_flight_bytes|discovery_interval_ms|position_interval_ms|drain_timeout_ms"
)


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """Paths, sorted. Nothing of it may be applied while `refused` holds any."""

    changed: tuple[str, ...]
    refused: tuple[str, ...]
    added_sources: tuple[str, ...]
    removed_sources: tuple[str, ...]


def plan_reload(old: MirrorConfig, new: MirrorConfig) -> ReloadPlan:
    paths = sorted({*_differences(_as_mapping(old), _as_mapping(new), ""), *_order(old, new)})
    before, after = ({source.cluster for source in each.sources} for each in (old, new))
    return ReloadPlan(
        tuple(path for path in paths if RELOADABLE.fullmatch(path)),
        tuple(path for path in paths if not RELOADABLE.fullmatch(path)),
        tuple(sorted(after - before)),
        tuple(sorted(before - after)),
    )


def _order(old: MirrorConfig, new: MirrorConfig) -> Iterator[str]:
    """Which source's settings a topic has that several feed is said by the order (`topics`)."""
    before, after = ([source.cluster for source in each.sources] for each in (old, new))
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield "sources"


def _as_mapping(config: MirrorConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return values | {"sources": {source.cluster: source for source in config.sources}}


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    if path == "sources":
        for cluster in sorted({*old, *new}):
            if cluster in old and cluster in new:
                yield from _differences(old[cluster], new[cluster], f"sources[{cluster}]")
            else:
                yield f"sources[{cluster}]"
        return
    if isinstance(old, BaseModel) and type(old) is type(new):
        old, new = ({name: getattr(each, name) for name in type(each).model_fields} for each in (old, new))
    elif path or not isinstance(old, dict):
        yield path
        return
    for name in sorted({*old, *new}):
        yield from _differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
