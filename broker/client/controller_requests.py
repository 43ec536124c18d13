"""What requests to a controller have in common: who it is, how long it may take, what a refusal says."""

from __future__ import annotations

import datetime
from typing import Any

from kio.static.primitive import i32Timedelta

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import KafkaError, NotController, error_for_code


async def controller_id(cluster: Cluster) -> int:
    """The node to ask. Raises NotController, which a retry outlasts, while the cluster has none."""
    view = await cluster.metadata([])
    if view.controller_id not in view.brokers:
        raise NotController(f"{cluster}: it has no controller now")
    return view.controller_id


def server_timeout(cluster: Cluster) -> i32Timedelta:
    """The server's own limit: shorter than ours, so that its answer comes before we give up."""
    return i32Timedelta.parse(datetime.timedelta(milliseconds=cluster.request_timeout_ms * 3 // 4))


def check(cluster: Cluster, what: str, result: Any) -> None:
    """Raise what the part of an answer about `what` says, if it says an error."""
    if result.error_code:
        raise refusal(cluster, what, result)


def refusal(cluster: Cluster, what: str, result: Any) -> KafkaError:
    """The error of the part of an answer about `what`, in the server's words where it has some."""
    return refusal_of_code(cluster, what, int(result.error_code), getattr(result, "error_message", None))


def refusal_of_code(cluster: Cluster, what: str, code: int, message: str | None = None) -> KafkaError:
    return error_for_code(code, f"{cluster}: {what}: {message or error_for_code(code)}")
