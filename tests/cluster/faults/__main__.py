"""`python -m tests.cluster.faults [--rounds N] [--seed S]`: the fault run from a command line.

It moves itself into namespaces where it may, so it is a process of its own also under pytest. Exit status:
0 all promises kept, 1 one was broken (the report is printed), 2 the run itself failed, 3 something did not
come to its end in time, and of what could be judged nothing was broken.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.cluster.faults.network import enter_namespaces
from tests.cluster.faults.rounds import Run

BROKEN, FAILED, LATE = 1, 2, 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed when not given")
    parser.add_argument("--folder", type=Path, default=None, help="for data and logs; kept when it fails")
    parser.add_argument("--proxies", action="store_true", help="cut by TCP proxies in any case")
    parser.add_argument("--keep", action="store_true", help="keep the folder in any case")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="millrace-faults-"))
    obstacle = "it was asked for" if options.proxies else enter_namespaces()
    print(f"fault run: seed {seed}, {options.rounds} rounds, in {folder}", flush=True)
    if obstacle:
        print(f"TCP proxies instead of network namespaces: {obstacle}", flush=True)
    status = run(folder, seed, options.rounds, namespaces=not obstacle)
    if status == 0 and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"data and logs are in {folder}", flush=True)
    return status


def run(folder: Path, seed: int, count: int, *, namespaces: bool) -> int:
    started = time.monotonic()
    faults = Run(folder, seed, namespaces=namespaces, say=lambda line: print(line, flush=True))
    try:
        faults.start()
        for _ in range(count):
            if not faults.round():
                print(faults.report(), flush=True)
                return BROKEN if faults.problems else LATE
        took = time.monotonic() - started
        faced = f"{count} rounds of seed {seed}, {faults.fault_count} faults"
        print(f"{faced}: every promise was kept ({took:.0f} s)")
        print(f"{faults.cluster.ended_count} starts of brokers met no ZooKeeper and were repeated")
        return 0
    except Exception:
        print(traceback.format_exc(), faults.report(), sep="\n", flush=True)
        return FAILED
    finally:
        faults.stop()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Clients' threads may still be waiting for brokers that are gone.
    os._exit(status)
