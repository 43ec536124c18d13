"""What servers said while a test failed, for its report: the ends of their logs.

Called by `tests/conftest.py` when a test has failed. Every server of the tests writes into a `*.log` under
pytest's folder for temporary files; those that grew since the test began are its own or those it shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LINES = 20
MOST_LOGS = 8
READ_BYTES = 16_384


def is_segment(path: Path) -> bool:
    """Partitions' files are called .log, too: by their base offset."""
    return path.stem.isdigit()


def written_since(folder: Path, since_s: float) -> list[Path]:
    """Servers' logs under the folder that grew since (seconds of the epoch), the latest first."""
    found: list[tuple[float, Path]] = []
    for path in folder.rglob("*.log"):
        try:
            status = path.stat()
        except OSError:  # its test removes it just now
            continue
        if status.st_mtime >= since_s and status.st_size and not is_segment(path):
            found.append((status.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def tail(path: Path, lines: int = LINES) -> str:
    """The last lines of a file; bytes that are no UTF-8 are replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - READ_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def sections(folder: Path, since_s: float) -> Iterator[tuple[str, str]]:
    """(title, text) of each."""
    for path in written_since(folder, since_s)[:MOST_LOGS]:
        try:
            yield f"the end of {path.relative_to(folder)}", tail(path)
        except OSError:
            continue
