"""The garbage collector of a server's process, which its command turns off before the first import.

All that a start makes is made to stay, and looking through it again and again frees nothing: a quarter of the
processor time that a mirror's start takes. Called by the broker when it serves, by the mirror when its
compiled loops are loaded.

A full round, which comes when objects have become a quarter more, takes 0.7 ms for a thousand of them, and
all threads wait: 70 ms in a broker of 1,000 partitions. So what is made later to stay is looked at once, soon
after it was made, and then no more (`keep`). Reference counts must free it: a cycle would stay for a day.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_SECONDS = 10
"""How long one user after another, or one that looks at the time, may keep garbage from being collected."""

KEPT_AT = 10_000
"""Objects, which take some 7 ms to look at."""

ALL_AGAIN_SECONDS = 24 * 60 * 60

_lock = threading.Lock()
_users = 0
_was_on = False
_off_since = 0.0
_is_settled = False
_not_kept = 0
_has_kept = False
_looked_at_all = 0.0


def settle() -> None:
    """Has garbage collected from now on where that was off; where it is on, in a process that others began,
    nothing is changed."""
    global _is_settled, _not_kept, _looked_at_all
    if gc.isenabled():
        return
    _is_settled, _not_kept, _looked_at_all = True, 0, time.monotonic()
    # What has been made so far stays: the collector need not look at it again and again, nor once at the end,
    # when the first clients wait. It would look for a tenth of a second and find a thousand objects.
    gc.freeze()
    gc.enable()


def keep(count: int) -> None:
    """About `count` objects have been made that stay until their reference counts free them. Changes nothing
    where `settle` did not."""
    global _not_kept, _has_kept
    _not_kept += count
    if _not_kept >= KEPT_AT and _is_settled and gc.isenabled():
        gc.collect()
        gc.freeze()
        _not_kept, _has_kept = 0, True


def look_at_all() -> None:
    """Called now and then: once a day what `keep` has kept is looked through as well, for cycles that nobody
    knew of. It takes its 0.7 ms for a thousand objects, and is no request's doing."""
    global _has_kept, _looked_at_all
    if not _has_kept or not gc.isenabled() or time.monotonic() - _looked_at_all < ALL_AGAIN_SECONDS:
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _has_kept, _looked_at_all = False, time.monotonic()


@contextmanager
def left_alone() -> Iterator[None]:
    """While very many objects are made that will all be used: looking through them again and again, as they
    grow, holds up all threads for longer than to make them takes. From any thread."""
    _begin()
    try:
        yield
    finally:
        _end()


def look_at_time() -> None:
    """Called within `left_alone` by who may take long: garbage is collected again when it has been."""
    if _was_on and time.monotonic() - _off_since > LONGEST_SECONDS:
        gc.enable()


def _begin() -> None:
    global _users, _was_on, _off_since
    with _lock:
        _users += 1
        if _users > 1:
            look_at_time()
            return
        _was_on = gc.isenabled()
        _off_since = time.monotonic()
        gc.disable()


def _end() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users and _was_on:
            gc.enable()
