"""The producers of the audit's world: real sessions and journals, whose records fare as the world has it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from millrace.audit.clients.journal import Journal
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.event_values import CLOSED, CountEvent, StreamEvent
from millrace.audit.contract.events import Event
from tests.simulation.audit_logs import LEASE_MS, WINDOW_MS, Log, Rec

if TYPE_CHECKING:
    from tests.simulation.audit_world import World


class Producer:
    """One producer start on one topic of one cluster, numbered, with or without journal and transactions."""

    def __init__(self, world: World, cluster: str, topic: str, number: int, folder: Path):
        rng = world.rng
        self.world, self.cluster, self.topic = world, cluster, topic
        self.stream = f"{number:08x}{rng.getrandbits(32):08x}"
        self.name = f"producer-{number}"
        self.backdates = rng.random() < world.backdating
        self.skew_ms = (
            rng.choice((0, 0, 100, -200)) if not self.backdates else rng.choice((-700_000, 0, 90_000))
        )
        self.session = StreamSession(
            ProducerIdentity(f"{number:016x}", self.name),
            topic,
            self.stream,
            window_ms=WINDOW_MS,
            lease_ms=LEASE_MS,
            promises=not self.backdates,
            content=world.content,
        )
        self.pending: list[tuple] = []
        self.path = folder / f"{self.stream}.journal"
        self.journal: ProducerJournal | None = None
        self.file: Journal | None = None
        if rng.random() < world.journaled:
            self.file = Journal(self.path, 1 << 14)
            self.journal = ProducerJournal(self.file, self.now_ms)
            self.journal.opened(self.session)
        self.report()

    @property
    def now_ms(self) -> int:
        return self.world.now_ms + getattr(self, "skew_ms", 0)

    def produce(self) -> None:
        """Number some records and hand them to the client."""
        rng, session = self.world.rng, self.session
        for _ in range(rng.randint(1, 8)):
            created_ms = self.now_ms - (rng.randint(0, 3000) if self.backdates else 0)
            window, sequence = session.assign(max(created_ms, 0))
            if self.journal is not None and sequence > session.reserved:
                self.journal.reserve(session, window, sequence)
            if rng.random() < 0.02:
                session.give_back(window, sequence)
                continue
            rec = Rec(self.stream, sequence, max(created_ms, 0), rng.getrandbits(30), self.name)
            self.pending.append((window, rec))

    def settle(self) -> None:
        """Some of what is pending gets its fate."""
        rng, world = self.world.rng, self.world
        if world.transactions and rng.random() < 0.3 and self._transact():
            return
        while len(self.pending) > rng.randint(0, 6):
            window, rec = self.pending.pop(rng.randrange(min(3, len(self.pending))))
            if rng.random() < world.unsure:
                self._unsure(window, rec)
            else:
                if rng.random() >= world.loss_at_source:
                    world.write(self.cluster, self.topic, rec)
                    if rng.random() < world.double_at_source:
                        world.note("retried batch")
                        world.write(self.cluster, self.topic, rec)
                else:
                    world.note("lost at source")
                self.acknowledge(window, rec)
        if self.journal is not None:
            self.journal.settle()

    def acknowledge(self, window, rec: Rec) -> None:
        self.world.acknowledged.setdefault(self.stream, []).append(rec)
        window.acknowledge(rec.sequence, len(rec.value or b""), rec.digest if self.world.content else 0)

    def _unsure(self, window, rec: Rec) -> None:
        rng, world = self.world.rng, self.world
        if rng.random() < 0.3:
            self.session.mark_failed(window, rec.sequence)
        else:
            if rng.random() < 0.5:
                world.note("ambiguous, written")
                world.write(self.cluster, self.topic, rec)
            self.session.mark_ambiguous(window, rec.sequence)
        if self.journal is not None:
            self.journal.not_acknowledged(self.session, window)

    def _transact(self) -> bool:
        """All that is pending in one transaction, ended at once or left open for a while."""
        rng, world = self.world.rng, self.world
        log = rng.choice(world.logs_of(self.cluster, self.topic))
        if log.open_pid >= 0 or not self.pending:
            return False
        members, self.pending = self.pending, []
        log.append([rec for _, rec in members], pid=rng.randint(1, 9))
        world.transactions_open.append((self, log, members))
        return True

    def end_transaction(self, log: Log, members: list[tuple], commit: bool) -> None:
        log.end_transaction(commit)
        self.world.note("transaction committed" if commit else "transaction aborted")
        for window, rec in members:
            if commit:
                self.acknowledge(window, rec)
            else:
                self.session.mark_failed(window, rec.sequence)
                if self.journal is not None:
                    self.journal.not_acknowledged(self.session, window)

    def report(self) -> None:
        self._publish(self.session.report(self.now_ms))

    def close(self) -> None:
        for each in [each for each in self.world.transactions_open if each[0] is self]:
            self.world.end_transaction(each, self.world.rng.random() < 0.5)
        self._publish(self.session.close(self.now_ms))
        if self.journal is not None:
            self.journal.close()
        self._leave()

    def kill(self) -> None:
        """kill -9; with a journal the next start tells what this one owed."""
        world = self.world
        for each in [each for each in world.transactions_open if each[0] is self]:
            world.transactions_open.remove(each)
            each[1].end_transaction(False)  # its coordinator gives it up
        for _, rec in self.pending:
            if world.rng.random() < 0.5:
                world.write(self.cluster, self.topic, rec)
        self._leave()
        world.note("producer killed")
        if self.file is None:
            return
        self.file.close()
        if world.rng.random() < 0.8:
            world.note("journal recovered")
            file = Journal(self.path, 1 << 14)
            following = ProducerJournal(file, self.now_ms)
            world.publish_owed(self, following.owed)
            following.close()

    def _leave(self) -> None:
        self.world.producers.remove(self)
        self.pending = []

    def _publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, CountEvent) and self.journal is not None:
                self.journal.reported(self.session, event)
            if not self.world.quiet and self.world.rng.random() < 0.03:
                self.session.report_again(event)  # not delivered: told anew next time
                if isinstance(event, StreamEvent) and event.state == CLOSED:
                    self.world.note("closing not delivered")
                continue
            self.world.publish(event, self.cluster)
            window = self.session.report_delivered(event)
            if self.journal is not None and window is not None:
                self.journal.delivered(self.session, window)
            if self.journal is not None and isinstance(event, StreamEvent) and event.state == CLOSED:
                self.journal.gone(self.session)


class CountingProducer:
    """A producer that cannot number its records, and reports how many it had acknowledged."""

    def __init__(self, world: World, cluster: str, topic: str, number: int):
        self.world, self.cluster, self.topic = world, cluster, topic
        self.stream = f"{number:08x}{world.rng.getrandbits(32):08x}"
        self.session_id, self.name = f"{number:016x}", f"counter-{number}"
        self.windows: dict[int, int] = {}
        self.digests: Counter[int] = Counter()
        self.tells_digests = world.content and number % 2 == 0
        self.reports: Counter[int] = Counter()
        self.changed: set[int] = set()
        self._tell("opened")

    def produce(self) -> None:
        rng, world = self.world.rng, self.world
        for _ in range(rng.randint(1, 6)):
            rec = Rec(self.stream, 0, world.now_ms, rng.getrandbits(30), self.name)
            if rng.random() >= world.loss_at_source:
                world.write(self.cluster, self.topic, rec)
                if rng.random() < world.double_at_source:
                    world.write(self.cluster, self.topic, rec)
            self.windows[rec.window] = self.windows.get(rec.window, 0) + 1
            self.digests[rec.window] += rec.digest
            self.changed.add(rec.window)
        world.note("count-only")

    def settle(self) -> None:
        pass

    def report(self) -> None:
        nothing = BitMap64()
        for start_ms in sorted(self.changed):
            self.reports[start_ms] += 1
            self.world.publish(
                CountEvent(
                    self.stream, self.session_id, self.topic, self.name, start_ms, WINDOW_MS,
                    self.reports[start_ms], self.windows[start_ms], 0, nothing, nothing, nothing,
                    self.world.now_ms,
                    self.digests[start_ms] & DIGEST_MASK if self.tells_digests else None, False,
                ),
                self.cluster,
            )  # fmt: skip
        self.changed = set()
        self._tell("heartbeat")

    def close(self) -> None:
        self.report()
        self._tell("closed")
        self.world.producers.remove(self)

    def kill(self) -> None:
        self.world.producers.remove(self)

    def _tell(self, state: str) -> None:
        told = sum(self.windows.values())
        promise = max(self.world.now_ms - 1000, 0)
        self.world.publish(
            StreamEvent(
                state, self.stream, self.session_id, self.topic, self.name, "", "", "", WINDOW_MS, told, told,
                promise if state != "closed" else None, LEASE_MS, self.world.now_ms,
            ),
            self.cluster,
        )  # fmt: skip
