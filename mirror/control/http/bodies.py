"""Bodies of the control calls and shapes of the answers, as models. Pure.

The bodies are what requests are checked against (unknown keys are errors); the answers are what the
description says (`openapi`) and what the tests hold the real answers against.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace.mirror.control.wishes import MAX_RATE, Scope
from millrace.mirror.gaps.gaps import GapClass


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Answer(BaseModel):
    # Keys may come with a later version; a reader must not fall over them.
    model_config = ConfigDict(extra="allow")


Name = Annotated[str, Field(min_length=1, max_length=249)]
PartitionNumber = Annotated[int, Field(ge=0, lt=2**31)]


class Selection(_Body):
    """Partitions: of a source, of a topic (of every source where none is named), or one. For everything say
    `{"all": true}`, so that a forgotten field does not mean it."""

    source: Name | None = None
    topic: Name | None = None
    partition: PartitionNumber | None = None
    all: bool = False

    @model_validator(mode="after")
    def _is_one_thing(self) -> Selection:
        if self.partition is not None and self.topic is None:
            raise ValueError("a topic beside a partition")
        if self.all == (self.scope != Scope()):
            raise ValueError('a source, a topic, or {"all": true}')
        return self

    @property
    def scope(self) -> Scope:
        return Scope(self.source, self.topic, self.partition)


class SkipBody(_Body):
    """One partition that is stopped at a gap. `from` and `class` say which gap was meant; they may be left
    out where the worker that is asked carries the partition."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    source: Name
    topic: Name
    partition: PartitionNumber
    from_offset: Annotated[int, Field(ge=0)] | None = Field(default=None, alias="from")
    gap_class: GapClass | None = Field(default=None, alias="class")

    @model_validator(mode="after")
    def _names_the_gap_whole(self) -> SkipBody:
        if (self.from_offset is None) != (self.gap_class is None):
            raise ValueError("from and class together, or neither")
        return self


class ThrottleBody(_Body):
    """Bytes/s of one source, over all workers together; null lifts the limit."""

    source: Name
    bytes_per_second: Annotated[int, Field(ge=1, le=MAX_RATE)] | None


class NothingBody(_Body):
    """No fields: `{}`."""


class ErrorAnswer(_Answer):
    error: str


class Done(_Answer):
    """`done` is a sentence for the person who asked."""

    done: str


class ReloadAnswer(_Answer):
    """Fields of the config by path. When any is refused, nothing is changed."""

    done: str
    changed: list[str]


class GapAnswer(_Answer):
    """Offsets `[from, to)`. `todo` says what an operator can do about it. `open`: more than is known of may
    have stood behind `to`."""

    from_offset: int = Field(alias="from")
    to_offset: int = Field(alias="to")
    gap_class: GapClass = Field(alias="class")
    reason: str
    todo: str
    at_ms: int
    open: bool = False


class PartitionAnswer(_Answer):
    """null: not known yet. What lies between `stable_end` and `log_end` is in open transactions."""

    source: str
    topic: str
    partition: int
    to: str
    state: str
    position: int | None
    log_end: int | None
    stable_end: int | None = None
    lag_records: int | None = None
    lag_seconds: float | None = None
    outstanding_bytes: int
    gap: GapAnswer | None = None


class SourceAnswer(_Answer):
    """`starting`: it has neither answered nor failed so far. `over_quota`: it wants nothing more from this
    worker now; `throttled_ms`: for how long it wanted that so far, summed over connections."""

    cluster: str
    connected: bool
    starting: bool = False
    error: str | None = None
    over_quota: bool = False
    throttled_ms: int = 0
    throttle_bytes_per_second: float | None


class TargetAnswer(_Answer):
    """`starting`: it has neither answered nor failed so far, or the worker has no share yet. `over_quota` and
    `throttled_ms` as of a source."""

    cluster: str
    connected: bool
    starting: bool = False
    error: str | None = None
    over_quota: bool = False
    throttled_ms: int = 0
    retries: int
    queued_batches: int


class RateAnswer(_Answer):
    """What the target acknowledged of a topic: in all since the worker began, and per second of late."""

    source: str
    topic: str
    records: int
    bytes: int
    records_per_second: float
    bytes_per_second: float


class TransactionsAnswer(_Answer):
    """Since the worker began; all 0 at least once. `open_seconds` is the sum over committed ones."""

    committed: int
    aborted: int
    open_seconds: float
    last_open_seconds: float


class RefusedTopicAnswer(_Answer):
    """A selected topic that is not carried: it would go round, or lie mixed with another."""

    source: str
    topic: str
    reason: str


class InternalTopicAnswer(_Answer):
    """A topic that the patterns select and that is never carried: it is a system's own, or bears the name of
    one."""

    source: str
    topic: str
    reason: str


class TroubleAnswer(_Answer):
    """What has been tried in vain since `since_ms`; without a partition it is a whole topic, which the target
    does not take, or all topics of the source (`*`), which cannot be looked after."""

    source: str
    topic: str
    partition: int | None
    reason: str
    since_ms: int


class GroupAnswer(_Answer):
    """A consumer group of a source whose positions are kept up on the target. `state`: synced, partly,
    failing, active_on_target or ahead_on_target; `partitions`: how many it has committed at the source;
    `committed`: how many times one of them was committed at the target."""

    source: str
    group: str
    state: str
    partitions: int
    committed: int
    at_ms: int
    reason: str | None = None


class StatusAnswer(_Answer):
    """One worker: its partitions alone. `waits_for`: what keeps it from being ready, where that lasts.
    `resumed`: of something in `paused`, what goes on all the same."""

    mirror: str
    url: str
    ready: bool
    waits_for: list[str] = []
    stopping: bool
    draining: bool
    delivery: str
    transactions: TransactionsAnswer
    member: str
    generation: int
    leader: bool
    at_ms: int
    paused: list[str]
    resumed: dict[str, list[str]] = {}
    target: TargetAnswer
    sources: list[SourceAnswer]
    refused_topics: list[RefusedTopicAnswer]
    internal_topics: list[InternalTopicAnswer] = []
    troubles: list[TroubleAnswer] = []
    groups: list[GroupAnswer]
    topics: list[RateAnswer]
    partitions: list[PartitionAnswer]


class WorkerAnswer(_Answer):
    """One worker of the mirror, as another one sees it: its status, or why there is none."""

    id: str
    url: str | None
    status: StatusAnswer | None
    error: str | None


class MirrorAnswer(_Answer):
    """The whole mirror: every worker of its group. `crew_is_old`: the worker that was asked is drained, and
    names those that were in the group when it left."""

    mirror: str
    crew_is_old: bool = False
    workers: list[WorkerAnswer]
