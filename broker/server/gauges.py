"""The broker's state as gauges, read only when metrics are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.listener import Listener
from millrace.broker.telemetry.metrics import Gauges

_PAGE_SIZE = 4096


def gauges(replicas: ReplicaManager, listener: Listener, controller: ControllerRunner) -> Gauges:
    """What `BrokerCollector` asks at every scrape."""

    def read() -> Iterator[tuple[str, str, dict[str, str], float]]:
        yield "millrace_broker_connections", "Open connections.", {}, listener.connection_count
        yield "millrace_broker_partitions", "Partitions with a replica here.", {}, replicas.partition_count
        yield "millrace_broker_leaders", "Partitions led by this broker.", {}, len(replicas.leaders())
        yield "millrace_broker_controller", "1 on the controller.", {}, int(controller.in_office)
        yield "millrace_broker_waiting_fetches", "Fetches at rest.", {}, len(replicas.waiting_fetches)
        yield "millrace_broker_resident_bytes", "Resident memory of the process.", {}, _resident_size()
        for topic, partition, _, size in replicas.sizes():
            labels = {"topic": topic, "partition": str(partition)}
            yield "millrace_broker_log_bytes", "Size of a partition's log.", labels, size

    return read


def _resident_size() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_SIZE
