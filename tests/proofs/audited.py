"""One audit in a process of its own, watched: what it found, how long each step took, and its memory.

    python -m tests.proofs.audited CONFIG MASTER [NOW_MS]

is the child: `job.run` as `millrace audit run` calls it, at another time of day where one is given, with a
line of JSON for each step. `audit` starts it and reads them. Seconds of a step are those until the next one
was told: "counting" is all from the first task to the last note, and Spark's start is in what comes before.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from millrace.deploy.processes import spawn
from tests.peak_memory import DRIVER, JVM, WORKER, PeakMemory
from tests.proofs.hashed_load import TOPIC

ROOT = Path(__file__).resolve().parents[2]
START, COUNT, RECONCILE, REPORT = "capture and Spark's start", "counting", "reconciling", "the report"
_STEPS = (("reading events", START), ("counting", COUNT), ("reconciling", RECONCILE), ("writing", REPORT))


@dataclass(slots=True)
class Audited:
    """What came of one audit. `status` is its exit status, or how its process ended without one."""

    status: int
    seconds: float
    steps: dict[str, float]
    peak_mb: dict[str, float]
    problem: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    said: str = ""

    @property
    def counts(self) -> dict[str, Any]:
        return dict(self.summary.get("counts", {}))

    def named(self, what: str) -> set[tuple[str, int]]:
        """(producer, sequence) of all `losses` or `duplicates`."""
        return {
            (each["producer"], sequence)
            for each in self.summary.get(what, [])
            for first, last in each["sequences"]
            for sequence in range(first, last + 1)
        }

    @property
    def without_start_s(self) -> float:
        """From when Spark was there and all was pinned, to the report's end."""
        return sum(seconds for step, seconds in self.steps.items() if step != START)


@dataclass(frozen=True, slots=True)
class Truth:
    """What an audit must find, all of it and nothing else. `seen` are different records by tier."""

    acknowledged: int
    seen: Mapping[str, int]
    losses: frozenset[tuple[str, int]] = frozenset()
    duplicates: frozenset[tuple[str, int]] = frozenset()

    @property
    def status(self) -> int:
        return 1 if self.losses or self.duplicates else 0

    def wrong(self, found: Audited) -> list[str]:
        """Sentences on what differs; none is what is wanted."""
        if not found.summary:
            return [f"no verdict: {found.problem or found.said[-1000:]}"]
        counts = found.counts
        pairs = [
            ("status", found.status, self.status),
            ("acknowledged", counts["acknowledged"], self.acknowledged),
            ("seen", counts["seen"], dict(self.seen)),
            ("missing", counts["missing"], len(self.losses)),
            ("in doubt", found.summary["untrusted"], []),
        ]
        told = [f"{what}: {is_} instead of {must}" for what, is_, must in pairs if is_ != must]
        for what, named in (("losses", self.losses), ("duplicates", self.duplicates)):
            found_here = found.named(what)
            if found_here - named:
                told.append(f"{what} that are none: {sorted(found_here - named)[:5]}")
            if named - found_here:
                told.append(f"{what} not named: {sorted(named - found_here)[:5]}")
        if told:
            told.append(f"windows: {found.summary['windows']}, open: {found.summary['open']}")
            told.append(f"reasons: {found.summary['reasons'][:3]}, notes: {found.summary['notes'][:3]}")
        return told


def write_config(folder: Path, bootstraps: Mapping[str, str], **more: Any) -> Path:
    """audit.yaml of a source `src` and an aggregate `agg`."""
    tiers = {"src": "source", "agg": "aggregate"}
    clusters = {name: {"bootstrap": [address], "tier": tiers[name]} for name, address in bootstraps.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "audit.yaml"
    path.write_text(yaml.safe_dump({"clusters": clusters, "topics": [TOPIC], **more}))
    return path


def command(
    config: Path, master: str, now_ms: int | None = None, program: Sequence[str] = ("-m", __name__)
) -> list[str]:
    words = [sys.executable, *program, str(config), master]
    return words if now_ms is None else [*words, str(now_ms)]


def audit(
    config: Path,
    *,
    master: str = "local[2]",
    now_ms: int | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", __name__),
    at_step: Callable[[str], None] = lambda step: None,
) -> Audited:
    """Run it to its end. `at_step` hears of each step as it begins; what the child says otherwise is kept."""
    begin = time.monotonic()
    log = config.with_suffix(".log")
    log.write_bytes(b"")
    process = spawn(
        command(config, master, now_ms, program),
        log=log,
        stdout=subprocess.PIPE,
        environment={"PYTHONPATH": str(ROOT), **(environment or {})},
        die_with_parent=True,
    )
    answer: dict[str, Any] = {}
    times = [(START, begin)]
    assert process.stdout is not None
    with PeakMemory(process.pid) as memory:
        for line in process.stdout:
            told = json.loads(line) if line.startswith(b"{") else {}
            answer |= told.get("answer", {})
            step = next((name for start, name in _STEPS if told.get("step", "").startswith(start)), None)
            if step is not None and step != times[-1][0]:
                times.append((step, time.monotonic()))
                at_step(step)
        status = process.wait()
    end = time.monotonic()
    bounds = [*(at for _, at in times), end]
    steps = {name: bounds[at + 1] - bounds[at] for at, (name, _) in enumerate(times)}
    # What Spark's JVM says as it ends after a kill is of no use to anybody.
    said = re.sub(r"(?m)^spark: .*\n?", "", log.read_text(errors="replace"))
    return Audited(answer.pop("status", status), end - begin, steps, memory.peak_mb, said=said, **answer)


def end_tidily() -> None:
    """SIGTERM ends this program as Ctrl-C does: servers are stopped and folders removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """For people; columns are as wide as they must be."""
    texts = [tuple(columns), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )


def megabytes(peaks: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {peaks[kind]:,.0f} MB" for kind in (DRIVER, JVM, WORKER) if kind in peaks)


def main(words: Sequence[str]) -> int:
    from dataclasses import asdict

    from millrace.audit.config import load_config
    from millrace.audit.job import run

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may reach the answers

    def say(what: Mapping[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    config, master, *now = words
    clock: dict[str, Any] = {"clock_ms": lambda: int(now[0])} if now else {}
    result = run(load_config(Path(config)), master, progress=lambda step: say({"step": step}), **clock)
    say(
        {
            "answer": {
                "status": result.exit_status,
                "problem": result.problem,
                "summary": result.summary or {},
                "cost": asdict(result.cost) if result.cost is not None else {},
            }
        }
    )
    return result.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
