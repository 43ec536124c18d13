"""Everybody who uses the cluster during a run, started, halted and judged together."""

from __future__ import annotations

from collections.abc import Sequence

from tests.cluster.faults.consumers import GroupReader
from tests.cluster.faults.producers import IdempotentProducer
from tests.cluster.faults.records import EVENTS, READERS, GroupJournal
from tests.cluster.faults.transactions import Copier, Writer
from tests.cluster.faults.workers import Worker
from tests.waiting import Deadline


class Load:
    """Two idempotent producers, two transactional ones, a copier, and a group of two readers."""

    def __init__(self, bootstrap: str, seed: int) -> None:
        self.producers = [
            IdempotentProducer("plain", EVENTS, bootstrap, seed, {}),
            IdempotentProducer(
                "packed", EVENTS, bootstrap, seed, {"compression.type": "lz4", "max.in.flight": 1}
            ),
        ]
        self.writers = [Writer("writer-a", bootstrap, seed), Writer("writer-b", bootstrap, seed)]
        self.copier = Copier("copier", bootstrap, seed)
        self.group = GroupJournal(READERS)
        self.readers = [
            GroupReader("reader-1", self.group, bootstrap, {"group.instance.id": "static"}),
            GroupReader("reader-2", self.group, bootstrap, {}),
        ]

    @property
    def workers(self) -> Sequence[Worker]:
        return [*self.producers, *self.writers, self.copier, *self.readers]

    @property
    def failures(self) -> list[str]:
        return [f"{each.name} of the load failed: {each.failure}" for each in self.workers if each.failure]

    def start(self) -> None:
        for worker in self.workers:
            worker.start()

    def halt(self, timeout_s: float) -> list[str]:
        """Nothing is being written any more; readers go on. Whoever cannot come to an end is named."""
        deadline = Deadline("the load comes to an end", within_s=timeout_s)
        sources: list[Worker] = [*self.producers, *self.writers]
        for worker in sources:
            worker.halt()
        late = [each for each in sources if not each.wait_until_halted(deadline)]
        # What it has to copy is all there only now, so its time begins now.
        self.copier.halt()
        if not self.copier.wait_until_halted(Deadline("the copier comes to an end", within_s=timeout_s)):
            late.append(self.copier)
        return [f"{worker.name} does not come to an end within {timeout_s:.0f} s" for worker in late]

    def resume(self) -> None:
        for worker in [*self.producers, *self.writers, self.copier]:
            worker.resume()

    def stop(self) -> None:
        for worker in self.workers:
            worker.halt()
        for worker in self.workers:
            worker.stop()

    def figures(self) -> str:
        acknowledged = sum(len(each.journal.acknowledged) for each in self.producers)
        unknown = sum(len(each.journal.unknown) for each in self.producers)
        outcomes: dict[str, int] = {}
        for writer in self.writers:
            for transaction in list(writer.journal.transactions):
                outcomes[transaction.outcome.value] = outcomes.get(transaction.outcome.value, 0) + 1
        counts = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
        return (
            f"{acknowledged} acknowledged, {unknown} given up, transactions: {counts}, "
            f"{self.copier.copied_count} copied, {len(self.group.seen)} seen"
        )
