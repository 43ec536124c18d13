"""A signal's handler that calls a producer, a consumer or a reporter in the middle of what it interrupted.

Python runs handlers in the main thread, between any two of its instructions: also between two that a lock
holds together. A handler that then calls for the same lock waits for itself, for ever; were it let in, it
would find numbers half given out. So it is refused, with a sentence; the handler may catch it, and otherwise
what was interrupted ends as with any exception.

Whatever a handler raises comes out of the call that it interrupted, as if that had raised it: `is_refusal`
tells it from an error of the client's.

`refuse_inside` is called at the beginning of the rare calls: `close`, `flush`, `report`, commits, those of
transactions. The stack of the calling thread tells; nothing is kept for it while records are sent or counted.

Must stay true: whatever takes a lock of the applications' side lies in one of `GUARDED` or bears a name that
its class gives here, and no callback of the application's is called from there.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import Path

_HERE = Path(__file__).parent
GUARDED = frozenset(
    str(_HERE / name)
    for name in (
        "count_stream.py",
        "open_streams.py",
        "recovery.py",
        "session.py",
        "told_stream.py",
        "transaction_counts.py",
    )
)
_BEFORE_THE_CLIENT = frozenset(str(_HERE / name) for name in ("delivery_reports.py", "preparation.py"))


def is_refusal(error: BaseException) -> bool:
    """Whether the client refused, as far as the function goes that handles `error`: of what that has called,
    the client's call is in C and leaves no frame, and what this package does before is no reason to doubt.
    Anything else ran beside it, perhaps after the client had taken a record.
    """
    traceback = error.__traceback__
    raised_by = traceback.tb_next if traceback is not None else None
    return raised_by is None or raised_by.tb_frame.f_code.co_filename in _BEFORE_THE_CLIENT


def refuse_inside(owner: object, call: str, locked: Set[str]) -> None:
    """Raise RuntimeError where the calling thread is within a locked part of `owner`, or of a stream.

    `locked` names the owner's methods that hold a lock of its own.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        code = frame.f_code
        if code.co_filename in GUARDED or (code.co_name in locked and frame.f_locals.get("self") is owner):
            raise RuntimeError(
                f"{call}() was called by a signal's handler in the middle of another call, and would wait "
                "for itself for ever; let the handler raise, or set a flag, and call it after"
            )
        frame = frame.f_back
