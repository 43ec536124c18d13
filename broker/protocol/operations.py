"""What may be done with a resource, as bit fields say it (KIP-430). Pure.

The server's handlers say it, the client's checks (`client/authorized.py`) read it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

NOT_ASKED = -(1 << 31)
"""Stands in an answer to who did not ask."""


class Operation(enum.IntEnum):
    """What may be allowed on a resource; the numbers are those of the protocol."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12

    def __str__(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))


Operations = frozenset[Operation]
NOTHING: Operations = frozenset()


def read_operations(bits: int) -> Operations | None:
    """The operations that a bit field names; None when the server left it out."""
    if bits == NOT_ASKED:
        return None
    return frozenset(operation for operation in Operation if bits >> operation & 1)


def _bits(operations: Iterable[Operation]) -> int:
    return sum(1 << operation for operation in operations)


# Every operation that there is on a resource: what a server without an authorizer allows.
ALL_ON_TOPIC = _bits(
    (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    )
)
ALL_ON_GROUP = _bits((Operation.READ, Operation.DELETE, Operation.DESCRIBE))
ALL_ON_CLUSTER = _bits(
    (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    )
)
