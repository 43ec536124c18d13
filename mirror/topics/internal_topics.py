"""Topics that are never carried, whatever a source's patterns say, and why. Pure.

Used by `routes.TopicSelector`; told by `check` and by the status, because a user's own topic may bear such a
name (`payments.heartbeats`), and nothing may be left out in silence. Nor is anything renamed to what a
cluster, a mirror or the audit keeps for itself: `config` asks `why_never_written`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.broker.wording import some
from millrace.mirror.topics.own_topics import OWN_TOPICS

MARKED = "the cluster says that it keeps it for itself"
"""The reason where a name tells nothing, and the cluster's metadata does."""

# Carrying them would either break the target (`__consumer_offsets`) or make one system follow the
# book-keeping of another.
INTERNAL_TOPICS = (
    # __consumer_offsets, __transaction_state, __cluster_metadata, __share_group_state
    (re.compile(r"__.*"), "names with two underscores are a cluster's own"),
    (
        re.compile("|".join(f"{re.escape(each.prefix)}.*" for each in OWN_TOPICS)),
        "a mirror keeps its own records in topics of such names",
    ),
    (
        re.compile(
            r"heartbeats|.*\.heartbeats|mm2-.*\.internal|.*\.checkpoints\.internal|mm2-offset-syncs\..*"
        ),
        "MirrorMaker 2 keeps its own records in topics of such names",
    ),
    (
        re.compile(r"connect-(configs|offsets|status)"),
        "Kafka Connect keeps its own records in it, of connectors at this cluster",
    ),
    (
        re.compile(r"_schemas"),
        "a Schema Registry keeps its log in it, and those of two give the same numbers to different schemas: "
        "copy schemas from registry to registry",
    ),
    (re.compile(r"_(confluent|redpanda).*"), "software of the cluster keeps its own records in it"),
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A topic that a source's patterns select and that is never carried. `is_named`: a pattern is this very
    name, so somebody expects it to be carried."""

    topic: str
    reason: str
    is_named: bool = False


def why_internal(topic: str) -> str | None:
    """None: by its name it is a topic like any other."""
    return next((reason for pattern, reason in INTERNAL_TOPICS if pattern.fullmatch(topic)), None)


def why_never_written(topic: str) -> str | None:
    """Why no record of a source may come into a topic of this name: it is kept by a cluster, a mirror or the
    audit, which would read the record as one of their own."""
    if topic == AUDIT_TOPIC:
        return "the audit's events are in it"
    return next((reason for pattern, reason in INTERNAL_TOPICS[:2] if pattern.fullmatch(topic)), None)


def left_out_sentences(left_out: Iterable[LeftOut]) -> list[str]:
    """`a, b and 7 more (reason)`, one for each reason; what every cluster has comes last."""
    by_reason: dict[str, list[str]] = {}
    for each in left_out:
        by_reason.setdefault(each.reason, []).append(each.topic)
    clusters_own = INTERNAL_TOPICS[0][1]
    reasons = sorted(by_reason, key=lambda reason: reason == clusters_own)
    return [f"{some(by_reason[reason])} ({reason})" for reason in reasons]
