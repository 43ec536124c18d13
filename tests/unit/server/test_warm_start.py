"""What the start of a broker's process needs not load, and that the rest comes beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from tests.unit.storage.conftest import append
from tests.waiting import patience

PROCESS = """
import asyncio, gc, sys
from pathlib import Path
from millrace.broker.telemetry.garbage import settle
from millrace.deploy.lean_imports import lean
gc.disable()
with lean():
    import millrace.broker.server.broker
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
logs = LogManager([Path(sys.argv[1])], LogConfig())
logs.start(0)
assert logs.was_clean and logs.get(("t", 0)).end_offset == 2, logs.notes
heavy = {"hypothesis", "numba", "numpy", "rich"}
print(sorted(heavy & set(sys.modules)))
from millrace.broker.server.warm_start import load_loops
asyncio.run(load_loops(with_compaction=True))
settle()
print(sorted(heavy & set(sys.modules)), gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_a_clean_start_opens_logs_without_the_compiler(tmp_path: Path) -> None:
    logs = LogManager([tmp_path], LogConfig())
    logs.start(0)
    append(logs.create(("t", 0)), 2)
    logs.close()
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(120),
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert printed == ["[]", "['numba', 'numpy'] True True"], done.stderr
