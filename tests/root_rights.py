"""What only root may do, on Linux: namespaces of a network, file systems that are mounted.

A test that needs it is skipped for others. Where tests run as root, as in CI, nothing of it may be missing in
silence: the run would prove less than it says.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import pytest

FALLBACK = "TCP proxies instead of network namespaces"
"""How a fault run says that it was not able to cut a network."""


def are_there() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def lacks(what: str) -> NoReturn:
    """The test cannot do what it is for."""
    if are_there():
        pytest.fail(f"{what}: install what is missing (deploy/bootstrap.sh test), or run the tests as a user")
    pytest.skip(what)


def check_fault_run(said: str) -> None:
    """A fault run that was not asked to use proxies cuts a network and fills a disk; `said` is its output."""
    told = next((line for line in said.splitlines() if line.startswith(FALLBACK)), None)
    if told is not None and are_there():
        pytest.fail(f"{told}: install what is missing (deploy/bootstrap.sh test), or run the tests as a user")
