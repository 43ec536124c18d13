"""Histories of exactly-once delivery: what can happen to workers and to what they carry, and what must hold.

Used by `test_mirror_transactions`, `test_mirror_names` and `test_mirror_small_batches`; workers are seated by
`mirror_group`. Each history runs up to three workers that share four source partitions of two sources, which
merge into two partitions of a model target with transactions. Requests get lost, are carried out late (also
after their sender was killed), coordinators abort what takes too long, workers freeze past their sessions and
wake up as zombies, lose their seats in whatever they are at, are killed at any point, come and go; at the end
everything heals. A `capricious` target also begins to refuse records at any moment, those included that may
be in its log, and forgets producers that have no transaction open (Apache Kafka forgets no others).

What must hold at every moment: what read_committed sees of a source partition is its records in order,
each once, none left out but those whose gap is on record, and of those none; in the end it is all of them.
A record that is refused to a worker that has lost its seat, and has not heard so, may be there all the same:
its successor may have carried it before the target began to refuse it. Of such a record it is not asked
whether it is there; nowhere may it be twice, or out of its place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from millrace.mirror.delivery import transaction as rules_module
from millrace.mirror.delivery.progress import PartitionProgress
from millrace.mirror.delivery.transaction import CLOSING, Phase
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.simulation import histories
from tests.simulation.mirror_group import Group
from tests.simulation.mirror_lanes import Batch, Pipeline, transactional_ids
from tests.simulation.mirror_model import POSITIONS, Refused, Target
from tests.simulation.mirror_workers import Call, Worker

PARTITIONS = [SourcePartition(source, "t", number) for source in ("ewr", "jfk") for number in range(2)]
TARGETS = [TargetPartition("t", number) for number in range(2)]


class History:
    """One seeded run; `broken` names the rule that is left out. `merges`: batches reach over the control
    records between their records."""

    def __init__(
        self, seed: int, broken: str = "", *, capricious: bool = False, merges: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.merges = merges
        self.capricious = capricious
        self.unrecorded: list[tuple[Worker, Pipeline, PartitionProgress, Batch, bool]] = []
        self.gaps: dict[SourcePartition, set[int]] = {partition: set() for partition in PARTITIONS}
        self.told_unseated: dict[SourcePartition, set[int]] = {partition: set() for partition in PARTITIONS}
        self.broken = broken
        self.now_ms = 0
        self.record_size = self.random.choice([1, 200_000])
        self.target = Target()
        self.group = Group(self)
        self.calls: list[Call] = []
        self.workers: list[Worker] = []
        self.ends = {partition: self.random.randint(4, 14) for partition in PARTITIONS}
        self.control = {
            partition: {offset for offset in range(end) if self.random.random() < 0.08}
            for partition, end in self.ends.items()
        }
        # Safety must not rest on the leader's fencing: it only makes takeovers fast.
        self.leader_fences = self.random.random() < 0.5
        self.rare_share = self.random.choice([0.01, 0.03, 0.08])
        self.holds_up = self.random.choice([0.0, 0.2])
        self.slows = self.random.choice([0.0, 0.3])
        self.allowance = self.random.choice([rules_module.FIRST_SIZE, 1])
        self.notices = self.random.choice([0.05, 0.3])
        self.is_healing = False
        self.lost_while: Counter[str] = Counter()
        """By what a worker was at when its session ended."""
        self.checked: dict[TargetPartition, int] = {}
        for _ in range(self.random.randint(1, 2)):
            self.start()

    # --- what workers and group ask of the world -------------------------------------------------

    def positions_end(self) -> int:
        log = self.target.log(POSITIONS)
        return log.last_stable_offset() if self.broken == "no_wait_for_open" else len(log.entries)

    def fence(self, slot: int, lane_count: int) -> bool:
        """By the leader; it may find the coordinator away."""
        if not self.leader_fences:
            return False
        for name in [each for number in range(lane_count) for each in transactional_ids(f"{slot}.{number}")]:
            try:
                if self.random.random() < 0.2 and not self.is_healing:
                    return False
                self.target.init(name)
            except Refused:
                return False
        return True

    def forget_calls(self, worker: Worker) -> None:
        """Answers that nobody waits for any more; the requests themselves are on their way."""
        for call in self.calls:
            if call.worker is worker:
                call.take = lambda _: None

    # --- what can happen -------------------------------------------------------------------------

    def start(self) -> None:
        if sum(worker.is_alive for worker in self.workers) < 3:
            self.workers.append(Worker(self))

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.runs]

    def work(self) -> None:
        for worker in self.running():
            if self.random.random() < 0.7:
                self.work_of(worker)

    def work_of(self, worker: Worker) -> None:
        if worker.owned:
            pipeline = self.random.choice(list(worker.owned.values()))
            pipeline.lane.fetch(pipeline)
        for lane in list(worker.lanes):
            lane.step()
            for target in list(lane.rows):
                lane.send(target)
        worker.poll_positions()
        worker.release()

    def serve(self) -> None:
        """The target takes a request; those of one worker mostly in order."""
        waiting = [call for call in self.calls if not call.is_executed and call.arrives_at_ms <= self.now_ms]
        if not waiting:
            return
        call = waiting[0] if self.random.random() < 0.8 else self.random.choice(waiting)
        is_end = call.kind == Phase.ENDING.value and not call.arrives_at_ms
        if is_end and call.worker.runs and not self.is_healing and self.random.random() < self.holds_up:
            self.hold_up(call)
        elif call.kind in CLOSING and not call.was_slow and self.random.random() < self.slows:
            # Coordinators and the leader of the positions are slower than the leaders of the data.
            call.was_slow, call.arrives_at_ms = True, self.now_ms + self.random.randint(10, 100)
        else:
            call.arrive()

    def answer(self) -> None:
        for call in list(self.calls):
            if call.is_executed and call.worker.is_frozen:
                continue
            if call.is_executed:
                self.calls.remove(call)
                if call.worker.is_alive:
                    call.take(call.result)
                return

    def lose(self) -> None:
        """A worker hears that a request failed. The target has seen it, or will later, or never."""
        calls = [call for call in self.calls if not call.worker.is_frozen]
        ends = [call for call in calls if call.kind == Phase.ENDING.value]
        if not calls:
            return
        call = self.random.choice(ends if ends and self.random.random() < 0.5 else calls)
        self.calls.remove(call)
        roll = self.random.random()
        if not call.is_executed and roll < 0.4:
            call.arrive()
        if self.capricious and call.records and self.random.random() < 0.2:
            self.target.refused.add(self.random.choice(call.records))
        take, call.take = call.take, lambda _: None
        if call.worker.is_alive:
            take(None)
        if not call.is_executed and roll > 0.7:
            call.arrives_at_ms = self.now_ms + self.random.randint(0, 300)
            self.calls.append(call)

    def refuse_more(self) -> None:
        """A limit is lowered, or a timestamp bound is crossed."""
        partition = self.random.choice(PARTITIONS)
        self.target.refused.add((partition, self.random.randrange(self.ends[partition])))

    def forget_producers(self) -> None:
        for log in self.target.logs.values():
            log.forget_idle()

    def record_gap(self) -> None:
        """The event of a gap becomes durable."""
        if self.unrecorded:
            worker, pipeline, progress, batch, had_seat = self.unrecorded.pop()
            if worker.is_alive and pipeline.progress is progress:
                told = self.gaps if had_seat else self.told_unseated
                told[pipeline.partition].update(batch.offsets)
                progress.gap_recorded(batch.span)

    def hold_up(self, call: Call) -> None:
        """The worker gives the request up; the network does not, yet."""
        take, call.take = call.take, lambda _: None
        call.arrives_at_ms = self.now_ms + self.random.randint(0, 300)
        take(None)

    def mark(self) -> None:
        """Coordinators write markers."""
        for name, known in self.target.ids.items():
            transaction = known.transaction
            if transaction is not None and transaction.unmarked and self.random.random() < 0.6:
                self.target.mark(name, self.random.choice(sorted(transaction.unmarked)))

    def rebalance(self) -> None:
        group = self.group
        for worker in self.running():
            is_asked = group.is_rebalancing and worker.member not in group.joined
            if worker.member and worker.member not in group.members:
                # A heartbeat tells it, in time.
                if self.random.random() < self.notices:
                    worker.lost()
            elif (
                not worker.is_assigning
                and (not worker.member or worker.must_rejoin or is_asked)
                and self.random.random() < 0.5
            ):
                group.join(worker)
        group.complete(self.random)
        for answered in list(group.answers):
            worker, member, generation = answered
            if worker.runs and self.random.random() < 0.5:
                group.answers.remove(answered)
                if worker.member == member:
                    worker.generation = generation
        group.share_out()
        for given in list(group.shares):
            worker, member, generation, share = given
            if worker.member != member:
                group.shares.remove(given)
            elif worker.runs and worker.generation == generation and self.random.random() < 0.5:
                group.shares.remove(given)
                worker.take_share(share)

    def freeze(self) -> None:
        """A worker stops for a while, often just before it commits."""
        running = self.running()
        closing = [
            worker
            for worker in running
            if any(
                each.phase is Phase.SEALED or each.phase in CLOSING
                for lane in worker.lanes
                for each in lane.rules.both
            )
        ]
        if closing or (running and self.random.random() < 0.1):
            self.random.choice(closing or running).is_frozen = True

    def thaw(self) -> None:
        for worker in self.workers:
            worker.is_frozen = False

    def end_session(self) -> None:
        """The group takes a silent worker for dead."""
        for member, worker in list(self.group.members.items()):
            if not worker.runs and (self.is_healing or self.random.random() < 0.5):
                self.group.kick(member)

    def lose_seat(self) -> None:
        """The group takes a worker that runs for dead: its heartbeats were late, or lost. It hears of that
        later, and goes on meanwhile."""
        seated = [worker for worker in self.running() if worker.member in self.group.members]
        if seated:
            worker = self.random.choice(seated)
            self.lost_while[self.group.state_of(worker)] += 1
            self.group.kick(worker.member)

    def kill(self) -> None:
        if self.running():
            worker = self.random.choice(self.running())
            worker.is_alive = False
            self.forget_calls(worker)

    def time_out(self) -> None:
        """A coordinator gives up on a transaction."""
        if self.target.ids:
            self.target.time_out(self.random.choice(self._ids_that_end()))

    def steal(self) -> None:
        """A zombie, or a tool, begins a producer under an id that is in use."""
        if not self.target.ids:
            return
        name = self.random.choice(self._ids_that_end())
        for _ in range(2):
            transaction = self.target.ids[name].transaction
            for partition in sorted(transaction.unmarked) if transaction is not None else ():
                self.target.mark(name, partition)
            try:
                self.target.init(name)
                break
            except Refused:
                continue
        self.lose()

    def _ids_that_end(self) -> list[str]:
        ends = [
            producer.name
            for worker in self.running()
            for lane in worker.lanes
            for producer in lane.producers
            if producer.rules.is_unread or producer.rules.phase is Phase.ENDING
        ]
        return ends if ends and self.random.random() < 0.7 else sorted(self.target.ids)

    def time_out_abandoned(self) -> None:
        """Also what a zombie has opened under an id that is another worker's by now."""
        held = {
            (producer.name, producer.identity.producer_epoch)
            for worker in self.running()
            for lane in worker.lanes
            for producer in lane.producers
        }
        for name, known in sorted(self.target.ids.items()):
            if (name, known.epoch) not in held:
                self.target.time_out(name)

    # --- running and checking --------------------------------------------------------------------

    def run(self) -> None:
        calm: list[Callable[[], None]] = [self.work, self.serve, self.answer, self.mark, self.rebalance]
        often = [*calm * 6, self.serve, self.serve, self.answer, self.answer]
        rough = [*often, self.end_session]
        rare = [*[self.lose, self.freeze] * 3, self.kill, self.start, self.thaw, self.time_out, self.steal]
        rare.append(self.lose_seat)
        if self.capricious:
            calm.append(self.record_gap)
            often.append(self.record_gap)
            rare += [*[self.lose] * 3, self.forget_producers, self.refuse_more]
        for _ in range(self.random.randint(300, 900)):
            self.now_ms += self.random.randint(0, 3)
            self.random.choice(rare if self.random.random() < self.rare_share else rough)()
            self.check()
        self.is_healing = True
        self.thaw()
        if not self.running():
            self.start()
        for _ in range(1_500):
            self.now_ms += 10
            self.end_session()
            self.time_out_abandoned()
            for step in (*calm, self.serve, self.serve, self.answer, self.answer):
                step()
            self.check()
            if self.is_complete():
                self.check_end()
                return
        raise AssertionError("not delivered in the end")

    def is_complete(self) -> bool:
        positions = dict(self.target.log(POSITIONS).committed())
        return all(positions.get(partition, 0) >= end for partition, end in self.ends.items())

    def check_end(self) -> None:
        """All is there, and of what only a worker without a seat told a gap, all that no other told one of:
        whoever went on behind it has carried it."""
        for partition in PARTITIONS:
            seen = [offset for target in TARGETS for offset in self._seen(target, partition)]
            left_out = self.control[partition] | self.gaps[partition]
            wanted = [at for at in range(self.ends[partition]) if at not in left_out]
            assert seen == wanted, f"{partition}: {seen} in the end, not {wanted}"

    def _seen(self, target: TargetPartition, partition: SourcePartition) -> list[int]:
        return [offset for name, offset in self.target.log(target).committed() if name == partition]

    def check(self) -> None:
        for target in TARGETS:
            log = self.target.log(target)
            stable = log.last_stable_offset()
            if self.checked.get(target) == stable:
                continue
            self.checked[target] = stable
            seen = list(log.committed(stable))
            for partition in PARTITIONS:
                offsets = [offset for name, offset in seen if name == partition]
                maybe = self.told_unseated[partition] - self.gaps[partition] - set(offsets)
                left_out = self.control[partition] | self.gaps[partition] | maybe
                wanted = [at for at in range(self.ends[partition]) if at not in left_out]
                assert offsets == wanted[: len(offsets)], (
                    f"{partition}: {offsets} is not the start of {wanted}"
                )


def run(seed: int, broken: str = "", *, capricious: bool = False, merges: bool = False) -> History:
    history = History(seed, broken, capricious=capricious, merges=merges)
    try:
        history.run()
    except Exception as error:
        kind = f"broken={broken!r}, capricious={capricious}, merges={merges}"
        told = f"History(seed={seed}, {kind}) broke a rule: {error}"
        raise AssertionError(told) from error
    if not broken:
        histories.went_through("transactions")
    return history
