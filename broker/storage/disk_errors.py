"""What a failed system call on a data folder means: no room for now, or a disk that cannot be trusted.

Two kinds lead to two ends. A full disk refuses the write at hand and all is well once there is room. An I/O
error, a file system that turned read-only or a device that is gone say that nothing of the folder can be
relied on any more: the whole folder goes offline, as in Apache Kafka. Any other error (too many open files,
no permission) refuses the operation and nothing else; but a sync that failed (`SyncFailed`), for whatever
reason, says that what it was for may never be on the disk: the system reports a lost page once.

`WouldBlock` is no failure: it sends a read that must not wait for the disk to a thread that may.

Called by the log and the log manager. Pure.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.broker.errors import MillraceError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BEYOND_TRUST = frozenset(
    {
        errno.EIO,
        errno.EROFS,
        errno.ENODEV,
        errno.ENXIO,
        errno.EUCLEAN,  # "structure needs cleaning": ext4 and xfs found their own metadata damaged
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ENOTCONN,  # a FUSE or network mount that is gone
        errno.EBADMSG,  # a checksum of the file system is wrong
    }
)


class WouldBlock(MillraceError):
    """The bytes are not in memory; read them again on a thread that may wait for the disk."""


class SyncFailed(OSError):
    """The system did not sync an open file, or a directory: what was written to it may be lost, whatever a
    later sync says. A file that could not be opened to be synced is no such failure."""


@contextmanager
def syncing() -> Iterator[None]:
    """Around the system call alone. Raises SyncFailed."""
    try:
        yield
    except OSError as error:
        raise SyncFailed(error.errno, error.strerror) from error


def is_no_room(error: OSError) -> bool:
    """Whether the write failed for want of space (disk, quota, or largest size of a file)."""
    return error.errno in _NO_ROOM


def is_beyond_trust(error: OSError) -> bool:
    """Whether nothing on the folder's disk can be relied on after this error."""
    return error.errno in _BEYOND_TRUST
