"""What surrounds a run of the demo: its folder, the report's folder, and an orderly end on a signal."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from millrace.broker.errors import DataFolderNotWritable
from millrace.deploy.local.sandbox import make_folders


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived; raised in the main thread so that everything is stopped in order."""


class Workspace:
    """The folder of one run. Removed at the end, unless the sandbox stays, or the run failed and there are
    logs that may say why."""

    def __init__(self, keep: bool):
        self._keep = keep
        self._folder = Path()

    def __enter__(self) -> Path:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="millrace-demo-"))
        except OSError as error:
            raise DataFolderNotWritable(
                f"cannot write to {tempfile.gettempdir()} ({error.strerror}): set TMPDIR to another folder"
            ) from error
        make_folders(self._folder)  # before the demo's own files are in it
        return self._folder

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        failed = kind is not None and issubclass(kind, Exception) and not issubclass(kind, Interrupted)
        has_logs = any((self._folder / "logs").iterdir())
        if not (self._keep and kind is None) and not (failed and has_logs):
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does; a second signal while it is stopping does not cut that short."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def prepare_report(report: Path) -> None:
    """Makes the folder, and removes an earlier run's findings: nothing old may pass for new."""
    try:
        report.mkdir(parents=True, exist_ok=True)
        for name in (
            "summary.json",
            "reconciliation.parquet",
            "producers.parquet",
            "index.html",
            "injected.json",
        ):
            (report / name).unlink(missing_ok=True)
    except OSError as error:
        raise DataFolderNotWritable(
            f"cannot write the report to {report} ({error.strerror}): choose another folder with --report"
        ) from error
