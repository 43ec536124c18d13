"""Runs tests against a temporary copy of the source, as it is or with one mutant in it.

Called by `__main__`. The checkout itself is only read. In the copy the four parts lie below one folder
`millrace`, which comes first on the path of every process that a test starts; `witness` refuses to begin
where anything else would be imported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import witness
from tests.mutants.mutant import Mutant, is_compiled

TIME_LIMIT_S = 300
TESTS_FAILED = 1
"""pytest's own status: it ran to its end, and some failed."""
OPTIONS = ("-q", "--tb=short", "--durations=0", "-p", "no:cacheprovider", "--hypothesis-seed=0")
PEERS = ".peers"
LEFT_OUT = (
    *(".git", ".venv", ".typecheck", ".hypothesis", ".*_cache", PEERS),
    *("build", "demo-report", "*.egg-info", "*.pyc"),
)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of pytest: `problem` says why it tells nothing, "" where it does. `failed` as in `witness`."""

    problem: str
    failed: dict[str, str]
    printed: str = ""

    @property
    def red(self) -> list[str]:
        """The tests that failed by an assertion."""
        return [test for test, otherwise in self.failed.items() if not otherwise]


class Trial:
    """The copy of the source below `project` in an empty `folder`."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.copy = folder / "copy"
        # Compiled kernels are copied with the sources that they belong to: compiling takes half a minute.
        shutil.copytree(project, self.copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (project / PEERS).exists():
            (self.copy / PEERS).symlink_to((project / PEERS).resolve())
        package = self.copy / "millrace"
        package.mkdir()
        for part in witness.PARTS:
            (package / part).symlink_to(Path("..", part))
        self._folder = folder
        self._witnessed = folder / "witnessed.json"
        self._number = 0

    def run(
        self,
        tests: Sequence[str],
        time_limit_s: float = TIME_LIMIT_S,
        *options: str,
        **environment: str,
    ) -> Ran:
        """The tests against the copy as it is now; keywords are variables of their environment."""
        self._witnessed.unlink(missing_ok=True)
        plugin = ["-p", witness.__name__, witness.OPTION, str(self._witnessed), *options]
        command = [sys.executable, "-m", "pytest", *OPTIONS, *plugin, *tests]
        path = os.pathsep.join(filter(None, [str(self.copy), os.environ.get("PYTHONPATH")]))
        with subprocess.Popen(
            command,
            cwd=self.copy,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as pytest:
            try:
                printed, _ = pytest.communicate(timeout=time_limit_s)
            except subprocess.TimeoutExpired:
                return Ran(f"its tests take longer than {time_limit_s:.0f} s", {})
            finally:
                _end(pytest)
        if pytest.returncode not in (0, TESTS_FAILED) or not self._witnessed.exists():
            last = printed.strip().splitlines()[-1:] or [""]
            return Ran(f"pytest ended with status {pytest.returncode}: {last[0]}", {}, printed)
        found = json.loads(self._witnessed.read_text(encoding="utf-8"))
        return Ran("" if found["collected"] else "no test was collected", found["failed"], printed)

    def run_with(self, mutant: Mutant) -> Ran:
        """Its tests against the copy with the mutant in it, until one is red; then it is as it was.

        Where a mutant makes each case of a test wait in vain, all of them together would outlast the limit.
        """
        path = self.copy / mutant.file
        text, before = path.read_text(encoding="utf-8"), path.stat()
        self._number += 1
        try:
            path.write_text(mutant.applied_to(text), encoding="utf-8")
            # A time of its own: bytecode is known by its source's time in seconds and its size.
            _set_time(path, before.st_mtime_ns + self._number * 1_000_000_000)
            environment = self._cache() if is_compiled(text) else {}
            return self.run(mutant.red, TIME_LIMIT_S, witness.STOP_OPTION, **environment)
        finally:
            path.write_text(text, encoding="utf-8")
            _set_time(path, before.st_mtime_ns)

    def _cache(self) -> dict[str, str]:
        """Numba keeps machine code by the file of each kernel, and a kernel of another file that calls this
        one would go on with it as it was: all are compiled anew."""
        return {"NUMBA_CACHE_DIR": str(self._folder / f"kernels-{self._number}")}


def _set_time(path: Path, modified_ns: int) -> None:
    os.utime(path, ns=(modified_ns, modified_ns))


def _end(pytest: subprocess.Popen[str]) -> None:
    """Also what the tests have started: they may have been stopped before they could."""
    try:
        os.killpg(pytest.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
