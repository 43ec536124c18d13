"""Every znode of the old consumer model: its path and its payload, both ways. Pure.

The layout is that of Kafka 0.8, so that its tools and its own consumers can share a group:

    /consumers/<group>/ids/<consumer>                ephemeral   {"version":1,"subscription":{topic: streams},
                                                                 "pattern":"static|white_list|black_list",
                                                                 "timestamp":"<ms>"}
    /consumers/<group>/owners/<topic>/<partition>    ephemeral   <consumer>-<stream number>
    /consumers/<group>/offsets/<topic>/<partition>   persistent  offset of the next message, in decimal

Paths are below the cluster's chroot. A payload that cannot be understood raises ValueError. The timestamp is
text in Kafka's own registrations and a number in some clients'; both are read.
"""

from __future__ import annotations

import json
import re

from millrace.broker.coordination.zookeeper_consumer.rules import Pattern, Subscription

CONSUMERS = "/consumers"


def ids_path(group: str) -> str:
    return f"{CONSUMERS}/{group}/ids"


def id_path(group: str, consumer: str) -> str:
    return f"{CONSUMERS}/{group}/ids/{consumer}"


def owners_path(group: str, topic: str) -> str:
    return f"{CONSUMERS}/{group}/owners/{topic}"


def owner_path(group: str, topic: str, partition: int) -> str:
    return f"{CONSUMERS}/{group}/owners/{topic}/{partition}"


def offsets_path(group: str, topic: str) -> str:
    return f"{CONSUMERS}/{group}/offsets/{topic}"


def offset_path(group: str, topic: str, partition: int) -> str:
    return f"{CONSUMERS}/{group}/offsets/{topic}/{partition}"


def encode_registration(subscription: Subscription, now_ms: int) -> bytes:
    payload = {
        "version": 1,
        "subscription": dict(subscription.streams),
        "pattern": subscription.pattern.value,
        "timestamp": str(now_ms),
    }
    return json.dumps(payload, separators=(",", ":")).encode()


def decode_registration(data: bytes) -> Subscription:
    """Raises ValueError: no JSON object, a pattern that is none, counts below 1, a regex that is none."""
    payload = json.loads(data)
    if not isinstance(payload, dict) or not isinstance(payload.get("subscription"), dict):
        raise ValueError("expected an object with a subscription")
    streams = payload["subscription"]
    if not all(isinstance(count, int) and count >= 1 for count in streams.values()):
        raise ValueError("expected counts of streams of at least 1")
    subscription = Subscription(Pattern(payload.get("pattern", "static")), streams)
    try:
        subscription.count_for("")
    except re.error as error:
        raise ValueError(f"the topic filter cannot be compiled: {error}") from None
    return subscription


def encode_offset(offset: int) -> bytes:
    return b"%d" % offset


def decode_offset(data: bytes) -> int:
    """Raises ValueError. Negative numbers (old tools wrote -1 and -2) are no offsets."""
    offset = int(data)
    if offset < 0:
        raise ValueError(f"{offset} is no offset")
    return offset
