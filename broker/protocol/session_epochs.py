"""The ids and epochs of incremental fetch sessions (KIP-227), for both sides of one. Pure."""

from __future__ import annotations

NO_SESSION = 0
"""The id in a request that asks for one, and in the answer of a server that gives none."""
LARGEST_ID = 2**31 - 1

FULL = 0
"""The epoch of a request that names all its partitions and asks for a session."""
FINAL_EPOCH = -1
"""Of one that wants no session, or no longer the one that it names."""
LARGEST_EPOCH = 2**31 - 1


def next_epoch(epoch: int) -> int:
    """The epoch of a session's next request; it goes round and never comes back to 0."""
    return 1 if epoch == LARGEST_EPOCH else epoch + 1
