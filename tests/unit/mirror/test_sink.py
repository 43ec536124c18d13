"""What the sink must not send any more once its transaction is aborted, and what it tells of a target that
takes nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.errors import NotEnoughReplicas, OutOfOrderSequence, RecordTooLarge
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery import sink as sink_module
from millrace.mirror.delivery.lane import Identity, Outcome
from millrace.mirror.delivery.outgoing import Outgoing
from millrace.mirror.delivery.progress import Span
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.pipeline_stage import Around, answer, at, batch, pipeline_of
from tests.waiting import until_async

TARGET = TargetPartition("t", 0)
HOUR_MS = 3_600_000


def make_sink() -> Sink:
    async def metadata(*_: object, **__: object) -> Any:
        return SimpleNamespace(leader=lambda *_: 1)

    cluster: Any = SimpleNamespace(metadata=metadata, close_purpose=lambda _: None)
    filling = SimpleNamespace(lets=lambda _: True, only_again=False, sent=lambda *_: None)
    alternation: Any = SimpleNamespace(filling=filling)
    sink = Sink(cluster, lambda: 0, alternation=alternation, transactional_id="m.0", wake=lambda: None)
    sink.renew(Identity(7, 0))
    return sink


def outgoing() -> Outgoing:
    batch = memoryview(build_batch([Record(b"k", b"v", (), 1)]))
    return Outgoing(batch, [0], Span(0, 1, 1, len(batch), -1), SimpleNamespace(), 0, "seen")  # type: ignore[arg-type]


def test_batch_whose_transaction_was_aborted_before_it_left_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[object] = []

    async def produce(_cluster: object, _node: int, batches: dict[Any, Any], **_: object) -> Any:
        sent.append(batches)
        return dict.fromkeys(batches, ProduceOutcome(0, 0))

    monkeypatch.setattr(sink_module, "produce", produce)

    async def scenario() -> None:
        sink = make_sink()
        running = asyncio.create_task(sink.run())
        sink.enqueue(TARGET, outgoing())
        # In each turn: the request is built, its task has not run yet.
        await until_async(lambda: sink._tasks, every_s=0)
        sink.reset()
        await until_async(lambda: not sink._tasks)
        assert not running.done(), "the worker ended"
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())
    assert sent == []


def test_leader_is_silent_while_it_answers_nothing_that_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests are under way; asked about is another partition of that leader, and one of no leader."""
    answers: list[asyncio.Future[Any]] = []

    async def produce(_cluster: object, _node: int, batches: dict[Any, Any], **_: object) -> Any:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    monkeypatch.setattr(sink_module, "produce", produce)

    async def scenario() -> None:
        now_ms = 1_000
        sink = make_sink()
        sink._steady_ms = lambda: now_ms
        other, unknown = TargetPartition("t", 1), TargetPartition("t", 2)
        sink._leaders = {TARGET: 1, other: 1}
        assert sink.silent_ms(other, 9_000) == 0, "it owes nothing"
        for target in (TARGET, other):
            sink.enqueue(target, outgoing())
            await until_async(lambda target=target: sink._lane(target).in_flight, every_s=0)  # type: ignore[misc]
            now_ms += 1_000
        await until_async(lambda: len(answers) == 2, every_s=0)
        assert (sink.silent_ms(other, 4_000), sink.silent_ms(unknown, 4_000)) == (3_000, 0)
        answers[0].set_exception(TimeoutError())
        await until_async(lambda: not sink._lane(TARGET).in_flight, every_s=0)
        assert sink.silent_ms(other, 4_000) == 3_000, "that was no answer"
        answers[1].set_exception(TimeoutError())
        await until_async(lambda: not sink._lane(other).in_flight, every_s=0)
        assert sink.silent_ms(other, 4_000) == 0, "it owes nothing any more"
        sink.reset()

    asyncio.run(scenario())


def test_leader_that_answers_anything_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def produce(_cluster: object, _node: int, batches: dict[Any, Any], **_: object) -> Any:
        if TARGET in batches:
            return dict.fromkeys(batches, ProduceOutcome(NotEnoughReplicas.code))
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(sink_module, "produce", produce)

    async def scenario() -> None:
        now_ms, other = 1_000, TargetPartition("t", 1)
        sink = make_sink()
        sink._steady_ms = lambda: now_ms
        sink._leaders = {TARGET: 1, other: 1}
        sink.enqueue(other, outgoing())
        await until_async(lambda: sink._lane(other).in_flight, every_s=0)
        now_ms = 3_000
        sink.enqueue(TARGET, outgoing())
        await until_async(lambda: sink.retry_count, every_s=0)
        assert sink.silent_ms(other, 3_500) == 500
        sink.reset()
        for task in list(sink._tasks):
            task.cancel()

    asyncio.run(scenario())


def test_nothing_goes_out_behind_a_batch_that_was_refused_when_its_partition_was_given_up() -> None:
    """Its next owner may stop at the refused one, and have it taken after all: what was on its way behind it
    would stand before it."""

    async def scenario() -> None:
        sink = make_sink()
        sink._alternation = None
        pipeline = pipeline_of(SourcePartition("ewr", "t", 0), TARGET, sink, Around())
        pipeline.ready(at(0))
        sent: list[Outgoing] = []
        for number in range(3):
            pipeline.accept(answer(batch(number, [5])))
            item = sink._lane(TARGET).next_to_send(0)
            assert item is not None
            sent.append(item)
            if not number:
                sink._answered(TARGET, item, ProduceOutcome(0, 0), 0, 0)
        pipeline.close()
        sink._answered(TARGET, sent[1], ProduceOutcome(RecordTooLarge.code), 0, 0)
        sink._answered(TARGET, sent[2], ProduceOutcome(OutOfOrderSequence.code), 0, 0)
        assert sink.queued_count == 0

    asyncio.run(scenario())


def test_what_is_on_its_way_behind_a_refused_batch_is_not_settled() -> None:
    """It may never be answered, and its row waits for the answer."""

    async def scenario() -> None:
        sink = make_sink()
        for _ in range(3):
            sink.enqueue(TARGET, outgoing())
        row = sink._lane(TARGET)
        first = row.next_to_send(0)
        assert first is not None
        row.answered(first, Outcome.ACKNOWLEDGED, 0)
        assert sink.unsettled_targets() == set()
        second, third = row.next_to_send(0), row.next_to_send(0)
        assert second is not None and third is not None
        row.answered(second, Outcome.REFUSED, 0)
        assert sink.unsettled_targets() == {TARGET}
        row.answered(third, Outcome.OUT_OF_ORDER, 0)
        assert sink.unsettled_targets() == set()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("timestamp_ms", "is_transactional", "is_replayed"),
    [
        (-1, False, True),
        (1, False, True),
        (HOUR_MS, False, False),
        (1, True, False),
    ],
)
def test_batch_is_replayed_by_its_newest_timestamp_where_no_transaction_keeps_its_producer(
    timestamp_ms: int, is_transactional: bool, is_replayed: bool
) -> None:
    async def scenario() -> None:
        sink = make_sink()
        sink._now_ms, sink.replayed_after_ms = lambda: 2 * HOUR_MS, HOUR_MS
        if not is_transactional:
            sink._alternation = None
        batch = memoryview(build_batch([Record(b"k", b"v", (), timestamp_ms)]))
        span = Span(0, 1, 1, len(batch), -1)
        sink.enqueue(TARGET, Outgoing(batch, [0], span, SimpleNamespace(), 0, "seen"))  # type: ignore[arg-type]
        sink._leaders[TARGET] = 1
        sink._pump()
        assert [item.is_replayed for item in sink._lane(TARGET)._row] == [is_replayed]
        for task in sink._tasks:
            task.cancel()

    asyncio.run(scenario())


def test_rows_that_rest_are_looked_at_again_when_the_first_of_them_may_go_on() -> None:
    """Nothing else would wake the sink: what fails is answered, and nothing is under way."""

    async def scenario() -> None:
        sink = make_sink()
        sink._steady_ms = lambda: 5_000
        resting = {
            TargetPartition("flights", number): at_ms for number, at_ms in enumerate((7_000, 9_000, 4_000))
        }
        for target, at_ms in resting.items():
            sink.enqueue(target, outgoing())
            sink._lane(target).needs_identity = True
            sink._lane(target).retry_at_ms = at_ms
            sink._leaders[target] = 1
        sink._pump()
        assert sink._retry_handle is not None
        left_s = sink._retry_handle.when() - asyncio.get_running_loop().time()
        assert 1.9 < left_s < 2.1
        for target in resting:
            sink._lane(target).retry_at_ms = 0
        sink._pump()
        assert sink._retry_handle is None, "nothing rests any more"

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["no leader", "no answer"])
def test_target_partition_that_takes_nothing_is_told_until_it_does(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is refused, so no error would say why records stand still."""
    leader: int | None = None if what == "no leader" else 1
    is_silent = what == "no answer"
    delivered: list[int] = []

    async def metadata(*_: object, **__: object) -> Any:
        return SimpleNamespace(leader=lambda *_: leader)

    async def init_producer_id(*_: object) -> tuple[int, int]:
        return 7, 0

    async def produce(_cluster: object, _node: int, batches: dict[Any, Any], **_: object) -> Any:
        if is_silent:
            raise TimeoutError
        return dict.fromkeys(batches, ProduceOutcome(0, 0))

    monkeypatch.setattr(sink_module, "init_producer_id", init_producer_id)
    monkeypatch.setattr(sink_module, "produce", produce)
    monkeypatch.setattr(sink_module, "METADATA_BACKOFF_MS", 1)

    async def scenario() -> None:
        nonlocal leader, is_silent
        cluster: Any = SimpleNamespace(metadata=metadata, close_purpose=lambda _: None)
        sink = Sink(cluster, lambda: 5_000)
        running = asyncio.create_task(sink.run())
        batch = outgoing()
        batch.owner = SimpleNamespace(delivered=lambda _, base, *__: delivered.append(base))  # type: ignore[assignment]
        sink.enqueue(TARGET, batch)
        await until_async(lambda: list(sink.failures))
        ((told, failure),) = sink.failures
        assert (told, failure.since_ms, what.split()[1] in failure.reason) == (TARGET, 5_000, True)
        leader, is_silent = 1, False
        await until_async(lambda: delivered)
        assert list(sink.failures) == []
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(scenario())
