"""Logs of which a flush has failed, and what their broker does then.

After a failed sync nobody knows which pages are on the disk, and the next sync says nothing of them: the log
is offline until its broker is started anew (the product's `log_durability`). What follows is the shell's part
(`hosting`, `offline_replicas`): the partition is served and fetched no more, who waits for it is told, and
the cluster hears of it by a znode that goes with the session, so that the controller counts on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.broker.errors import KafkaError, KafkaStorageError
from millrace.broker.replication.partition import Role
from tests.simulation.cluster.disk import DiskFailed
from tests.simulation.cluster.zookeeper import Make, Remove, Set, VirtualZooKeeper

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

OFFLINE = "/offline/"


class FailedLogs:
    """One broker's; which they are, the logs themselves know."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(number for number, log in self._broker.logs.items() if log.is_offline)

    def flush(self, number: int) -> bool:
        """Whether all of the log is on the disk now."""
        broker = self._broker
        log = broker.logs[number]
        if log.is_offline:
            return False
        try:
            log.flush()
        except DiskFailed:
            broker.world.note(f"{broker.name} cannot flush {number}: the log is offline")
            self.let_go(number, KafkaStorageError("the log is offline"))
            self.report()
            return False
        return True

    def let_go(self, number: int, reason: KafkaError) -> None:
        """The partition is served and fetched no more, and who waits for it is told the reason."""
        broker = self._broker
        replica = broker.replicas[number]
        led = replica.role is Role.LEADER
        replica.let_go()
        broker.forget_waiting(number)
        if led:
            broker.waiting_appends[number].fail(reason)
            if broker.coordinators is not None:
                broker.coordinators.lost(number)

    def report(self) -> None:
        """Make the znode say what is so now; again and again, as a session may end before it does."""
        broker, numbers = self._broker, self.numbers
        path = f"{OFFLINE}{broker.id}"

        def write(zookeeper: VirtualZooKeeper) -> None:
            known = zookeeper.nodes.get(path)
            if known is not None and known.owner != zookeeper.acting:
                zookeeper.commit([Remove(path)])
                known = None
            if known is None:
                zookeeper.commit([Make(path, (broker.id, numbers), ephemeral=True)])
            elif known.value != (broker.id, numbers):
                zookeeper.commit([Set(path, (broker.id, numbers), known.version)])

        if numbers:
            broker.ask(write, lambda _: None)
