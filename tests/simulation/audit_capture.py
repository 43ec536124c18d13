"""The capture of a world: the real one, whose clients answer from the world's logs, groups and mirrors.

The seams are the cluster's client (metadata, offsets, whole topics) and the fetch of one partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping.state import Commit
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.runs import capture as capture_module
from millrace.audit.runs import event_reading, partition_pins
from millrace.audit.runs.event_reading import EventsRead
from tests.simulation.audit_answers import Answers
from tests.simulation.audit_clusters import EVENTS, Client, EventsLog
from tests.simulation.audit_logs import GRACE_MS, WINDOW_MS
from tests.simulation.audit_world import World, positions_of, routes_of


def config_of(world: World) -> AuditConfig:
    """The audit.yaml of this world."""
    clusters: dict[str, Any] = {}
    for number, name in enumerate([*world.sources, *world.aggregates]):
        cluster: dict[str, Any] = {"bootstrap": [f"h:{number + 1}"], "tier": "source"}
        if name in world.aggregates:
            cluster["tier"] = "aggregate"
            cluster["topics"] = dict(world.topics.renamed)
            cluster["mirror"] = "foreign" if world.foreign else "millrace"
        clusters[name] = cluster
    groups: dict[str, list[str]] = {}
    for group in world.groups:
        groups.setdefault(group.cluster, []).append(group.name)
    return parse_config(
        {
            "clusters": clusters,
            "topics": list(world.topics.audited),
            "window": f"{WINDOW_MS}ms",
            "grace": f"{GRACE_MS}ms",
            "groups": groups,
            "content": world.content,
            "keep": "forever" if world.keep_ms is None else f"{world.keep_ms}ms",
            "producers": [{"name": name, "since": iso_time(since)} for name, since in world.members.items()],
        }
    )


@dataclass
class WorldCapture:
    """What captures see of a world. `events` are the clusters' events topics, `whole` what they had told
    in all at the last capture; `skipped_count` is how many events were known by then and not read."""

    world: World
    events: dict[str, EventsLog] = field(default_factory=dict)
    whole: dict[str, list[tuple[bytes, bytes]]] = field(default_factory=dict)
    skipped_count: int = 0
    luck: Random = field(default_factory=lambda: Random(1))

    def take(
        self,
        config: AuditConfig,
        ledger: EventLedger,
        commit: Commit,
        between: Callable[[str], None],
        answers: Answers,
        known: EventsRead,
    ) -> Any:
        world = self.world
        mirrors = {
            f"millrace.{what}.{each.name}": each for each in world.mirrors for what in ("positions", "routes")
        }
        for name in config.clusters:
            self.events.setdefault(name, EventsLog(name, self.luck))
            if self.luck.random() < 0.05:
                self.events[name].make_anew()

        async def read_to_end(cluster: Client, topic: str, **options: Any) -> Any:
            is_again = "read_committed" in options
            between(f"{topic}, since" if is_again else topic)
            first = 0
            if topic == EVENTS:
                first = options["since"][0]
                end = cluster.events.told_by(world) if is_again else options["until"][0]
                if not is_again:
                    self.skipped_count += first
                    self.whole[cluster.name] = whole = world.told_in(cluster.name)
                    # Read from several clusters, or again.
                    whole += world.rng.sample(whole, len(whole) // 4)
                    world.rng.shuffle(whole)
                records = cluster.events.records[first:end]
            elif topic.startswith("millrace.positions"):
                mirror = mirrors[topic]
                records = positions_of(mirror)
                answers.tell_positions(mirror)
            else:
                records = routes_of(mirrors[topic])
            for offset, (key, value) in enumerate(records, first):
                yield SimpleNamespace(key=key, value=value, partition=0, offset=offset)

        async def committed(cluster: Client, name: str) -> Any:
            between("group")
            (group,) = [group for group in world.groups if group.name == name]
            return {
                (log.name, log.partition): SimpleNamespace(
                    offset=group.committed[log.place],
                    leader_epoch=group.epochs.get(log.place, -1),
                    metadata=group.mark,
                )
                for log in world.cluster_logs(cluster.name)
                if log.place in group.committed
            }

        async def histories(cluster: Client, newest: Any) -> dict:
            told = {
                key: world.logs[cluster.name, key[0]][key[1]].history() for key in newest if key[0] != EVENTS
            }
            return {key: history for key, history in told.items() if history}

        async def no_densities(cluster: Client, bounds: Any) -> dict:
            return {}

        with (
            mock.patch.object(
                capture_module,
                "Cluster",
                lambda name, *_, **__: Client(world, name, between, answers, self.events[name]),
            ),
            mock.patch.object(capture_module, "read_topic_to_end", read_to_end),
            mock.patch.object(event_reading, "read_topic_to_end", read_to_end),
            mock.patch.object(capture_module, "fetch_offsets", committed),
            mock.patch.object(capture_module, "bytes_per_offset", no_densities),
            mock.patch.object(partition_pins, "epoch_histories", histories),
        ):
            looking = capture_module.capture(config, ledger, lambda: world.now_ms, commit, known)
            return asyncio.run(looking)
