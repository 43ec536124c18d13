"""The ids and epochs of incremental fetch sessions (KIP-227), for both sides of one. Pure."""

from __future__ import annotations

from millrace.broker.errors import FetchSessionIdNotFound, FetchSessionTopicIdError, InvalidFetchSessionEpoch

ENDED = frozenset({FetchSessionIdNotFound.code, InvalidFetchSessionEpoch.code, FetchSessionTopicIdError.code})
"""The server has another idea of the session, or none: it restarted, or gave the room to somebody else."""

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


class ReaderEpochs:
    """Under which id and epoch a reader asks next."""

    def __init__(self) -> None:
        self.id = NO_SESSION
        self.epoch = FULL

    @property
    def is_full(self) -> bool:
        return self.epoch == FULL

    def answered(self, session_id: int) -> None:
        """The server's answer names the session; 0 where there is none (any more)."""
        self.epoch = FULL if session_id == NO_SESSION else next_epoch(self.epoch)
        self.id = session_id

    def end(self) -> None:
        """Ask in full next time, when the server also learns that it can forget this session."""
        self.epoch = FULL
