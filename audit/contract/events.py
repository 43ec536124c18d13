"""The events by which producers, mirrors and consumers testify: one door to values, JSON and ledger. Pure.

`event_values` holds what an event says, `event_json` how it is written and what is believed of a stranger's,
`event_ledger` how events merge. Built by `session`, `count_stream`, `consumer` and the mirror; read by the
job from the events topic of every cluster. The same event may come several times and from several clusters:
all are cumulative and numbered, so that the newest replaces the older ones and the order of reading does not
matter.

Keys and values (UTF-8, compact JSON) are a contract for any language: EVENTS.md.

    stream/<stream>                    opened, heartbeat, closed: how far sequences were assigned and settled
    count/<stream>/<window_start_ms>   what was acknowledged in one window, `report` numbers the revisions
    gap/<mirror>/<source>/<topic>/<partition>/<from>/<class>[/<topic id>]
    tier/<group>/<session>/<topic>/<stream>/<window_start_ms>
"""

from millrace.audit.contract.event_json import decode_event, encode_event, event_to_keep, kept_event
from millrace.audit.contract.event_ledger import UNANNOUNCED, EventLedger, StreamFacts
from millrace.audit.contract.event_values import (
    CLOSED,
    EVENT_VERSION,
    HEARTBEAT,
    OPENED,
    CountEvent,
    Event,
    GapEvent,
    InvalidEvent,
    StreamEvent,
    TierEvent,
)

__all__ = [
    "CLOSED",
    "EVENT_VERSION",
    "HEARTBEAT",
    "OPENED",
    "UNANNOUNCED",
    "CountEvent",
    "Event",
    "EventLedger",
    "GapEvent",
    "InvalidEvent",
    "StreamEvent",
    "StreamFacts",
    "TierEvent",
    "decode_event",
    "encode_event",
    "event_to_keep",
    "kept_event",
]
