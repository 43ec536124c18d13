"""One source topic, two mirrors of it: one that stops at a gap, one that skips it; and what both must show.

Each mirror has a target topic of its own (`stop.<topic>`, `skip.<topic>`), so what one delivers is not the
other's. What a gap must leave behind is the same everywhere: one event with exact offsets in the target's
audit topic, the counter, the open gap in the status, and every record that is not in the gap.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_calls import command
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import Pair
from tests.waiting import patience

NOW_MS = int(time.time() * 1000)

STOP, SKIP = "stop", "skip"
EXACTLY_ONCE, AT_LEAST_ONCE = "exactly_once", "at_least_once"


def in_each_delivery(*, long: bool = True) -> Callable[[Any], Any]:
    """Decorator: what must be so is the same in both. At least once it is for the long suite, unless `long`
    says not."""
    marks = [pytest.mark.long] if long else []
    return pytest.mark.parametrize("delivery", [EXACTLY_ONCE, pytest.param(AT_LEAST_ONCE, marks=marks)])


def post(mirror: MirrorProcess, path: str, **body: Any) -> str:
    """A call of the mirror's control port; the answer's text."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{mirror.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=patience(60)) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path} {body}: {error.code} {error.read().decode()}") from None


def one(value: bytes, *, key: bytes | None = b"k", timestamp_ms: int = NOW_MS) -> Record:
    return Record(key, value, timestamp_ms=timestamp_ms)


async def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    try:
        return [record.value async for record in read_topic_to_end(cluster, topic)]
    except KafkaError:
        return []


@dataclass
class GapStory:
    """`async with` gives the two clusters; mirrors are started by `start`. `gaps`: policies of a mirror that
    has not one for all classes."""

    pair: Pair
    delivery: str = EXACTLY_ONCE
    gaps: dict[str, dict[str, str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.topic = self.pair.unique("flights")
        self.source = self.pair.source.cluster()
        self.target = self.pair.target.cluster()
        self.mirrors = {
            policy: self.pair.mirror(
                [self.topic],
                start=False,
                naming=f"{policy}.{{topic}}",
                delivery=self.delivery,
                gaps=self.gaps.get(policy, {"default": policy}),
                **self.config,
            )
            for policy in (STOP, SKIP)
        }

    async def __aenter__(self) -> GapStory:
        await self.source.__aenter__()
        await self.target.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        for mirror in self.mirrors.values():
            mirror.kill()
        await self.source.__aexit__(*error)
        await self.target.__aexit__(*error)

    # --- what happens ------------------------------------------------------------------------------

    async def create_source(self, **configs: str) -> None:
        await create_topic(self.source, self.topic, 1, 1, configs)

    async def create_targets(self, **configs: str) -> None:
        """Target topics with settings of their own, before the mirrors make them."""
        named = {key.replace("_", "."): value for key, value in configs.items()}
        for policy in (STOP, SKIP):
            await create_topic(self.target, f"{policy}.{self.topic}", 1, 1, named)

    async def send(self, *batches: Iterable[Record] | bytes) -> None:
        """Each batch of records, or each value as a batch of its own."""
        for batch in batches:
            records = [one(batch)] if isinstance(batch, bytes) else list(batch)
            await send(self.source, self.topic, 0, build_batch(records))

    def start(self) -> None:
        for mirror in self.mirrors.values():
            mirror.start()

    def stop(self) -> None:
        for mirror in self.mirrors.values():
            assert mirror.terminate() == 0, mirror.log

    def post(self, path: str, *policies: str) -> None:
        for policy in policies or (STOP, SKIP):
            selection: dict[str, Any] = {"source": self.pair.source.name, "topic": self.topic}
            post(self.mirrors[policy], path, **selection)

    async def carry_and_pause(self, *batches: list[Record] | bytes) -> None:
        """Sends these; both mirrors begin and carry them, and are paused then."""
        await self.send(*batches)
        self.start()
        carried = [
            [each] if isinstance(each, bytes) else [record.value for record in each] for each in batches
        ]
        for policy in (STOP, SKIP):
            await self.has(policy, *chain.from_iterable(carried))
        self.post("/pause")
        await self.is_in_state("paused")

    def skip(self) -> None:
        """Lets the gap pass at which the one mirror is stopped."""
        said = command(self.mirrors[STOP], "skip", self.place)
        assert said.endswith(" is let pass\n") and f" gap of {self.place} at offset " in said, said

    # --- what must be so ---------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """As an operator names partition 0."""
        return f"{self.pair.source.name}/{self.topic}:0"

    def partition(self, policy: str) -> dict[str, Any]:
        """The status line of partition 0."""
        of_topic = [
            each
            for each in self.mirrors[policy].status().get("partitions", [])
            if (each["topic"], each["partition"]) == (self.topic, 0)
        ]
        return of_topic[0] if of_topic else {}

    def metric(self, policy: str, name: str, **labels: str) -> float | None:
        for line in self.mirrors[policy].get("/metrics")[1].splitlines():
            found = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                return float(found[2])
        return None

    async def events(self, policy: str) -> list[tuple[str, int, int]]:
        """(class, from, to) of the mirror's gap events."""
        name, found = self.mirrors[policy].settings["name"], []
        try:
            async for record in read_topic_to_end(self.target, "millrace.audit"):
                if (record.key or b"").startswith(
                    f"gap/{name}/{self.pair.source.name}/{self.topic}/0/".encode()
                ):
                    event = json.loads(record.value or b"")
                    assert (event["type"], event["source"], event["topic"]) == (
                        "gap",
                        self.pair.source.name,
                        self.topic,
                    )
                    assert event.get("open", False) == (event["class"] == "recreated")
                    found.append((record.key, (event["class"], event["from"], event["to"])))
        except KafkaError:
            return []
        return sorted(dict(found).values())

    async def has(self, policy: str, *expected: bytes) -> None:
        """Waits until the mirror's target topic holds these values, then until its position is written."""

        async def is_there() -> bool:
            return await values(self.target, f"{policy}.{self.topic}") == list(expected)

        async def what_is_there() -> list[bytes | None]:
            return await values(self.target, f"{policy}.{self.topic}")

        try:
            await until(is_there, lambda: "")
        except AssertionError:
            there = await what_is_there()
            log = self.mirrors[policy].log[-3_000:]
            raise AssertionError(
                f"{policy}: {there} instead of {expected}; {self.partition(policy)} {log}"
            ) from None

    async def is_stopped_at(
        self, gap_class: str, first: int, following: int, after_ms: int = 0
    ) -> dict[str, Any]:
        """The mirror that stops: the status names the gap, the event is there once, the counters say so.
        Gives what the status says of the gap; it was met (again) later than `after_ms`."""

        async def stopped() -> dict[str, Any] | None:
            partition = self.partition(STOP)
            if partition.get("state") != "stopped" or not await self.events(STOP):
                return None
            return partition if partition["gap"]["at_ms"] > after_ms else None

        partition = await until(stopped, lambda: f"{self.partition(STOP)} {self.mirrors[STOP].log[-3_000:]}")
        assert partition is not None
        gap: dict[str, Any] = partition["gap"]
        assert (gap["class"], gap["from"], gap["to"]) == (gap_class, first, following), gap
        assert gap["reason"]
        assert gap["open"] == (gap_class == "recreated")
        assert (await self.events(STOP))[-1] == (gap_class, first, following)
        count = "1 offset" if following - first == 1 else f"{following - first} offsets"
        behind = " and what came after" if gap["open"] else ""
        line = f"{self.place} is stopped: {gap_class.replace('_', ' ')}, {count} from {first}{behind}\n"
        shown = command(self.mirrors[STOP], "status")
        assert line in shown and f"  millrace mirror skip {self.place}\n" in shown, shown
        await self._has_counted(STOP, gap_class, open_gaps=1)
        return gap

    async def _has_counted(self, policy: str, gap_class: str, *, open_gaps: int, gaps: int = 1) -> None:
        """The counter goes up after the event was written."""
        source = self.pair.source.name

        def counts() -> tuple[float | None, float | None]:
            labels = {"class": gap_class, "source": source}
            return (
                self.metric(policy, "millrace_mirror_gaps_total", **labels),
                self.metric(policy, "millrace_mirror_open_gaps", source=source),
            )

        async def are_right() -> bool:
            return counts() == (gaps, open_gaps)

        await until(are_right, lambda: f"{policy}: {counts()} instead of {(gaps, open_gaps)}")

    async def has_skipped(
        self, gap_class: str, first: int, following: int, policy: str = SKIP, *, times: int = 1
    ) -> None:
        """The gap is recorded and no longer open. Before it was met nothing is open either. `times`: of so
        many topics of the name, one after the other."""

        async def skipped() -> bool:
            return len(await self.events(policy)) >= times and await self._is_running(policy)

        await until(skipped, lambda: f"{self.partition(policy)} {self.mirrors[policy].log[-3_000:]}")
        events = await self.events(policy)
        assert events == [(gap_class, first, following)] * times, events
        await self._has_counted(policy, gap_class, open_gaps=0, gaps=times)

    async def _is_running(self, policy: str) -> bool:
        partition = self.partition(policy)
        return partition.get("state") == "running" and "gap" not in partition

    async def is_in_state(self, state: str, *policies: str) -> None:
        for policy in policies or (STOP, SKIP):

            async def is_so(policy: str = policy) -> bool:
                return self.partition(policy).get("state") == state

            await until(
                is_so, lambda policy=policy: f"{self.partition(policy)} {self.mirrors[policy].log[-3_000:]}"
            )


async def has_lost_its_end(gap: GapStory, shown: list[bytes], kept: int, later: list[bytes]) -> None:
    """The source showed `shown`, has lost what lies from `kept` on and written `later`: what both mirrors
    make of it."""
    await gap.is_stopped_at("truncated", kept, len(shown))
    await gap.has(SKIP, *shown, *later)
    await gap.has_skipped("truncated", kept, len(shown))
    await gap.has(STOP, *shown)
    gap.skip()
    await gap.has(STOP, *shown, *later)
    await gap.has_skipped("truncated", kept, len(shown), STOP)


async def wait_until_gone(cluster: Cluster, topic: str) -> None:
    async def is_gone() -> bool:
        return topic not in (await cluster.metadata([topic], max_age_ms=0)).topics

    await until(is_gone, lambda: f"{topic} stays")


def run(story: Any) -> None:
    asyncio.run(story)
