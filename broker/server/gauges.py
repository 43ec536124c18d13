"""The broker's state as gauges, read only when metrics are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.server.context import BrokerServices
from millrace.broker.server.listener import Listener
from millrace.broker.telemetry.metrics import Gauges

_PAGE_SIZE = 4096


def gauges(services: BrokerServices, listener: Listener, controller: ControllerRunner) -> Gauges:
    """What `BrokerCollector` asks at every scrape."""
    replicas, sessions, quotas = services.replica_manager, services.fetch_sessions, services.quotas

    def read() -> Iterator[tuple[str, str, dict[str, str], float]]:
        yield "millrace_broker_connections", "Open connections.", {}, listener.connection_count
        yield "millrace_broker_partitions", "Partitions with a replica here.", {}, replicas.partition_count
        yield "millrace_broker_leaders", "Partitions led by this broker.", {}, len(replicas.leaders())
        yield "millrace_broker_controller", "1 on the controller.", {}, int(controller.in_office)
        yield "millrace_broker_waiting_fetches", "Fetches at rest.", {}, len(replicas.waiting_fetches)
        yield "millrace_broker_unread_answer_bytes", "Answers not read yet.", {}, listener.backlog.held
        yield "millrace_broker_slow_readers", "Connections that hold such.", {}, len(listener.backlog)
        yield (
            "millrace_broker_request_buffer_bytes",
            "Large requests on their way in.",
            {},
            listener.memory.used,
        )
        yield "millrace_broker_request_memory_waits", "Waits for room.", {}, listener.memory.refusals
        yield "millrace_broker_fetch_sessions", "Incremental fetch sessions.", {}, len(sessions)
        yield "millrace_broker_fetch_session_partitions", "Theirs.", {}, sessions.partition_count
        yield "millrace_broker_fetch_session_evictions", "Given up for others.", {}, sessions.evictions
        for kind, quota in (("produce", quotas.produce), ("fetch", quotas.fetch)):
            yield "millrace_broker_limited_clients", "Clients under a quota.", {"kind": kind}, len(quota)
        for state, count in services.groups.count_by_state().items():
            yield "millrace_broker_groups", "Groups coordinated here.", {"state": state}, count
        transactions = services.transactions
        yield "millrace_broker_open_transactions", "Not ended everywhere.", {}, transactions.open_count
        for outcome, count in (
            ("committed", transactions.committed_count),
            ("aborted", transactions.aborted_count),
            ("timed out", transactions.timed_out_count),
        ):
            labels = {"outcome": outcome}
            yield "millrace_broker_ended_transactions", "By outcome; timed out: also aborted.", labels, count
        markers = transactions.markers
        yield "millrace_broker_waiting_markers", "Transaction markers to be sent.", {}, markers.waiting_count
        yield "millrace_broker_marker_retries", "Those that were sent again.", {}, markers.retry_count
        yield "millrace_broker_resident_bytes", "Resident memory of the process.", {}, _resident_size()
        under = replicas.under_replicated_count, replicas.under_min_isr_count
        yield "millrace_broker_under_replicated_partitions", "Led, some replica not in sync.", {}, under[0]
        yield "millrace_broker_under_min_isr_partitions", "Led, and no acks=all is taken.", {}, under[1]
        offline = sum(map(len, replicas.offline_partitions().values()))
        yield "millrace_broker_offline_partitions", "Here and not usable.", {}, offline
        yield "millrace_broker_stray_logs", "Set aside; a person decides.", {}, replicas.stray_count
        for folder, room in replicas.rooms.items():
            labels = {"folder": str(folder)}
            if room.free_bytes is not None:
                yield "millrace_broker_data_folder_free_bytes", "Room on its disk.", labels, room.free_bytes
            yield (
                "millrace_broker_data_folder_refuses_writes",
                "1 while writes are refused for want of room.",
                labels,
                int(room.is_refusing),
            )
        for (topic, partition), lag in replicas.follower_lags().items():
            labels = {"topic": topic, "partition": str(partition)}
            yield "millrace_broker_follower_lag", "Committed records that are missing here.", labels, lag
        for topic, partition, _, size in replicas.sizes():
            labels = {"topic": topic, "partition": str(partition)}
            yield "millrace_broker_log_bytes", "Size of a partition's log.", labels, size

    return read


def _resident_size() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_SIZE
