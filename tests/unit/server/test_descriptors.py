"""The descriptor limit is raised to what the system allows."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import resource
from millrace.broker.server.descriptors import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
now = raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), now
assert now == hard
"""


def test_few_descriptors_become_as_many_as_allowed() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
