"""Has pytest rewrite the asserts of the gate's tests ahead; called by set-up (`deploy/bootstrap.sh`).

    python -m tests.rewrite_ahead

What pytest makes of a module it keeps beside it, and to collect the tests is all that it takes. In the gate's
runs side by side it would take a minute of each processor, every time that a checkout is new. A module that
cannot be collected is left to the gate, which says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.suite import Part, parts


def collect(part: Part) -> int:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *part.words]
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(words, cwd=root, stdout=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sys.exit(max(pool.map(collect, parts())))
