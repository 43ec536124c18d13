"""`make fuzz RUNS=1000000 [SEED=7]`: random and mutated frames at a broker; ends with 1 on any finding.

They go to a broker in this process without a network, which is many times faster than sockets; a tenth as
many beside go through real sockets to a broker process of its own, where what follows a frame that breaks the
protocol is sent and not read. So `RUNS` frames are really read. ZooKeeper is started for both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz.in_process import LOOKS, Findings, Fuzzer
from tests.fuzz.over_sockets import fuzz_over_sockets
from tests.servers import ZooKeeper

SOCKET_SHARE = 10
"""Of as many frames as are read without a network, one more through sockets."""

GROWTH_MIB = 64
"""What a run may add to resident memory after its first tenth: schemas are loaded as they are met, sessions
and groups fill their bounded places."""


def look_at_growth(name: str, findings: Findings) -> None:
    """Says how much memory was added from the first tenth of a run to its end; too much is a finding, and so
    is a run that was never looked at in between."""
    samples = [size for frames, size in findings.resident if frames >= findings.frames / 10]
    if len(samples) < LOOKS // 2:
        findings.note(f"{name}: memory was looked at {len(samples)} times")
        return
    grown = (samples[-1] - samples[0]) / (1 << 20)
    print(f"{name}: {findings.frames:,} frames, {grown:+.0f} MiB after the first tenth")
    if grown > GROWTH_MIB:
        findings.note(f"{name}: resident memory grew by {grown:.0f} MiB: {findings.resident}")


def run(runs: int, seed: int, folder: Path) -> Findings:
    """Both kinds; the findings of both together."""
    zookeeper = ZooKeeper(folder / "zookeeper").start()
    try:
        fuzzer = Fuzzer(zookeeper.chroot(), folder / "in-process", seed)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            findings = runner.run(fuzzer.run(runs))
        look_at_growth("in process", findings)
        others = fuzz_over_sockets(zookeeper.chroot(), folder / "over-sockets", seed, runs // SOCKET_SHARE)
        look_at_growth("over sockets", others)
    finally:
        zookeeper.stop()
    findings.failures += others.failures
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="millrace-fuzz-") as folder:
        findings = run(options.runs, options.seed, Path(folder))
    for failure in findings.failures:
        print(f"{failure}\n{'-' * 80}")
    print(f"{findings.frames:,} frames read, {len(findings.failures)} failures, seed {options.seed}")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
