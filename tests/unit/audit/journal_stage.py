"""A producer that keeps a journal, and what a process finds that opens it again."""

from millrace.audit.clients.journal import (
    MIN_SIZE,
    Journal,
)
from millrace.audit.clients.recovery import ProducerJournal, recover
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.contract.events import CountEvent, EventLedger

IDENTITY = ProducerIdentity("00000000000000cd", "AA@ewr")


def reopen(path):
    journal = Journal(path)
    recovered = journal.recovered
    journal.close()
    return recovered


class Producer:
    """A session that is followed by a journal, with the truth beside it."""

    def __init__(self, path, size=MIN_SIZE):
        self.journal = ProducerJournal(Journal(path, size), 0)
        self.stream = StreamSession(IDENTITY, "flights", "00000000000000ab", window_ms=1000, lease_ms=60_000)
        self.journal.opened(self.stream)
        self.ledger = EventLedger()
        self.truth = {"acknowledged": set(), "ambiguous": set(), "failed": set()}

    def assign(self, created_ms):
        window, sequence = self.stream.assign(created_ms)
        if sequence > self.stream.reserved:
            self.journal.reserve(self.stream, window, sequence)
        return window, sequence

    def acknowledge(self, window, sequence):
        window.acknowledge(sequence, 10)
        self.truth["acknowledged"].add(sequence)

    def report(self, delivered=True):
        for event in self.stream.report(1):
            if isinstance(event, CountEvent):
                self.journal.reported(self.stream, event)
            if delivered:
                self.ledger.learn(event)
                window = self.stream.report_delivered(event)
                if window is not None:
                    self.journal.delivered(self.stream, window)

    def kill_and_restart(self, path):
        """The process dies, the file stays; what the next start reports is learned."""
        self.journal.close()
        journal = Journal(path)
        owed = recover(journal.recovered, 5)
        journal.close()
        for key, value in owed.items():
            self.ledger.add(key.encode(), value.encode())
        return owed

    def said(self, fate):
        (facts,) = self.ledger.streams.values()
        return {sequence for event in facts.windows.values() for sequence in getattr(event, fate)}
