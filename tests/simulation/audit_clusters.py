"""The clusters of a world as the audit's clients see them: metadata, offsets, events topics, fetches.

Used by `audit_capture` and `audit_product`, in the place of the sockets.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from millrace.audit.scanning.range_reader import RangeReader
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.offsets import EARLIEST
from tests.simulation.audit_answers import Answers
from tests.simulation.audit_world import World

_OUT_OF_RANGE = 1
EVENTS = "millrace.audit"


class Client:
    """A cluster as its client shows it. `between` is called at every question: the world goes on. What was
    answered is written down in `answers`."""

    def __init__(
        self,
        world: World,
        name: str,
        between: Callable[[str], None],
        answers: Answers,
        events: EventsLog,
    ):
        self.world, self.name, self.between, self.answers = world, name, between, answers
        self.events = events

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def metadata(self, topics: list[str] | None = None, max_age_ms: int = 0) -> Any:
        names = [name for cluster, name in self.world.logs if cluster == self.name]
        names += [EVENTS]
        for mirror in self.world.mirrors if not self.world.foreign else ():
            if mirror.aggregate == self.name:
                names += [f"millrace.positions.{mirror.name}", f"millrace.routes.{mirror.name}"]
        wanted = names if topics is None else [name for name in topics if name in names]
        logs: dict[str, list] = {name: list(self.world.logs.get((self.name, name), ())) for name in wanted}
        logs |= {name: [self.events] for name in wanted if name == EVENTS}
        return SimpleNamespace(
            cluster_id=f"id-{self.name}",
            topics={
                name: SimpleNamespace(topic_id=of[0].topic_id if of else NO_TOPIC_ID)
                for name, of in logs.items()
            },
            topic_errors={},
            partitions=lambda name: [(name, log.partition) for log in logs.get(name, ())],
        )

    async def list_offsets(self, timestamps: dict, read_committed: bool = False) -> dict:
        if (EVENTS, 0) in timestamps:
            at_begin = timestamps[EVENTS, 0] == EARLIEST
            offset = self.events.start if at_begin else self.events.told_by(self.world)
            return {(EVENTS, 0): SimpleNamespace(offset=offset, leader_epoch=-1)}
        self.between("offsets")
        answers = {}
        for (name, partition), at in timestamps.items():
            log = self.world.logs[self.name, name][partition]
            offset = log.start if at == EARLIEST else log.end
            if read_committed:
                offset = log.stable_end
            self.answers.tell_offset(log, offset, start=at == EARLIEST, stable=read_committed)
            answers[name, partition] = SimpleNamespace(offset=max(offset, log.start), leader_epoch=-1)
        return answers


class EventsLog:
    """A cluster's events topic: what was told, in another order than it was, and some of it again."""

    partition, start = 0, 0

    def __init__(self, cluster: str, luck: Random):
        self.cluster, self._luck = cluster, luck
        self.topic_id = uuid.UUID(int=luck.getrandbits(128))
        self.records: list[tuple[bytes, bytes]] = []
        self._taken = 0

    def told_by(self, world: World) -> int:
        """The end, of what the world's programs have told by now."""
        new = world.told_in(self.cluster, self._taken)
        self._taken = len(world.sent)
        # Mirrors carry events of other clusters' topics, and carry some again.
        new += self._luck.sample(self.records, min(len(self.records), len(new) // 4))
        self._luck.shuffle(new)
        self.records += new
        return len(self.records)

    def make_anew(self) -> None:
        """The topic was deleted, and all that it had is told again."""
        self.topic_id = uuid.UUID(int=self._luck.getrandbits(128))
        self._luck.shuffle(self.records)


class Reader(RangeReader):
    """The real range reader over a world's logs: answers of a few batches, from whole batches on."""

    def __init__(self, world: World, answers: Answers):
        self.world, self.answers = world, answers

    def _submit(self, work: Any) -> Any:
        try:
            work.send(None)
        except StopIteration as done:
            answer = done.value
            return SimpleNamespace(result=lambda: answer, cancel=lambda: None)
        raise AssertionError("a fetch here never waits")

    async def _fetch(self, range_: Any, offset: int) -> Any:
        log = self.world.logs[range_.cluster, range_.topic_here][range_.partition]
        if not log.start <= offset <= log.end:
            return SimpleNamespace(
                error_code=_OUT_OF_RANGE, log_start_offset=log.start, records=b"", aborted=[]
            )
        first = next(i for i, batch in enumerate(log.batches) if batch.last >= offset)
        self.answers.tell_batches(log, log.batches[first].base, range_.first_offset, range_.end_offset)
        data = b"".join(batch.data for batch in log.batches[first : first + 20])
        aborted = [(pid, start) for pid, start, end in log.aborted if end >= offset]
        return SimpleNamespace(error_code=0, log_start_offset=log.start, records=data, aborted=aborted)
