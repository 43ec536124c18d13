"""Runs the `millrace` program with one fault at one named point.

    python tests/points/launcher.py --at millrace.broker.storage.log_durability:flush --when after --nth 2 \\
        --act die --folder F -- broker run --id 1 …

The product has no switch for faults. Here the one function at the seam is wrapped, in the place where it is
looked up, and then the ordinary entry point runs. `fault.py` makes such command lines, `points.py` has the
table of points.

What happens at the point (`--act`): `die` ends the process at once and cleans up nothing (status DIED);
`fail` raises the system's error `--error` in place of the function (or in place of its answer); `wait` stands
still until the file `go` is in the folder, and the event loop with it where the function runs on that; `hold`
holds back this one call of a coroutine function until then, while everything else goes on. Before it happens
the file `reached` is made, so that a test can tell a point that was passed from one that never came.

What cannot be wrapped is refused at the start, in one line.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import functools
import importlib
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

DIED = 86
"""The exit status of a process that died at its point; the product ends with no such status."""
REFUSED = 87
REACHED, GO = "reached", "go"
ACTS = ("die", "fail", "wait", "hold")
POLL_S = 0.002

Act = Callable[[], Awaitable[None] | None]


def main(words: Sequence[str]) -> None:
    options, command = _parse(words)
    folder = Path(options.folder)
    act: Act = functools.partial(_act, options.act, folder, options.error)
    if options.act == "hold":
        act = functools.partial(_hold, folder)
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


def put_in(at: str, when: str, nth: int, only: str, act: Act) -> None:
    """Wraps the function, so that `act` is called before or after its `nth` call that counts. Raises what
    `find` raises, and TypeError where `act` is to be awaited and the function is not."""
    owner, name, original = find(at)
    if inspect.iscoroutinefunction(act) and not inspect.iscoroutinefunction(original):
        raise TypeError(f"{name} is no coroutine function, whose call alone could be held back")
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
    act_before: Act,
    act_after: Act,
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
            await _settled(act_before())
        answer = await original(*given, **named)
        if is_here:
            await _settled(act_after())
        return answer

    return awaited if inspect.iscoroutinefunction(original) else plain


def _nothing() -> None:
    return


async def _settled(acted: Awaitable[None] | None) -> None:
    if acted is not None:
        await acted


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


async def _hold(folder: Path) -> None:
    (folder / REACHED).touch()
    while not (folder / GO).exists():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
