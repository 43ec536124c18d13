"""One run: a cluster and a load, and round after round of faults, healing and judgement.

`Run.round` is the story: faults, everything back, wait until the cluster is whole, halt the load, look at
everything. `Run.report` is what a person needs who was not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.cluster.faults import checks, evidence
from tests.cluster.faults.cluster import NODES, Cluster
from tests.cluster.faults.faults import Faults
from tests.cluster.faults.load import Load
from tests.cluster.faults.network import NamespaceNetwork, Network
from tests.cluster.faults.plan import Fault, Kind, rounds
from tests.cluster.faults.proxies import ProxyNetwork
from tests.cluster.faults.records import COPIES, EVENTS, ORDERS, TOPICS, TRANSFORMERS
from tests.cluster.faults.timeline import Timeline
from tests.waiting import Deadline

WHOLE_TIMEOUT_S = 75.0
HALT_TIMEOUT_S = 75.0
SEEN_TIMEOUT_S = 45.0
WARM_UP_S = 2.0
SLOW_TO_AGREE_S = 15.0
TAIL_LINES = 60


class Run:
    """`problems` is empty as long as every promise was kept, `late` as long as all came within its time."""

    def __init__(
        self, folder: Path, seed: int, *, namespaces: bool, say: Callable[[str], None] | None = None
    ) -> None:
        self.seed = seed
        self.problems: list[str] = []
        self.late: list[str] = []
        self.timeline = Timeline(say)
        network: Network = NamespaceNetwork(NODES) if namespaces else ProxyNetwork()
        self.timeline.note(f"seed {seed}; cuts by {network.description}")
        self.cluster = Cluster(network, folder, self.timeline, small_disk=namespaces)
        kinds = [kind for kind in Kind if namespaces or kind is not Kind.DISK_FULL]
        if not namespaces:
            self.timeline.note("no disk runs full here: that takes a file system of its own")
        self._plan: Iterator[tuple[Fault, ...]] = rounds(seed, kinds)
        self._load: Load | None = None
        self._committed: dict[str, dict[tuple[str, int], int]] = {}
        self._folder = folder
        self.round_count = 0
        self.fault_count = 0

    @property
    def load(self) -> Load:
        assert self._load is not None
        return self._load

    def start(self) -> None:
        self.cluster.start()
        missing = self.cluster.wait_until_whole(WHOLE_TIMEOUT_S)
        if missing:
            raise RuntimeError(
                f"the cluster does not come up: {missing}\n" + "\n".join(self.cluster.tails(20))
            )
        self.cluster.create_topics(TOPICS)
        self._load = Load(self.cluster.bootstrap, self.seed)
        self._load.start()
        time.sleep(WARM_UP_S)
        self.timeline.note(f"the cluster is up: {self._load.figures()}")

    def stop(self) -> None:
        if self._load is not None:
            self._load.stop()
        self.cluster.stop()

    # -- one round -----------------------------------------------------------------------------------

    def round(self) -> bool:
        """Whether every promise was kept, in time. What does not come to its end is not judged."""
        self.round_count += 1
        self.timeline.note(f"round {self.round_count} of seed {self.seed}")
        faults = Faults(self.cluster)
        planned = next(self._plan)
        self.fault_count += len(planned)
        faults.run(planned)
        healed = time.monotonic()
        self.problems += faults.problems
        missing = self.cluster.wait_until_whole(WHOLE_TIMEOUT_S)
        whole_s = time.monotonic() - healed
        self.timeline.note(f"whole {whole_s:.1f} s after the last fault")
        self.late += [f"the cluster is not whole after {whole_s:.0f} s: {line}" for line in missing]
        endless = self.load.halt(HALT_TIMEOUT_S)
        self.late += endless
        self.problems += self.load.failures + self.cluster.problems
        if not endless:
            self.timeline.note(f"nothing is written: {self.load.figures()}")
            try:
                self._judge()
            except evidence.Unreadable as error:
                self.late.append(str(error))
        kept = not self.problems and not self.late
        if kept:
            self.timeline.note("every promise was kept")
            self.load.resume()
        return kept

    def _judge(self) -> None:
        contents = evidence.read_contents(self.cluster.bootstrap)
        found = self.problems
        began = time.monotonic()
        found += evidence.wait_until_replicas_agree(self.cluster)
        if (took_s := time.monotonic() - began) > SLOW_TO_AGREE_S:
            self.timeline.note(f"replicas agreed after {took_s:.0f} s only")
        places = {topic: checks.places_of(contents, topic) for topic in (EVENTS, ORDERS)}
        resent = checks.resent(places[EVENTS], evidence.senders(self.cluster, EVENTS))
        if resent:
            self.timeline.note(f"librdkafka has sent {len(resent)} records again under a newer epoch")
        for producer in self.load.producers:
            forgiven = resent if producer.may_resend else ()
            found += checks.check_acknowledged(producer.journal, places[EVENTS], forgiven)
        found += checks.check_order(contents, resent)
        for writer in self.load.writers:
            found += checks.check_transactions(writer.journal, places[ORDERS])
        found += checks.check_copies(contents, EVENTS, COPIES)
        found += self._wait_until_seen(contents)
        found += checks.check_seen(self.load.group, contents)
        found += self._check_commits()
        for broker in self.cluster.brokers.values():
            found += evidence.suspect_lines(broker)

    def _wait_until_seen(self, contents: checks.Contents) -> list[str]:
        deadline = Deadline("the group has seen everything", within_s=SEEN_TIMEOUT_S)
        while missing := checks.unseen(self.load.group, contents):
            if deadline.has_passed or self.load.failures:
                return [*missing[: checks.MOST_LINES], f"{len(missing)} in all"]
            time.sleep(0.1)
        return []

    def _check_commits(self) -> list[str]:
        """What was acknowledged up to now must be there in an answer that is asked for now."""
        breaches = []
        acknowledged = dict(self.load.group.committed)
        for group, topics in ((self.load.group.name, tuple(TOPICS)), (TRANSFORMERS, (EVENTS,))):
            known = self._committed.setdefault(group, {})
            if group == self.load.group.name:
                for key, offset in acknowledged.items():
                    known[key] = max(offset, known.get(key, -1))
            found = evidence.committed_offsets(self.cluster.bootstrap, group, topics)
            breaches += checks.check_commits(group, known, found)
            for key, offset in found.items():
                known[key] = max(offset, known.get(key, -1))
        return breaches

    # -- for people ----------------------------------------------------------------------------------

    def report(self) -> str:
        lines: Sequence[str] = [
            f"seed {self.seed}, round {self.round_count}: {len(self.problems)} promises broken, "
            f"{len(self.late)} waits without an end",
            *(f"  {line}" for line in (*self.problems, *self.late)),
            "---- what happened",
            *self.timeline.lines,
            "---- the load",
            self.load.figures() if self._load is not None else "not started",
            *(f"{each.name}: errors {each.client.errors}" for each in self._transactional()),
            "---- partition states in ZooKeeper",
            *self._states(),
            *self.cluster.tails(TAIL_LINES),
            f"---- everything is in {self._folder}",
        ]
        return "\n".join(lines)

    def _transactional(self) -> list[object]:
        return [] if self._load is None else [*self._load.writers, self._load.copier]

    def _states(self) -> list[str]:
        try:
            return [f"{name}: {state}" for name, state in sorted(self.cluster.states().items())]
        except Exception as error:  # the report must come, whatever is broken
            return [f"not readable: {error!r}"]
