"""Who leads a partition now, in produce and fetch responses that refuse it (KIP-951).

A client that asks the wrong broker is told the leader and its address in tagged fields, and need not fetch
metadata first. Called by `hot_produce.py` and `hot_fetch.py`. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Protocol

from millrace.broker.protocol import wire

NO_TAGS = b"\x00"
_TAG_NODE_ENDPOINTS = 0
_LEADER = struct.Struct(">ii")
_INT32 = struct.Struct(">i")


class Node(Protocol):
    """A broker's address as clients are told it."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def rack(self) -> str | None: ...


Leader = tuple[int, int]
"""(broker id, leader epoch)"""


def encode_leader(leader: Leader) -> bytes:
    """The value of the CurrentLeader field."""
    return _LEADER.pack(*leader) + NO_TAGS


def decode_leader(value: memoryview) -> Leader:
    """The other way. Raises struct.error."""
    broker_id, epoch = _LEADER.unpack_from(value)
    return broker_id, epoch


def encode_node_endpoints(leaders: Collection[int], nodes: Mapping[int, Node]) -> bytes:
    """The tagged fields that end a response: the addresses of the named leaders, as far as they are known."""
    known = [(leader, nodes[leader]) for leader in dict.fromkeys(leaders) if leader in nodes]
    if not known:
        return NO_TAGS
    out = bytearray(wire.uvarint(len(known) + 1))
    for broker_id, node in known:
        out += _INT32.pack(broker_id) + wire.compact_string(node.host) + _INT32.pack(node.port)
        out += wire.compact_string(node.rack) + NO_TAGS
    return b"\x01" + wire.tagged_field(_TAG_NODE_ENDPOINTS, bytes(out))
