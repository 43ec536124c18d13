"""Runs the `millrace` program with one fault at one named point.

    python tests/points/launcher.py --at millrace.broker.storage.log_durability:flush --when after --nth 2 \\
        --act die --folder F -- broker run --id 1 …

The product has no switch for faults. Here the one function at the seam is wrapped, in the place where it is
looked up, and then the ordinary entry point runs. `fault.py` makes such command lines, `points.py` has the
table of points.

What happens at the point (`--act`): `die` ends the process at once and cleans up nothing (status DIED);
`fail` raises the system's error `--error` in place of the function (or in place of its answer); `wait` stands
still until the file `go` is in the folder, and the event loop with it where the function runs on that. Before
it happens the file `reached` is made, so that a test can tell a point that was passed from one that never
came.

What cannot be wrapped is refused at the start, in one line.
"""

from __future__ import annotations

import argparse
import errno
import functools
import importlib
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DIED = 86
"""The exit status of a process that died at its point; the product ends with no such status."""
REFUSED = 87
REACHED, GO = "reached", "go"
ACTS = ("die", "fail", "wait")
POLL_S = 0.002


def main(words: Sequence[str]) -> None:
    options, command = _parse(words)
    act = functools.partial(_act, options.act, Path(options.folder), options.error)
    try:
        put_in(options.at, options.when, options.nth, options.only, act)
    except (ImportError, AttributeError, TypeError) as error:
        print(f"launcher: no fault can be put at {options.at}: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    from millrace.deploy.cli import main as millrace

    millrace(command)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="launcher.py", allow_abbrev=False)
    parser.add_argument("--at", required=True, help="module:function, or module:Class.method")
    parser.add_argument("--when", choices=("before", "after"), required=True)
    parser.add_argument("--nth", type=int, default=1, help="which of the calls that count, from 1")
    parser.add_argument("--only", default="", help="pattern: calls count with an argument that has it")
    parser.add_argument("--act", choices=ACTS, required=True)
    parser.add_argument("--error", choices=sorted(errno.errorcode.values()), default="EIO")
    parser.add_argument("--folder", required=True, help="for the files `reached` and `go`")
    parser.add_argument("command", nargs="+", help="of `millrace`, after --")
    options = parser.parse_args(words)
    return options, options.command


def put_in(at: str, when: str, nth: int, only: str, act: Callable[[], None]) -> None:
    """Wraps the function, so that `act` is called before or after its `nth` call that counts. Raises what
    `find` raises."""
    owner, name, original = find(at)
    act_before, act_after = (act, _nothing) if when == "before" else (_nothing, act)
    setattr(owner, name, _wrapped(original, _counter(nth, only), act_before, act_after))


def find(at: str) -> tuple[Any, str, Callable[..., Any]]:
    """Who holds the function, its name there, and itself. Raises ImportError, AttributeError or TypeError
    where there is no such function."""
    module, _, path = at.partition(":")
    *names, name = path.split(".")
    owner = functools.reduce(getattr, names, importlib.import_module(module))
    try:
        original = inspect.getattr_static(owner, name)
    except AttributeError:
        raise AttributeError(f"{at.removesuffix(name).rstrip('.:')} has no {name}") from None
    if not (inspect.isfunction(original) or inspect.isbuiltin(original)):
        raise TypeError(f"{path} is no function but of type {type(original).__name__}")
    return owner, name, original


def _wrapped(
    original: Callable[..., Any],
    is_the_one: Callable[[Sequence[Any]], bool],
    act_before: Callable[[], None],
    act_after: Callable[[], None],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def plain(*given: Any, **named: Any) -> Any:
        is_here = is_the_one((*given, *named.values()))
        if is_here:
            act_before()
        answer = original(*given, **named)
        if is_here:
            act_after()
        return answer

    @functools.wraps(original)
    async def awaited(*given: Any, **named: Any) -> Any:
        is_here = is_the_one((*given, *named.values()))
        if is_here:
            act_before()
        answer = await original(*given, **named)
        if is_here:
            act_after()
        return answer

    return awaited if inspect.iscoroutinefunction(original) else plain


def _nothing() -> None:
    return


def _counter(nth: int, only: str) -> Callable[[Sequence[Any]], bool]:
    """Tells of each call's arguments whether it is the one; calls may come from several threads."""
    lock = threading.Lock()
    count = 0

    def is_the_one(given: Sequence[Any]) -> bool:
        nonlocal count
        if only and not any(re.search(only, str(each)) for each in given):
            return False
        with lock:
            count += 1
            return count == nth

    return is_the_one


def _act(act: str, folder: Path, error: str) -> None:
    (folder / REACHED).touch()
    if act == "die":
        os._exit(DIED)
    if act == "fail":
        number = getattr(errno, error)
        raise OSError(number, os.strerror(number))
    while not (folder / GO).exists():
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
