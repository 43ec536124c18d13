"""What the start of a mirror's process need not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.unit.mirror.test_config import settings
from tests.waiting import patience

PROCESS = """
import gc, sys
import uvloop
from millrace.deploy import cli

def begin(serving):
    serving.close()
    print(sorted({"hypothesis", "numba", "numpy", "rich"} & set(sys.modules)), gc.isenabled())

uvloop.run = begin
cli.main(["mirror", "run", "--config", sys.argv[1]])
"""


def test_a_start_comes_to_its_event_loop_without_what_it_does_not_need(tmp_path: Path) -> None:
    config = tmp_path / "mirror.yaml"
    config.write_text(yaml.safe_dump(settings()))
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, config],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(),
    )
    assert done.stdout == "[] False\n", done.stderr
