"""A signal's handler that calls a producer, a consumer or a reporter in the middle of what it interrupted.

Python runs handlers in the main thread, between any two of its instructions: also between two that a lock
holds together. A handler that then calls for the same lock waits for itself, for ever; were it let in, it
would find numbers half given out. So it is refused, with a sentence; the handler may catch it, and otherwise
what was interrupted ends as with any exception.

Whatever a handler raises comes out of the call that it interrupted, as if that had raised it: `is_refusal`
tells it from an error of a client in C, `is_refusal_by` from one of a client in Python.

`refuse_inside` is called at the beginning of the rare calls: `close`, `flush`, `report`, commits, those of
transactions. The stack of the calling thread tells; nothing is kept for it while records are sent or counted.

Must stay true: whatever takes a lock of the applications' side lies in one of `GUARDED` or bears a name that
its class gives here, and no callback of the application's is called from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Set
from pathlib import Path
from types import ModuleType

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
_OURS, _PYTHON = f"{_HERE.parent}{os.sep}", f"{Path(os.__file__).parent}{os.sep}"
_ASKS_THE_APPLICATION = frozenset({"_serialize", "_partition"})
_BEFORE_THE_CLIENT = frozenset(str(_HERE / name) for name in ("delivery_reports.py", "preparation.py"))


def is_refusal(error: BaseException) -> bool:
    """Whether the client refused, as far as the function goes that handles `error`: of what that has called,
    the client's call is in C and leaves no frame, and what this package does before is no reason to doubt.
    Anything else ran beside it, perhaps after the client had taken a record.
    """
    traceback = error.__traceback__
    raised_by = traceback.tb_next if traceback is not None else None
    return raised_by is None or raised_by.tb_frame.f_code.co_filename in _BEFORE_THE_CLIENT


def is_refusal_by(client: ModuleType, error: BaseException) -> bool:
    """Whether a client in Python refused a record, as far as the function goes that handles `error`: all that
    was under way was the client's, this package's or Python's own, or the application's serializer or
    partitioner, which is asked before a record is taken. Anything else ran beside it, perhaps after that.
    """
    home = f"{Path(str(client.__file__)).parent}{os.sep}"
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(home):
            if code.co_name in _ASKS_THE_APPLICATION:
                return True
        elif not code.co_filename.startswith(_OURS) and not _is_of_python(code.co_filename):
            return False
        traceback = traceback.tb_next
    return True


def _is_of_python(path: str) -> bool:
    return path.startswith(_PYTHON) and "site-packages" not in path


def refuse_inside(owner: object, call: str, locked: Set[str]) -> None:
    """Raise RuntimeError where the calling thread is within a locked part of `owner`, or of a stream.

    Called by `call` itself, which may be one of them: its own frame is passed over. `locked` names the
    owner's methods that hold a lock of its own.
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
