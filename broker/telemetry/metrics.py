"""The broker's numbers: plain integers on the hot path, turned into Prometheus metrics when scraped.

`BrokerMetrics` is incremented by attribute (no locks: all of it happens on the event loop). `collect`
reads it, and whatever gauges the broker's parts offer, at scrape time only. `MetricsServer` answers
`GET /metrics` where `metrics.listen` asks for it; it is off by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from millrace.broker.errors import PortTaken
from millrace.broker.protocol.address import Address

API_SLOTS = 128
"""Room for every API key of the protocol; a key outside is counted in slot 127."""


class BrokerMetrics:
    """Counters of one broker process, by API key where they are lists."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "closes",
        "connections_closed_for_protocol",
        "connections_opened",
        "connections_refused",
        "duplicate_batches",
        "error_counts",
        "fetch_bytes",
        "fetch_waits",
        "group_commits",
        "group_load_seconds",
        "group_loads",
        "group_rebalances",
        "isr_expands",
        "isr_shrinks",
        "produce_bytes",
        "produce_records",
        "replicated_bytes",
        "request_counts",
        "request_seconds",
        "throttled_requests",
        "unsupported_requests",
    )

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.connections_opened = 0
        self.connections_refused = 0
        self.connections_closed_for_protocol = 0
        self.unsupported_requests = 0
        self.throttled_requests = 0
        self.produce_bytes = 0
        self.produce_records = 0
        self.duplicate_batches = 0
        self.fetch_bytes = 0
        self.fetch_waits = 0
        self.group_commits = 0
        self.group_rebalances = 0
        self.group_loads = 0
        self.group_load_seconds = 0.0
        self.isr_expands = 0
        self.isr_shrinks = 0
        self.replicated_bytes = 0
        self.request_counts = [0] * API_SLOTS
        self.request_seconds = [0.0] * API_SLOTS
        self.error_counts: dict[int, int] = {}
        self.closes: dict[str, int] = {}

    def count_error(self, code: int) -> None:
        """An error code on its way to a client."""
        self.error_counts[code] = self.error_counts.get(code, 0) + 1

    def count_close(self, reason: str) -> None:
        """A connection that this broker ended, or did not take."""
        self.closes[reason] = self.closes.get(reason, 0) + 1


Gauges = Callable[[], Iterable[tuple[str, str, dict[str, str], float]]]
"""Read at scrape time: (name, help, labels, value)."""

_COUNTERS = {
    "bytes_in": "Bytes of requests received.",
    "bytes_out": "Bytes of responses handed to the network.",
    "connections_opened": "Connections accepted.",
    "connections_refused": "Connections closed at once because a limit of connections was reached.",
    "connections_closed_for_protocol": "Connections closed because the peer broke the protocol.",
    "unsupported_requests": "Requests for an API or version this broker does not speak.",
    "throttled_requests": "Requests answered with a throttle time because of a quota.",
    "produce_bytes": "Bytes of record batches appended for clients.",
    "produce_records": "Records appended for clients.",
    "duplicate_batches": "Batches recognised as repeated by an idempotent producer.",
    "fetch_bytes": "Bytes of record batches sent to readers.",
    "fetch_waits": "Fetch requests that waited for data.",
    "group_commits": "Offsets that groups committed, one for each partition.",
    "group_rebalances": "Generations of groups that came to a new assignment.",
    "group_loads": "Partitions of the offsets topic that were read to take over their groups.",
    "group_load_seconds": "Seconds spent on reading them, each for itself.",
    "isr_expands": "Replicas that came back into an in-sync set of a partition led here.",
    "isr_shrinks": "Times that an in-sync set of a partition led here lost late replicas.",
    "replicated_bytes": "Bytes of record batches fetched from leaders.",
}


class BrokerCollector:
    """Prometheus' view of `BrokerMetrics` and of the gauges; registered by `MetricsServer`."""

    def __init__(self, metrics: BrokerMetrics, api_name: Callable[[int], str], gauges: Gauges) -> None:
        self._metrics = metrics
        self._api_name = api_name
        self._gauges = gauges

    def collect(self):  # type: ignore[no-untyped-def]  # prometheus_client is imported only when asked for
        """Yield metric families, as prometheus_client's collectors do."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        metrics = self._metrics
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"millrace_broker_{name}", text, value=getattr(metrics, name))
        requests = CounterMetricFamily("millrace_broker_requests", "Requests answered.", labels=["api"])
        seconds = CounterMetricFamily(
            "millrace_broker_request_seconds",
            "Seconds from a request's arrival to its answer.",
            labels=["api"],
        )
        for key, count in enumerate(metrics.request_counts):
            if count:
                requests.add_metric([self._api_name(key)], count)
                seconds.add_metric([self._api_name(key)], metrics.request_seconds[key])
        yield requests
        yield seconds
        errors = CounterMetricFamily(
            "millrace_broker_errors", "Error codes sent to clients.", labels=["code"]
        )
        for code, count in metrics.error_counts.items():
            errors.add_metric([str(code)], count)
        yield errors
        closes = CounterMetricFamily(
            "millrace_broker_connections_ended", "Connections ended by the broker.", labels=["reason"]
        )
        for reason, count in metrics.closes.items():
            closes.add_metric([reason], count)
        yield closes
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, labels, value in self._gauges():
            family = families.get(name)
            if family is None:
                family = families[name] = GaugeMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()


class MetricsServer:
    """A minimal HTTP server for `GET /metrics`: one request a connection, headers up to 8 KiB."""

    def __init__(self, collector: BrokerCollector) -> None:
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._server: asyncio.Server | None = None

    async def start(self, address: Address) -> int:
        """Listen; returns the port. Raises PortTaken."""
        try:
            self._server = await asyncio.start_server(self._answer, address.host, address.port, limit=8192)
        except OSError as error:
            raise PortTaken(
                f"cannot serve metrics on {address}: {error.strerror or error}; "
                "set metrics.listen to a free address"
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from prometheus_client import generate_latest

        try:
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
            target = head.split(b" ", 2)[1] if head.count(b" ") >= 2 else b""
            if target.split(b"?")[0] == b"/metrics":
                status, body = "200 OK", generate_latest(self._registry)
            else:
                status, body = "404 Not Found", b"see /metrics\n"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return
        finally:
            writer.close()
