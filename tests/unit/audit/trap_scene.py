"""The stage of the traps: one source, one aggregate, a mirror, and the whole audit but Spark and sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.config import RosterMember
from millrace.audit.contract.events import CountEvent
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowVerdict
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.reconciling import roster_of
from tests.simulation.audit_capture import config_of
from tests.simulation.audit_logs import LEASE_MS, WINDOW_MS, Rec
from tests.simulation.audit_product import Audit
from tests.simulation.audit_world import Lane, Mirror, World
from tests.verdicts import overall_verdict


class Stream:
    """A producer's stream whose records are sent, lost and told as the scene says."""

    def __init__(
        self, scene: Scene, topic: str = "flights", promises: bool = True, skew_ms: int = 0, name: str = ""
    ):
        self.scene, self.topic, self.skew_ms = scene, topic, skew_ms
        scene.stream_count += 1
        self.id, self.name = f"{scene.stream_count:016x}", name or f"producer-{scene.stream_count}"
        self.session = StreamSession(
            ProducerIdentity(self.id, self.name),
            topic,
            self.id,
            window_ms=WINDOW_MS,
            lease_ms=LEASE_MS,
            promises=promises,
            content=scene.content,
        )
        self.sent: list[Rec] = []
        scene.topic_of[self.id] = topic
        self.report()

    def send(
        self,
        count: int = 1,
        *,
        partition: int = 0,
        written: int = 1,
        fate: str = "acknowledge",
        ago_ms: int = 0,
    ) -> list[Rec]:
        """Records with consecutive numbers; each stands `written` times in the source."""
        recs = []
        for _ in range(count):
            created_ms = self.scene.now_ms + self.skew_ms - ago_ms
            window, sequence = self.session.assign(created_ms)
            rec = Rec(self.id, sequence, created_ms, sequence, self.name)
            recs.append(rec)
            self.sent.append(rec)
            if fate == "acknowledge":
                window.acknowledge(sequence, 2, rec.digest if self.scene.content else 0)
            elif fate != "pending":
                getattr(self.session, f"mark_{fate}")(window, sequence)
        for _ in range(written):
            if recs:
                self.scene.source(partition, self.topic).append(recs)
        return recs

    def report(self, *, lost: bool = False) -> None:
        self._publish(self.session.report(self.scene.now_ms + self.skew_ms), lost)

    def close(self, *, lost_counts: bool = False) -> None:
        self._publish(self.session.close(self.scene.now_ms + self.skew_ms), False, lost_counts)

    def _publish(self, events: list[Any], lost: bool, lost_counts: bool = False) -> None:
        for event in events:
            if not lost and not (lost_counts and isinstance(event, CountEvent)):
                self.scene.publish(event, "ewr", surely=True)


class StageAudit(Audit):
    """Keeps what the last run saw of the clusters."""

    captured: Capture

    def _capture(self, *given: Any) -> Capture:
        self.captured = super()._capture(*given)
        return self.captured


class Scene(World):
    """A world in which nothing happens by chance. `roster` are the producers that the config names."""

    def __init__(
        self,
        folder: Path,
        topics: dict[str, str] | None = None,
        foreign: bool = False,
        content: bool = False,
        tells_epochs: bool = False,
    ):
        super().__init__(1, folder)
        self.now_ms = 1_000_100
        self.sources, self.aggregates = ["ewr"], ["agg"]
        self.tells_epochs = tells_epochs
        topics = topics or {"flights": "flights"}
        self.topics.audited, self.topics.renamed = list(topics), topics
        self.logs = {}
        for topic in topics:
            self.make_topic("ewr", topic, 2)
        for name in sorted(set(topics.values())):
            self.make_topic("agg", name, 2)
        self.foreign, self.content, self.quiet = foreign, content, True
        self.mirrors = [Mirror(self, "agg", self.sources, foreign)]
        self.groups, self.producers, self.sent, self.stream_count = [], [], [], 0
        self.log_append = False
        self.product = StageAudit(self)
        self.roster: list[str] = []

    def source(self, partition: int = 0, topic: str = "flights") -> Any:
        return self.logs["ewr", topic][partition]

    def aggregate(self, partition: int = 0, name: str = "flights") -> Any:
        return self.logs["agg", name][partition]

    def carry(
        self, *, until: int | None = None, without: tuple[int, ...] = (), append_ms: int | None = None
    ) -> None:
        """The mirror carries every source partition, up to an offset, and loses these sequences."""
        mirror = self.mirrors[0]
        for (cluster, name), logs in self.logs.items():
            for log in logs if cluster == "ewr" else ():
                lane = mirror.lanes.setdefault(log.place, Lane(topic_id=str(log.topic_id)))
                end = log.stable_end if until is None else min(until, log.stable_end)
                recs = [c.rec for c in log.visible(lane.carried, end) if c.rec.sequence not in without]
                if recs:
                    to = self.logs["agg", self.topics.renamed.get(name, name)]
                    to[log.partition % len(to)].append(recs, append_ms=append_ms)
                lane.carried = max(end, lane.carried)
                mirror._tell(log, lane)

    def audit(self) -> list[WindowVerdict]:
        """The rows of one run, with those of the roster, which the job adds to them."""
        self.result = self.product.run()
        members = [RosterMember(name=name) for name in self.roster]
        config = config_of(self).model_copy(update={"producers": members})
        rows = verdict_rows(self.result.rows)
        return self.result.rows + roster_of(config, self.product.captured, rows, {}, self.result.now_ms)

    def later(self, by_ms: int = 100_000) -> None:
        self.now_ms += by_ms


def row(rows: list[WindowVerdict], stream: Stream) -> WindowVerdict:
    """The stream's first window."""
    found = [each for each in rows if each.stream == stream.id and each.window_start_ms is not None]
    assert found, "the stream has no row"
    return found[0]


def own(rows: list[WindowVerdict], stream: Stream) -> WindowVerdict:
    """The stream's row beside its windows; an empty proof where there is none."""
    found = [each for each in rows if each.stream == stream.id and each.window_start_ms is None]
    assert found, "the stream has no row of its own"
    return found[0]


def all_proven(rows: list[WindowVerdict]) -> bool:
    return overall_verdict(rows) is Verdict.PROVEN
