"""`python -m tests.cluster.mirror_faults`: the mirror's fault run from a command line.

    --events N | --minutes M   how long      --seed S        --pair kafka-millrace      --delivery
    at_least_once

Exit status: 0 all promises kept, 1 one was broken (the report is printed), 2 the run itself failed. It
moves itself into namespaces where it may, so it is a process of its own also under pytest.
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

from tests.cluster.mirror_faults.links import enter_namespaces
from tests.cluster.mirror_faults.run import ARRIVE_TIMEOUT_S, MOUNT_MIB, Run
from tests.cluster.mirror_faults.sabotage import KINDS

BATCH_BYTES = 6_000
NEVER_ENDING = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.mirror_faults", description=__doc__)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="instead of a number of events; nothing befalls a third worker, whose memory is judged",
    )
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed when not given")
    parser.add_argument("--pair", default="millrace-millrace", help="source-target, as in tests/pairs.py")
    parser.add_argument("--delivery", default="exactly_once", choices=("exactly_once", "at_least_once"))
    parser.add_argument("--judge-as", default=None, help="the delivery that is promised, to prove the judge")
    parser.add_argument(
        "--sabotage", default=None, help=f"workers that do harm, likewise: {', '.join(KINDS)}[:TOPIC]"
    )
    parser.add_argument(
        "--audit",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have `millrace audit` look at the audited part when all is over (exactly once alone)",
    )
    parser.add_argument("--batches-per-s", type=float, default=100.0, help="of all streams, 6 KB each")
    parser.add_argument("--arrive-s", type=float, default=ARRIVE_TIMEOUT_S, help="later than this is lost")
    parser.add_argument("--folder", type=Path, default=None, help="for data and logs; kept when it fails")
    parser.add_argument("--proxies", action="store_true", help="TCP proxies in any case")
    parser.add_argument("--keep", action="store_true", help="keep the folder in any case")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="millrace-mirror-faults-"))
    obstacle = "it was asked for" if options.proxies else enter_namespaces()
    until = f"{options.events} events" if options.minutes is None else f"{options.minutes:g} minutes"
    print(f"mirror fault run: seed {seed}, {until}, {options.pair}, in {folder}", flush=True)
    if obstacle:
        print(f"TCP proxies instead of network namespaces: {obstacle}", flush=True)
    status = carry_out(options, folder, seed, namespaces=not obstacle)
    if status == 0 and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"data and logs are in {folder}", flush=True)
    return status


def carry_out(options: argparse.Namespace, folder: Path, seed: int, *, namespaces: bool) -> int:
    minutes = options.minutes
    run = None
    try:
        run = Run(
            folder,
            seed,
            pair=options.pair,
            delivery=options.delivery,
            namespaces=namespaces,
            events=options.events if minutes is None else NEVER_ENDING,
            batches_per_s=options.batches_per_s,
            disk_mib=MOUNT_MIB + int((minutes or 0) * 60 * 2 * options.batches_per_s * BATCH_BYTES) // 2**20,
            sabotage=options.sabotage,
            judged_as=options.judge_as,
            arrive_s=options.arrive_s,
            spares=minutes is not None,
            say=lambda line: print(line, flush=True),
        )
        run.start()
        deadline = time.monotonic() + minutes * 60 if minutes is not None else None
        kept: bool | None = True
        while kept and (deadline is None or time.monotonic() < deadline):
            kept = run.round()
        if kept is not False:
            kept = run.finish()
        if options.audit and options.delivery == "exactly_once":
            kept = run.audit() and kept
        print(run.table(), flush=True)
        if not kept:
            print(run.report(), flush=True)
            return 1
        print(f"seed {seed}: every promise was kept", flush=True)
        return 0
    except (Exception, KeyboardInterrupt):
        print(traceback.format_exc(), flush=True)
        if run is not None:
            print(run.table(), run.report(), sep="\n", flush=True)
        return 2
    finally:
        if run is not None:
            run.stop()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Clients' threads may still be waiting for brokers that are gone.
    os._exit(status)
