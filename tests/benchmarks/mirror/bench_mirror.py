"""`make bench-mirror`: Millrace's mirror beside MirrorMaker 2, between the same clusters, with the same data.

    python -m tests.benchmarks.mirror.bench_mirror [--short] [--rounds 3] [--scale 1] [--ends kafka,millrace]
        [--systems millrace-eos,mm2-tuned-eos,…] [--workloads packed,…] [--only
        backlog,latency,ten,link,relay] [--small] [--together] [--vary batches.coalesce_bytes=32768,131072]

The brokers (Apache Kafka at both ends, then Millrace at both) and the load have one core, the mirror under
measurement the other, so that the mirror's own cost shows. A first session is not counted: brokers in a JVM
carry a third in their first gigabytes of what they carry later, whoever mirrors. Then systems take turns,
round by round, each started anew, warmed up with the same data, and given each workload's backlog while it
stands still; then a fixed 5 MB/s for latency. Of a backlog the same part counts for each system (`measure`),
bounded by time, and the tables say how much that was. Every figure is printed and written to a file as it
comes; an interrupt prints the tables of what there is. Only ratios within one run count on a shared machine.

`--small` measures batches of 1 to 500 records alone, uncompressed and lz4, between Apache Kafkas (with
`--short`: one round, exactly once, some 20 minutes). `--vary` measures ours alone, with each value of one key
of mirror.yaml.

`--together` starts each system once for all rounds, all of them beside one another, and they take turns
workload by workload: what differs from start to start, or grows with the brokers' age between two sessions,
is the same for all. Those that wait have nothing to carry and cost the core next to nothing.

Also the limit: a TCP relay of as many bytes. And a long link: the source behind a relay that adds half of
the round trip each way, with 1 and with 32 partitions, beside a plain loop of request and response.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.broker.errors import MillraceError
from millrace.deploy.processes import spawn
from tests.benchmarks.mirror import measure, systems
from tests.benchmarks.mirror.ends import Ends
from tests.benchmarks.mirror.relay import relay_once
from tests.benchmarks.mirror.results import Results, Row, tables
from tests.benchmarks.mirror.workloads import BY_BATCH_SIZE, Workload, kilobyte_batch, warm_up, workloads
from tests.benchmarks.peers.usage import peak_memory_mb, pinned_cores, processor_seconds, running_on
from tests.peers.kafka import gather_jars
from tests.ports import free_port

UNCOUNTED = -1
PARTS = ("relay", "backlog", "latency", "ten", "link")
LATENCY_BYTES_PER_S = 5e6
LATENCY_RECORDS = 16
LATENCY_WARM_UP_S = 3.0
RELAY_BYTES = 1_000_000_000
ROUND_TRIP_MS = 100
# Partitions, what a connection carries in a round trip (None: any rate), and our connections to the source.
LINKS = ((1, None, 1), (32, None, 1), (32, None, 4), (32, 102_400, 1), (32, 102_400, 8))
NARROW_MEGABYTES = 20
LINK_FETCH_BYTES = 16 << 20
LINK_IN_FLIGHT_BYTES = 256 << 20
LINK_MEGABYTES = 600
LOOP_FETCHES = (1 << 20, LINK_FETCH_BYTES)
FAILURES = (measure.Stalled, MillraceError, RuntimeError, OSError, TimeoutError, subprocess.SubprocessError)


@dataclass(frozen=True, slots=True)
class Session:
    """One process of one system, warmed up; its topics begin with `prefix`."""

    system: str
    prefix: str
    mirror: systems.Mirror

    def topic(self, workload: str, number: int) -> str:
        """Of a round, from 0."""
        return f"{self.prefix}-{number}-{workload}"


class Bench:
    """One run; `results` holds what there is."""

    def __init__(self, options: argparse.Namespace, results: Results, folder: Path) -> None:
        self._options, self.results, self._folder = options, results, folder
        # `server` is for what is measured, the mirror; `client` for all the rest.
        self._cores = pinned_cores()
        self._number = 0

    def run(self) -> None:
        chosen = self._options.only
        for kind in self._options.ends:
            for part in [each for each in PARTS if each in chosen]:
                # What is measured in the same session is measured once; not where several run together.
                if part == "latency" and "backlog" in chosen and not self._options.together:
                    continue
                try:
                    getattr(self, f"_part_{part}")(kind)
                except Exception as error:  # one part must not take the others' figures with it
                    self._failed(kind, part, "", 0, error)

    def _part_relay(self, kind: str) -> None:
        for number in range(self._options.rounds):
            size = int(RELAY_BYTES * self._options.scale)
            rate, cost = relay_once(size, self._cores.server, self._cores.client)
            self.results.add(Row("relay", kind, "relay", "relay", number, {"MB/s": rate, "CPU s/GB": cost}))

    def _part_backlog(self, kind: str) -> None:
        with self._ends(kind) as ends:
            names = [each for each in self._options.workloads if each != "ten"]
            if self._options.together:
                self._together(ends, names)
            else:
                self._rounds(ends, names, latency="latency" in self._options.only)

    def _part_latency(self, kind: str) -> None:
        with self._ends(kind) as ends:
            self._rounds(ends, [], latency=True)

    def _part_ten(self, kind: str) -> None:
        if "ten" in self._options.workloads:
            with self._ends(kind, sources=10) as ends:
                self._rounds(ends, ["ten"], latency=False)

    def _part_link(self, kind: str) -> None:
        for number in range(self._options.rounds):
            self._link(kind, number)

    @contextmanager
    def _ends(self, kind: str, sources: int = 1, advertised: int | None = None) -> Iterator[Ends]:
        self._number += 1
        folder = self._folder / f"ends-{self._number}"
        say(f"starting {sources} source{'s' * (sources > 1)} and a target: {kind}")
        with running_on(self._cores.client):
            ends = Ends(kind, folder, sources, advertised=advertised)
        try:
            with running_on(self._cores.client), ends:
                yield ends
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _rounds(self, ends: Ends, names: Sequence[str], *, latency: bool) -> None:
        self._turn(ends, self._options.systems[0], UNCOUNTED, names, latency=False)
        for number in range(self._options.rounds):
            if latency:
                self._without_a_mirror(ends, number)
            for system in in_turns(self._options.systems, number):
                say(f"{ends.kind}, round {number + 1} of {self._options.rounds}: {system}")
                self._turn(ends, system, number, names, latency=latency)

    def _turn(self, ends: Ends, system: str, number: int, names: Sequence[str], *, latency: bool) -> None:
        try:
            self._session(ends, system, number, names, latency=latency)
        except FAILURES as error:
            self._failed(ends.kind, system, ",".join(names), number, error)
        try:
            ends.clear()
        except FAILURES as error:
            say(f"topics were not deleted: {error}")

    def _session(self, ends: Ends, system: str, number: int, names: Sequence[str], *, latency: bool) -> None:
        """One process of one system: each workload, then the latency."""
        topics = {f"0-{name}": workloads()[name].partitions for name in names}
        steady = {"steady": 1} if latency else {}
        with self._warmed_up(ends, system, topics | steady) as session:
            mirror = session.mirror
            for name in names:
                moved = self._backlog(ends, mirror, workloads()[name], session.topic(name, 0))
                if number != UNCOUNTED:
                    self.results.add(Row("backlog", ends.kind, system, name, number, moved.figures()))
            if latency:
                self.results.add(self._latency(ends, mirror, system, number, f"{session.prefix}-steady"))
            if number != UNCOUNTED:
                self._add_memory(ends, session, names, number)

    def _together(self, ends: Ends, names: Sequence[str]) -> None:
        """Each system is one process for all rounds; in turns, workload by workload."""
        self._turn(ends, self._options.systems[0], UNCOUNTED, names, latency=False)
        rounds, known = range(self._options.rounds), workloads()
        topics = {f"{number}-{name}": known[name].partitions for number in rounds for name in names}
        with ExitStack() as stack:
            sessions: dict[str, Session] = {}
            for system in self._options.systems:
                say(f"{ends.kind}, for all rounds: {system}")
                try:
                    sessions[system] = stack.enter_context(self._warmed_up(ends, system, topics))
                except FAILURES as error:
                    self._failed(ends.kind, system, ",".join(names), 0, error)
            turns = [(number, name) for number in rounds for name in names]
            for turn, (number, name) in enumerate(turns):
                for system in in_turns(list(sessions), turn):
                    session = sessions[system]
                    topic = session.topic(name, number)
                    try:
                        moved = self._backlog(ends, session.mirror, known[name], topic)
                    except FAILURES as error:
                        self._failed(ends.kind, system, name, number, error)
                        continue
                    self.results.add(Row("backlog", ends.kind, system, name, number, moved.figures()))
            for session in sessions.values():
                self._add_memory(ends, session, names, 0)

    @contextmanager
    def _warmed_up(self, ends: Ends, system: str, partitions: dict[str, int]) -> Iterator[Session]:
        """With empty topics of these names, behind the session's prefix, which it knows already."""
        self._number += 1
        prefix = f"b{self._number}"
        canary, warm = f"{prefix}-canary", f"{prefix}-warm"
        topics = {f"{prefix}-{name}": count for name, count in partitions.items()}
        topics |= {canary: 1, warm: warm_up().partitions}
        for topic, count in topics.items():
            ends.create(topic, count)
        measure.write_backlog(ends, Workload("canary", "", kilobyte_batch(1, 0), 1, 0.0001), canary, 1.0)
        mirror = self._start(ends, system, prefix)
        try:
            measure.wait_until_ready(ends, mirror.pid, topics, canary, self._options.ready_s)
            measure.carry(ends, mirror.pid, warm_up(), warm, self._options.scale)
            yield Session(system, prefix, mirror)
        except FAILURES:
            say(f"{system} says: {mirror.tail()}")
            raise
        finally:
            mirror.stop()

    def _add_memory(self, ends: Ends, session: Session, names: Sequence[str], number: int) -> None:
        figures = {"peak MB": peak_memory_mb(session.mirror.pid)}
        self.results.add(Row("memory", ends.kind, session.system, ",".join(names)[:10], number, figures))

    def _start(self, ends: Ends, system: str, prefix: str, **more: object) -> systems.Mirror:
        folder = self._folder / f"mirror-{self._number}"
        sources = {name: end.address for name, end in ends.sources.items()}
        with running_on(self._cores.server):
            return systems.start(system, folder, prefix, ends.target.address, sources, f"{prefix}-.*", **more)

    def _backlog(self, ends: Ends, mirror: systems.Mirror, workload: Workload, topic: str) -> measure.Moved:
        return measure.backlog(ends, mirror.pid, workload, topic, self._options.scale)

    def _latency(self, ends: Ends, mirror: systems.Mirror, system: str, number: int, topic: str) -> Row:
        before = processor_seconds(mirror.pid)
        (source,) = ends.sources.values()
        figures = self._delays(source.port, ends.target.port, topic)
        spent = processor_seconds(mirror.pid) - before
        gigabytes = LATENCY_BYTES_PER_S * (self._options.latency_s + LATENCY_WARM_UP_S) / 1e9
        return Row("latency", ends.kind, system, "5 MB/s", number, figures | {"CPU s/GB": spent / gigabytes})

    def _without_a_mirror(self, ends: Ends, number: int) -> None:
        """From the source's producer to a consumer of the source."""
        self._number += 1
        topic = f"b{self._number}-direct"
        ends.create(topic, 1)
        (source,) = ends.sources.values()
        try:
            figures = self._delays(source.port, source.port, topic)
            self.results.add(Row("latency", ends.kind, "no mirror", "5 MB/s", number, figures))
        except FAILURES as error:
            self._failed(ends.kind, "no mirror", "5 MB/s", number, error)

    def _delays(self, source_port: int, target_port: int, topic: str) -> dict[str, float]:
        batch = kilobyte_batch(LATENCY_RECORDS, 0)
        samples = measure.latency(
            source_port,
            target_port,
            topic,
            batch,
            LATENCY_RECORDS,
            LATENCY_BYTES_PER_S,
            self._options.latency_s,
            LATENCY_WARM_UP_S,
        )
        cuts = statistics.quantiles(samples, n=100)
        return {"p50 ms": cuts[49], "p99 ms": cuts[98], "max ms": max(samples)}

    def _link(self, kind: str, number: int) -> None:
        """The source behind a delaying relay: the mirror, and a loop that waits for each answer."""
        for partitions, window, connections in LINKS:
            port = free_port()
            with self._ends(kind, advertised=port) as ends:
                (source,) = ends.sources.values()
                relay = self._delaying_relay(port, source.port, window)
                try:
                    self._over_link(ends, port, partitions, window, connections, number)
                except FAILURES as error:
                    self._failed(kind, "link", str(partitions), number, error)
                finally:
                    relay.kill()
                    relay.wait()

    def _delaying_relay(self, listen: int, to: int, window: int | None) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.benchmarks.mirror.relay", str(listen), str(to)]
        words += [str(ROUND_TRIP_MS / 2), *([] if window is None else [str(window)])]
        return spawn(words, log=self._folder / "relay.log", die_with_parent=True)

    def _over_link(
        self, ends: Ends, port: int, partitions: int, window: int | None, connections: int, number: int
    ) -> None:
        batch = kilobyte_batch(64, 3)
        size_mb = LINK_MEGABYTES if window is None else NARROW_MEGABYTES
        workload = Workload("link", "", batch, 64, size_mb, partitions)
        chosen = [each for each in self._options.systems if each in self._options.link_systems]
        if connections > 1:
            chosen = [each for each in chosen if each.startswith("millrace")]
        name = f"{partitions} part." + ("" if window is None else f", {window / 1000:.0f} KB")
        for system in chosen:
            self._number += 1
            prefix = f"b{self._number}"
            topic, canary = f"{prefix}-link", f"{prefix}-canary"
            ends.create(topic, partitions)
            ends.create(canary, 1)
            measure.write_backlog(ends, Workload("canary", "", kilobyte_batch(1, 0), 1, 0.0001), canary, 1.0)
            more: dict[str, object] = {}
            if system.startswith("millrace"):
                more["fetch"] = {"max_bytes": LINK_FETCH_BYTES, "partition_max_bytes": LINK_FETCH_BYTES}
                more["in_flight_bytes"] = LINK_IN_FLIGHT_BYTES
                more["each_source"] = {"connections": connections}
            mirror = self._start(ends, system, prefix, **more)
            try:
                measure.wait_until_ready(
                    ends, mirror.pid, {topic: partitions, canary: 1}, canary, self._options.ready_s
                )
                moved = self._backlog(ends, mirror, workload, topic)
                title = f"{name}, {connections} conn."
                self.results.add(Row("link", ends.kind, system, title, number, moved.figures()))
            except FAILURES as error:
                say(f"{system} says: {mirror.tail()}")
                self._failed(ends.kind, system, f"link {partitions}", number, error)
            finally:
                mirror.stop()
            if partitions == 1 and chosen and system == chosen[0]:
                for size in LOOP_FETCHES:
                    rate = measure.request_response(port, topic, size, batch, 5.0)
                    asked = f"{size >> 20} MiB"
                    self.results.add(Row("link", ends.kind, "plain loop", asked, number, {"MB/s": rate}))

    def _failed(self, kind: str, system: str, workload: str, number: int, error: Exception) -> None:
        note = f"{type(error).__name__}: {str(error)[:200]}"
        self.results.add(Row("failed", kind, system, workload, number, note=note))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def in_turns(chosen: Sequence[str], turn: int) -> list[str]:
    """Each is first in its turn."""
    shift = turn % max(1, len(chosen))
    return [*chosen[shift:], *chosen[:shift]]


def varied(chosen: Sequence[str], setting: str) -> list[str]:
    """Of the chosen systems ours, with each value of the setting."""
    key, _, values = setting.partition("=")
    ours = [each for each in chosen if each.startswith("millrace")]
    return [f"{each}{systems.VARIED}{key}={value}" for each in ours for value in values.split(",")]


def names_in(known: Sequence[str]) -> object:
    """An argparse type: names out of `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [each for each in chosen if each not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known are {', '.join(known)}")
        return chosen

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(workloads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-s", type=float, default=15.0)
    parser.add_argument(
        "--ready-s", type=float, default=150.0, help="a mirror that takes longer to begin has failed"
    )
    parser.add_argument("--ends", type=names_in(("kafka", "millrace")), default=["kafka", "millrace"])  # type: ignore[arg-type]
    parser.add_argument("--systems", type=names_in(systems.SYSTEMS))  # type: ignore[arg-type]
    parser.add_argument("--workloads", type=names_in(known))  # type: ignore[arg-type]
    parser.add_argument("--only", type=names_in(PARTS), default=list(PARTS))  # type: ignore[arg-type]
    parser.add_argument(
        "--link-systems",
        type=names_in(systems.SYSTEMS),  # type: ignore[arg-type]
        default=["millrace-eos", "mm2-tuned-eos"],
    )
    parser.add_argument(
        "--short", action="store_true", help="one round, smaller but for --small, exactly once alone"
    )
    parser.add_argument("--scale", type=float, help="of the backlogs' sizes; 1, with --short 0.4")
    parser.add_argument(
        "--together", action="store_true", help="each system is started once; in turns, workload by workload"
    )
    parser.add_argument("--small", action="store_true", help="only batches of 1 to 500 records, Apache Kafka")
    parser.add_argument("--vary", help="a key of mirror.yaml with its values: ours alone, with each of them")
    parser.add_argument("--out", type=Path, default=Path("build/bench-mirror.jsonl"))
    options = parser.parse_args()
    if options.short:
        options.rounds, options.latency_s = 1, 6.0
    if options.scale is None:
        options.scale = 0.4 if options.short and not options.small else 1.0
    usual = [each for each in systems.SYSTEMS if each.endswith("-eos") or not options.short]
    options.systems = options.systems or usual
    if options.small:
        options.only, options.ends = ["backlog"], ["kafka"]
        options.workloads = options.workloads or BY_BATCH_SIZE
    options.workloads = options.workloads or [each for each in known if each not in BY_BATCH_SIZE]
    if options.vary:
        options.systems = varied(options.systems, options.vary)
    gather_jars()
    results = Results(options.out)
    folder = Path(tempfile.mkdtemp(prefix="millrace-bench-mirror-"))
    say(f"rows go to {options.out}; heap of MirrorMaker 2: {' '.join(systems.HEAP)}")
    status = 0
    try:
        Bench(options, results, folder).run()
    except KeyboardInterrupt:
        say("interrupted: this is what there is")
        status = 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        print(tables(results, {name: each.title for name, each in workloads().items()}), flush=True)
    return status or int(any(row.kind == "failed" for row in results.rows))


if __name__ == "__main__":
    raise SystemExit(main())
