"""Leaves out libraries that others load only because they are there.

`structlog` loads `rich` for a console that the servers do not use, and `kio` loads `hypothesis`, where a
developer has installed it, to offer strategies for tests: together a third to a half of the time that imports
take. Called by the commands that start a server or speak with a cluster, around the import of what does;
never in a process that is somebody else's, whose `structlog` may well want `rich`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Top-level modules that cannot be imported meanwhile; one that is loaded already stays as it is."""
    hidden = [name for name in names if name not in sys.modules]
    # What `import` does with a name that stands for None: ModuleNotFoundError, as if it were not installed.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]


def lean() -> AbstractContextManager[None]:
    """`without` what the libraries of this program load for nothing."""
    return without("hypothesis", "rich")
