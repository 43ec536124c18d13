"""The way to the target: lanes, idempotent sequences, pipelined produce requests.

Called by `pipeline` (`enqueue`, `withdraw`) and started by `worker`. Holds no rules of its own: order,
sequences and retries are `lane`'s, what a refusal means for a partition is the pipeline's.

A produce request carries at most one batch of each partition, so a request takes the next batch of every
lane that has one, and up to five requests are under way to each broker. Requests to one broker leave in
the order in which they were built. A lane changes to another broker only when nothing of it is in flight.

In a lane with transactions (`transactional_lane`) the sink sends only what the lane's `transaction` lets
through, under the lane's producer id; when the transaction is aborted it forgets everything (`reset`).

Failures never end it: a target that is away is asked again with back-off, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import ProduceOutcome, init_producer_id, produce
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import (
    ClusterUnreachable,
    CorruptMessage,
    DuplicateSequence,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRecord,
    InvalidTxnState,
    KafkaError,
    OutOfOrderSequence,
    ProducerFenced,
    ProtocolError,
    TransactionAbortable,
    UnknownProducerId,
    UnknownServerError,
    error_for_code,
)
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.batches.rebatch import fault_of, stamp_for_target
from millrace.mirror.delivery.alternation import Alternation
from millrace.mirror.delivery.lane import (
    MAX_IN_FLIGHT,
    NEVER_MS,
    Identity,
    Outcome,
    TargetLane,
)
from millrace.mirror.delivery.outgoing import Outgoing, Owner
from millrace.mirror.delivery.system_records import UNCHANGING, NewFailures
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import TargetPartition
from millrace.mirror.troubles import LASTING_AFTER_MS, Failures

if TYPE_CHECKING:
    from millrace.mirror.pipeline import PartitionPipeline

log = structlog.get_logger("millrace.mirror.delivery.sink")

MAX_REQUEST_SIZE = 4 << 20
PRODUCE_TIMEOUT_MS = 30_000
MAX_CORRUPT_ANSWERS = 3
METADATA_BACKOFF_MS = 100
IDENTITY_BACK_OFF = BackOff(first_ms=200, limit_ms=5_000)

# The broker's view of this producer's sequence, or of its transaction, is another than ours.
LOST_SEQUENCE = {
    error.code
    for error in (
        OutOfOrderSequence,
        UnknownProducerId,
        InvalidProducerEpoch,
        InvalidProducerIdMapping,
        InvalidTxnState,
        ProducerFenced,
        TransactionAbortable,
    )
}
# What does not say whether the batch can ever be taken: the first is Apache Kafka's answer to any failure of
# its own, also at records that it cannot decompress. Then the batch is looked at whole, once.
UNEXPLAINED = {error.code for error in (UnknownServerError, InvalidRecord)}
# Everything else, an unknown code or missing rights included, is asked again for as long as it takes: nothing
# is given up for want of patience.
REFUSALS = {error.code for error in UNCHANGING}
TARGET_FAILURES = (KafkaError, ClusterUnreachable, ProtocolError, OSError, TimeoutError)


class Sink:
    """One producer's traffic to the target cluster: all of a worker's, or that of one transactional lane."""

    def __init__(
        self,
        cluster: Cluster,
        now_ms: Callable[[], int],
        *,
        seed: int | None = None,
        alternation: Alternation | None = None,
        transactional_id: str | None = None,
        wake: Callable[[], None] = lambda: None,
        on_answer: Callable[[], None] = lambda: None,
        on_moved: Callable[[PartitionPipeline], None] | None = None,
        steady_ms: Callable[[], int] = steady_ms,
    ) -> None:
        """With an `alternation` the producers are the lane's: `use` says which one has the turn, `wake` is
        called when a batch waits for the lane's leave, `on_answer` after each answered request, `on_moved` by
        the pipelines. `transactional_id` is the first of both."""
        self.on_moved = on_moved
        self._alternation = alternation
        self._transactional_id = transactional_id
        self._purpose = f"produce {transactional_id}" if transactional_id else "produce"
        self._wake = wake
        self._on_answer = on_answer
        self._era = 0
        self._cluster = cluster
        self._now_ms = now_ms
        self._steady_ms = steady_ms
        self._random = random.Random(seed)
        self._lanes: dict[TargetPartition, TargetLane[Outgoing]] = {}
        self._lane_node: dict[TargetPartition, int] = {}
        self._leaders: dict[TargetPartition, int] = {}
        self._waiting: dict[TargetPartition, None] = {}  # lanes with something to send, in turn
        self._requests: dict[int, int] = {}
        self._heard_at_ms: dict[int, int] = {}  # of brokers with requests; or when the first of them left
        self._identity: Identity | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._pump_handle: asyncio.Handle | None = None
        self._retry_handle: asyncio.TimerHandle | None = None
        self._stale_leaders = asyncio.Event()
        self._wanted_identities: dict[TargetPartition, str] = {}  # and why
        self._identity_wanted = asyncio.Event()
        self._looking = asyncio.Lock()  # one at a time: each may take much memory
        self._is_connected = False
        self.was_connected = False
        self.retry_count = 0
        self.replayed_after_ms = 0  # see `lane.replayed_after_ms`; until that is known, all are
        self.failures: Failures[TargetPartition] = Failures()  # of batches, until one is acknowledged
        self._told: dict[TargetPartition, int] = {}  # of them that last, and since when they did

    async def run(self) -> None:
        """Keeps leaders and identities fresh until cancelled."""
        if self._alternation is None:
            self.renew(await self._new_identity())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_leaders_fresh())
            group.create_task(self._await_failure())
            if self._alternation is None:
                group.create_task(self._keep_identities_fresh())

    @property
    def is_connected(self) -> bool:
        """Whether the target answered when it was last asked; `was_connected`: whether it ever did."""
        return self._is_connected

    @is_connected.setter
    def is_connected(self, value: bool) -> None:
        self._is_connected = value
        self.was_connected |= value

    @property
    def is_transactional(self) -> bool:
        return self._alternation is not None

    def renew(self, identity: Identity) -> None:
        """Everything that waits is sent under `identity`; nothing is in flight."""
        self._identity = identity
        for target, lane in self._lanes.items():
            lane.renew(identity)
            if len(lane):
                self._waiting[target] = None
        self._schedule()

    def use(self, identity: Identity, transactional_id: str) -> None:
        """From here on batches go out under one of the lane's producers. Everything that went out under the
        other one is acknowledged."""
        if identity == self._identity:
            return
        self._identity, self._transactional_id = identity, transactional_id
        for target, lane in self._lanes.items():
            lane.switch(identity)
            if len(lane):
                self._waiting[target] = None
        self._schedule()

    def reset(self) -> None:
        """The transaction is aborted: forgets every batch, sent or not, and the producer's identity. Answers
        that are still under way are about nothing any more."""
        self._era += 1
        self._identity = None
        for forgotten in (self._lanes, self._lane_node, self._waiting, self._requests, self._heard_at_ms):
            forgotten.clear()
        # They would hold memory, and a slow target, for nothing.
        self._cluster.close_purpose(self._purpose)

    @property
    def is_idle(self) -> bool:
        """Nothing is queued and nothing under way."""
        return not self._waiting

    @property
    def is_settled(self) -> bool:
        """Everything that was ever sent is acknowledged."""
        if any(self._requests.values()):
            return False
        return not any(self._lanes[target].is_unsettled for target in self._waiting)

    @property
    def has_unsent(self) -> bool:
        """Whether a batch waits that was never sent."""
        return any(self._lanes[target].has_unsent for target in self._waiting)

    @property
    def waiting_targets(self) -> list[TargetPartition]:
        return list(self._waiting)

    def failing_targets(self) -> set[TargetPartition]:
        """The target partitions whose batches do not get through now."""
        return {
            target
            for target in self._waiting
            if self._lanes[target].is_failing or target not in self._leaders
        }

    def unsettled_targets(self) -> set[TargetPartition]:
        """The target partitions where something was sent that is not acknowledged, refused or not."""
        rows = ((target, self._lanes[target]) for target in self._waiting)
        return {target for target, row in rows if row.in_flight or row.is_unsettled}

    def poke(self) -> None:
        """What the transaction lets through has changed."""
        self._schedule()

    def enqueue(self, target: TargetPartition, outgoing: Outgoing) -> None:
        self._lane(target).enqueue(outgoing)
        self._waiting[target] = None
        if self._alternation is not None and not self._alternation.filling.lets(target):
            self._wake()
            return
        self._schedule()

    def withdraw(self, target: TargetPartition, owner: Owner, from_offset: int = 0) -> list[Outgoing]:
        """Takes back what was never sent for `owner` of the source offsets from `from_offset` on."""
        lane = self._lanes.get(target)
        if lane is None:
            return []
        withdrawn = lane.withdraw(
            lambda outgoing: outgoing.owner is owner and outgoing.offsets[0] >= from_offset
        )
        if not len(lane):
            self.failures.over(target)
            self._waiting.pop(target, None)  # nobody asks for its leader again and again
        return withdrawn

    def leave_answers(self, target: TargetPartition, owner: Owner) -> None:
        """What waits here for `owner` goes on in memory of its own; a request that is under way would keep
        the answer all the same, so what is in it stays."""
        if (lane := self._lanes.get(target)) is not None:
            for outgoing in lane.at_rest():
                if outgoing.owner is owner:
                    outgoing.leave_answer()

    def is_failing(self, target: TargetPartition) -> bool:
        lane = self._lanes.get(target)
        return lane is not None and (lane.is_failing or self._identity is None)

    def silent_ms(self, target: TargetPartition, steady_ms: int) -> int:
        """For how long the leader has not answered what it was sent, of any partition; 0 where it owes no
        answer, or is not known."""
        node = self._leaders.get(target)
        if node is None or not self._requests.get(node):
            return 0
        return steady_ms - self._heard_at_ms[node]

    @property
    def queued_count(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    # --- sending ---------------------------------------------------------------------------------

    def _lane(self, target: TargetPartition) -> TargetLane[Outgoing]:
        lane = self._lanes.get(target)
        if lane is None:
            lane = self._lanes[target] = TargetLane(self._identity or Identity(-1, -1))
            lane.needs_identity = self._identity is None
        return lane

    def _schedule(self) -> None:
        """Asks for one pump after what is running now: a fetch answer enqueues many batches at once."""
        if self._pump_handle is None:
            self._pump_handle = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_handle = None
        steady_ms, retry_at_ms = self._steady_ms(), math.inf
        by_node: dict[int, list[TargetPartition]] = {}
        filling = None if self._alternation is None else self._alternation.filling
        # In a transaction nobody is forgotten.
        replayed_before_ms = self._now_ms() - self.replayed_after_ms if filling is None else NEVER_MS
        for target in self._waiting:
            lane = self._lanes[target]
            if lane.retry_at_ms > steady_ms:
                retry_at_ms = min(retry_at_ms, lane.retry_at_ms)
            node = self._lane_node.get(target) if lane.in_flight else self._leaders.get(target)
            if node is None:
                self._stale_leaders.set()
            elif filling is None or filling.lets(target):
                by_node.setdefault(node, []).append(target)
        for node, targets in by_node.items():
            while self._requests.get(node, 0) < MAX_IN_FLIGHT and self._send_next(
                node, targets, steady_ms, replayed_before_ms
            ):
                pass
        self._wake_for_retries(steady_ms, retry_at_ms)

    def _send_next(
        self, node: int, targets: list[TargetPartition], steady_ms: int, replayed_before_ms: int
    ) -> bool:
        """Builds and sends one request to `node`; False when no lane had anything to send."""
        request: dict[TargetPartition, Outgoing] = {}
        room = MAX_REQUEST_SIZE
        filling = None if self._alternation is None else self._alternation.filling
        for target in targets:
            if room <= 0:
                break
            only_again = filling is not None and filling.only_again  # what has just gone out may be the last
            outgoing = self._lanes[target].next_to_send(
                steady_ms,
                room if request else None,
                only_again=only_again,
                replayed_before_ms=replayed_before_ms,
            )
            if outgoing is not None:
                if filling is not None:
                    filling.sent(outgoing.size, steady_ms)
                request[target] = outgoing
                room -= outgoing.size
                # Behind the others next time: a full request must not always serve the same lanes.
                self._waiting.pop(target, None)
                self._waiting[target] = None
        if not request:
            return False
        for target, outgoing in request.items():
            self._lane_node[target] = node
            self._stamp(outgoing)
        if not self._requests.get(node):
            self._heard_at_ms[node] = steady_ms
        self._requests[node] = self._requests.get(node, 0) + 1
        task = asyncio.get_running_loop().create_task(self._exchange(node, request, self._era))
        self._tasks.add(task)
        task.add_done_callback(self._exchanged)
        return True

    def _exchanged(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._failed.set()

    async def _await_failure(self) -> None:
        """A broken rule in the handling of an answer (the target's failures are handled where they occur)
        ends the worker: its batches would wait for ever."""
        await self._failed.wait()
        raise self._failure or RuntimeError("an exchange failed")

    def _stamp(self, outgoing: Outgoing) -> None:
        identity = outgoing.identity
        if identity is None:
            raise RuntimeError("a batch is sent without an identity")
        stamp_for_target(
            outgoing.batch,
            identity.producer_id,
            identity.producer_epoch,
            outgoing.base_sequence,
            transactional=self._alternation is not None,
        )

    async def _exchange(self, node: int, request: dict[TargetPartition, Outgoing], era: int) -> None:
        if era != self._era:
            return  # forgotten before it began
        batches: dict[TopicPartition, memoryview] = {target: each.batch for target, each in request.items()}
        try:
            outcomes = await produce(
                self._cluster,
                node,
                batches,
                acks=-1,
                timeout_ms=PRODUCE_TIMEOUT_MS,
                transactional_id=self._transactional_id,
                purpose=self._purpose,
            )
        except TARGET_FAILURES as error:
            if era == self._era and self.is_connected:
                log.warning("the target does not answer; everything is sent again", error=str(error))
            self.is_connected = False
            outcomes = {}
        else:
            if not self._is_connected:
                self.is_connected = True
        if era != self._era:
            return
        self._requests[node] -= 1
        now_ms, steady_ms = self._now_ms(), self._steady_ms()
        if outcomes:
            self._heard_at_ms[node] = steady_ms
        unexplained: dict[TargetPartition, ProduceOutcome] = {}
        for target, outgoing in request.items():
            answer = outcomes.get(target)
            if answer is not None and answer.error_code in UNEXPLAINED and not outgoing.is_looked_at:
                unexplained[target] = answer
            else:
                self._answered(target, outgoing, answer, now_ms, steady_ms)
        self._schedule()
        self._on_answer()
        for target, answer in unexplained.items():
            await self._look(request[target])
            if era != self._era:
                return
            self._answered(target, request[target], answer, self._now_ms(), self._steady_ms())
            self._schedule()
            self._on_answer()

    async def _look(self, outgoing: Outgoing) -> None:
        """Finds out whether its records are malformed, on a thread. It counts as under way meanwhile."""
        async with self._looking:
            outgoing.fault = await asyncio.to_thread(fault_of, outgoing.batch)
        outgoing.is_looked_at = True

    def _answered(
        self,
        target: TargetPartition,
        outgoing: Outgoing,
        answer: ProduceOutcome | None,
        now_ms: int,
        steady_ms: int,
    ) -> None:
        lane = self._lanes[target]
        outcome, error = _judge(answer, outgoing)
        on_refused = None
        if outcome is Outcome.REFUSED:

            def on_refused(refused: Outgoing) -> None:
                lane.replace(refused, refused.owner.refused(refused, error or CorruptMessage(), now_ms))

        if error is not None and outcome is not Outcome.REFUSED:  # that one is a gap, or is cut
            what = f"{error.name}, {error} (source offset {outgoing.offsets[0]})"
            self.failures.failed(target, f"the target refuses {target}: {what}", now_ms)
            self._tell_lasting(target, outgoing, error, now_ms)
        elif answer is None:
            self.failures.failed(target, f"at the target the leader of {target} does not answer", now_ms)
        random_unit = 0.5 if outcome is Outcome.ACKNOWLEDGED else self._random.random()
        result = lane.answered(outgoing, outcome, steady_ms, random_unit=random_unit, on_refused=on_refused)
        if result is Outcome.ACKNOWLEDGED:
            self.failures.over(target)
            base_offset = answer.base_offset if answer is not None and not answer.error_code else -1
            if not outgoing.is_unwanted:
                outgoing.owner.delivered(outgoing, base_offset, now_ms, steady_ms)
            elif self._alternation is not None:
                self._alternation.filling.doom("the target took a batch behind a refused one")
        elif result is Outcome.RETRY:
            self.retry_count += 1
            self._stale_leaders.set()
        if lane.needs_identity and self._alternation is not None:
            self._alternation.filling.doom(f"{target}: {error or 'the sequence is lost'}")
        elif lane.needs_identity and not lane.in_flight:
            self._wanted_identities[target] = str(
                error or "a batch may be in its log under a number used again"
            )
            self._identity_wanted.set()
        if len(lane):
            self._waiting[target] = None
        else:
            self._waiting.pop(target, None)
            self.failures.over(target)  # also where its last batch is nothing to anybody any more

    def _tell_lasting(
        self, target: TargetPartition, outgoing: Outgoing, error: KafkaError, now_ms: int
    ) -> None:
        """Once for each row of refusals that lasts: what is sent again without end is in the log as well."""
        failure = self.failures.get(target)
        if failure is None or now_ms - failure.since_ms < LASTING_AFTER_MS:
            return
        if self._told.get(target) != failure.since_ms:
            self._told[target] = failure.since_ms
            log.warning(
                "the target refuses a batch again and again; it is sent until it is taken",
                to=str(target),
                source_offset=outgoing.offsets[0],
                error=f"{error.name}, {error}",
                for_s=(now_ms - failure.since_ms) // 1000,
            )

    def _wake_for_retries(self, steady_ms: int, retry_at_ms: float) -> None:
        if self._retry_handle is not None:
            self._retry_handle.cancel()
            self._retry_handle = None
        if retry_at_ms < math.inf:
            delay = (retry_at_ms - steady_ms) / 1000 + 0.001
            self._retry_handle = asyncio.get_running_loop().call_later(delay, self._schedule)

    # --- what the lanes need ---------------------------------------------------------------------

    async def _keep_leaders_fresh(self) -> None:
        """Asks for leaders whenever an answer or a missing leader says that they may have moved."""
        while True:
            await self._stale_leaders.wait()
            self._stale_leaders.clear()
            topics = sorted({target.topic for target in self._waiting})
            if topics:
                try:
                    metadata = await self._cluster.metadata(topics, max_age_ms=0)
                except TARGET_FAILURES as error:
                    log.warning("the target cannot be reached", error=str(error))
                    self.is_connected = False
                    self._stale_leaders.set()
                else:
                    for target in self._waiting:
                        leader = metadata.leader(target.topic, target.partition)
                        if leader is None:
                            self._leaders.pop(target, None)
                            reason = f"the target names no leader of {target}, or does not have it"
                            self.failures.failed(target, reason, self._now_ms())
                        else:
                            self._leaders[target] = leader
                self._schedule()
            await asyncio.sleep(METADATA_BACKOFF_MS / 1000 * self._random.uniform(0.5, 1.5))

    async def _keep_identities_fresh(self) -> None:
        while True:
            await self._identity_wanted.wait()
            self._identity_wanted.clear()
            wanted, self._wanted_identities = self._wanted_identities, {}
            identity = await self._new_identity()
            for target, reason in wanted.items():
                log.warning("going on under a new producer id", to=str(target), reason=reason)
                self._lanes[target].renew(identity)
                self._waiting[target] = None
            self._schedule()

    async def _new_identity(self) -> Identity:
        failures, failure_count = NewFailures(), 0
        while True:
            try:
                identity = Identity(*await init_producer_id(self._cluster))
                self.is_connected = True
                return identity
            except TARGET_FAILURES as error:
                if failures.is_news(error):
                    log.warning("no producer id from the target yet", error=str(error))
                failure_count += 1
                await asyncio.sleep(IDENTITY_BACK_OFF.delay_ms(failure_count, self._random.random()) / 1000)


def _judge(answer: ProduceOutcome | None, outgoing: Outgoing) -> tuple[Outcome, KafkaError | None]:
    """What an answer of the target means. No answer: the batch may be in the log or not."""
    if answer is None:
        return Outcome.RETRY, None
    code = answer.error_code
    if code == 0 or code == DuplicateSequence.code:
        return Outcome.ACKNOWLEDGED, None
    error = error_for_code(code, answer.error_message or "")
    if code in LOST_SEQUENCE:
        return Outcome.OUT_OF_ORDER, error
    if code in UNEXPLAINED and outgoing.fault is not None:
        return Outcome.REFUSED, outgoing.fault
    if code == CorruptMessage.code:
        # Its CRC was right when it was fetched. Bytes that changed on the way are right the next time;
        # bytes that the target finds wrong every time are refused.
        outgoing.corrupt_answers += 1
        is_final = outgoing.corrupt_answers >= MAX_CORRUPT_ANSWERS
        return (Outcome.REFUSED if is_final else Outcome.NOT_TAKEN), error
    return (Outcome.REFUSED if code in REFUSALS else Outcome.RETRY), error
