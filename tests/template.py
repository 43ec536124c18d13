"""A process that has loaded what a broker and a mirror load, and of which others are forked.

    python -m tests.template     # asked on standard input, answers on standard output, a line of JSON each

Run by `forked.py`, which says why. `{"words", "folder", "environment", "log"}` starts a process that goes on
as `python WORDS` would in that folder, with what it says in the file `log`: its id is the answer. `{"ended":
id}` asks for a process's exit status (negative: the signal), null while it runs. When standard input ends, so
does this process, and the kernel kills what it has forked.

It has one thread and opens nothing, so a fork leaves nothing behind that the child would miss or share.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1


def load() -> None:
    """What the commands of servers import, in the way in which they do."""
    from millrace.deploy.lean_imports import lean

    with lean():
        import millrace.broker.server.broker
        import millrace.mirror.daemon  # noqa: F401
    from millrace.broker.protocol.records import warm_kernels
    from millrace.broker.storage.key_map import warm_kernels as warm_compaction_kernels
    from millrace.mirror.batches.coalesce import load_kernels

    warm_kernels()
    warm_compaction_kernels()
    load_kernels()


def serve(prctl: Any) -> Sequence[str]:
    """Answers until it is asked no more, which ends the process; returns in each child, with its words."""
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            answer = _exit_status(request["ended"])
        else:
            answer = os.fork()
            if answer == 0:
                _become(prctl, **request)
                return request["words"]
        print(json.dumps(answer), flush=True)
    sys.exit()


def _exit_status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(prctl: Any, words: Sequence[str], folder: str, environment: dict[str, str], log: str) -> None:
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for mine, usual in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(mine, usual)
    os.close(nothing)
    os.close(said)


def go_on(words: Sequence[str]) -> None:
    """As the interpreter does with these words: `-m module …`, or `script …`."""
    if words[0] == "-m":
        sys.argv, sys.path[0] = list(words[1:]), os.getcwd()
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    # What has been loaded is not looked through by the children's collectors, which would copy its pages.
    gc.disable()
    load()
    gc.freeze()
    gc.enable()
    go_on(serve(ctypes.CDLL(None).prctl if sys.platform == "linux" else None))
