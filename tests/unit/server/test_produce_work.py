"""Requests that ask for much work: nobody else waits for it, it is bounded, and the order stays."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import InvalidRecord, InvalidRequest, InvalidTxnState, RecordTooLarge
from millrace.broker.protocol import hot_produce
from millrace.broker.protocol.batch import ATTRIBUTES_POSITION, HEADER_SIZE, parse_header, seal
from millrace.broker.protocol.compression import GZIP, ZSTD, compress
from millrace.broker.protocol.frames import decode_request
from millrace.broker.protocol.records import MAX_DECOMPRESSED_SIZE, Record, build_batch, read_records
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server import produce_work
from millrace.broker.server.handlers import produce
from millrace.broker.server.transactional_produce import TransactionalAppends
from millrace.broker.storage import batch_validation
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.segment import LogFile
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.gated_writes import GatedWrites
from tests.stored_batches import batches_of

VERSION = 9
PARTITIONS = 4
REQUEST_MAX_SIZE = 100 << 20
Batches = dict[tuple[str, int], Any]


class Gate:
    """Lets batches in while a transaction is open; whether it is may have to be asked elsewhere."""

    def __init__(self) -> None:
        self.must_ask = False
        self.answer = ErrorCode.none
        self.appended_count = 0

    def admit_now(self, _id: str, _producer: object, sequences: Any) -> Any:
        return None if self.must_ask else dict.fromkeys(sequences, self.answer)

    async def admit(self, _id: str, _producer: object, sequences: Any) -> Any:
        return dict.fromkeys(sequences, self.answer)

    def appended(self, *_: object) -> None:
        self.appended_count += 1


class Stage:
    """A broker with one topic, as far as the produce handler sees it."""

    def __init__(self, replicas: ReplicaManager) -> None:
        self.replicas = replicas
        self.gate = Gate()
        settings = SimpleNamespace(socket_request_max_bytes=REQUEST_MAX_SIZE)
        self.broker = SimpleNamespace(
            replica_manager=replicas,
            config=SimpleNamespace(settings=settings),
            metrics=BrokerMetrics(),
            quotas=SimpleNamespace(produce=SimpleNamespace(active=False)),
            metadata_cache=MetadataCache(),
            clock=SimpleNamespace(steady_ms=lambda: 5),
            transactional_appends=TransactionalAppends(self.gate),  # type: ignore[arg-type]
        )

    def ask(self, batches: Batches, transactional_id: str | None = None, *, until_done: bool = False) -> Any:
        """What the handler gives; the frame is overwritten at once, as a connection's buffer is, unless it
        stays `until_done`."""
        request = b"".join(
            hot_produce.encode_request(
                VERSION, 1, "raw", batches, acks=1, timeout_ms=1000, transactional_id=transactional_id
            )
        )
        return self.ask_frame(request, until_done=until_done)

    def ask_frame(self, request: bytes, *, until_done: bool = False) -> Any:
        buffer = bytearray(request)
        frame = memoryview(buffer)[4:]
        head, position = decode_request(frame)
        context: Any = SimpleNamespace(broker=self.broker, head=head, client_address="")
        answer = produce.handle_frame(head, frame, position, context)
        if not until_done:
            buffer[:] = bytes(len(buffer))
        return answer

    async def codes(self, answer: Any) -> list[int]:
        while not isinstance(answer, bytes | bytearray):
            answer = await answer
        answers, _ = hot_produce.decode_response(memoryview(answer)[4:], VERSION)
        return [each.error_code for each in answers]

    def values(self, partition: int = 0) -> list[bytes | None]:
        log = self.replicas.leader_of("t", partition).log
        return [record.value for batch in batches_of(log) for record in read_records(batch)]


def run(tmp_path: Path, scenario: Callable[[Stage], Awaitable[None]], **settings: str) -> None:
    async def main() -> None:
        logs = LogManager([tmp_path], LogConfig())
        logs.start(0)
        replicas = ReplicaManager(
            1,
            logs,
            LogConfig(),
            clock_ms=lambda: 1_000,
            is_known=lambda *_: False,
            metrics=BrokerMetrics(),
        )
        try:
            states = {number: PartitionState(1, 0, (1,), 1) for number in range(PARTITIONS)}
            await replicas.hosted.apply_topic("t", uuid.UUID(int=7), states, settings)
            await scenario(Stage(replicas))
        finally:
            replicas.close()
            logs.close(0)

    asyncio.run(main())


def bomb(size: int = MAX_DECOMPRESSED_SIZE) -> bytearray:
    """A sealed batch whose records are nothing but zeros when they are decompressed."""
    batch = build_batch([Record(b"k", b"v", (), 1)])[:HEADER_SIZE]
    batch += compress(ZSTD, bytes(size))
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    batch[ATTRIBUTES_POSITION + 1] = ZSTD
    seal(batch)
    return batch


def good(*values: bytes, compression: int = ZSTD, **header: Any) -> bytearray:
    return build_batch([Record(b"k", value, (), 1) for value in values], compression=compression, **header)


LARGE = bytes(produce_work.PLAIN_AT_ONCE + 1)


@pytest.fixture
def off_loop() -> list[int]:
    """How many bytes each decompression on other threads was allowed to give."""
    return []


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch, off_loop: list[int]) -> list[int]:
    """The same on the event loop's thread."""
    amounts: list[int] = []
    loop_thread = threading.get_ident()
    plain = batch_validation.decompress

    def noting(codec: int, section: Any, max_size: int) -> Any:
        (amounts if threading.get_ident() == loop_thread else off_loop).append(max_size)
        return plain(codec, section, max_size)

    monkeypatch.setattr(batch_validation, "decompress", noting)
    return amounts


def test_bombs_are_looked_into_on_a_thread_and_no_further_than_a_request_may_hold(
    tmp_path: Path, on_loop: list[int], off_loop: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_work, "PLAUSIBLE_RATIO", 1)

    async def scenario(stage: Stage) -> None:
        answer = stage.ask({("t", number): bomb() for number in range(PARTITIONS)})
        assert sum(on_loop) <= produce_work.PLAIN_AT_ONCE
        fits = REQUEST_MAX_SIZE // MAX_DECOMPRESSED_SIZE
        codes = [InvalidRecord.code] * fits + [RecordTooLarge.code] * (PARTITIONS - fits)
        assert await stage.codes(answer) == codes
        assert sum(off_loop) <= REQUEST_MAX_SIZE
        assert sum(on_loop) <= produce_work.PLAIN_AT_ONCE

    run(tmp_path, scenario)


def test_request_of_many_compressed_bytes_is_checked_on_a_thread(tmp_path: Path, on_loop: list[int]) -> None:
    """Streams without content cost time by their number."""

    async def scenario(stage: Stage) -> None:
        empty = compress(GZIP, b"") * (produce_work.COMPRESSED_AT_ONCE // 20 + 1)
        batch = good(b"v", compression=GZIP)
        batch += empty
        batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
        seal(batch)
        assert await stage.codes(stage.ask({("t", 0): batch})) == [0]
        assert on_loop == []
        assert stage.values() == [b"v"]

    run(tmp_path, scenario)


def test_what_takes_long_is_appended_in_order_and_whole(tmp_path: Path) -> None:
    """The batches after the one that is too much for one go, from memory of their own."""

    async def scenario(stage: Stage) -> None:
        batches = {
            ("t", 0): good(b"before"),
            ("t", 1): good(LARGE),
            ("t", 2): good(b"after"),
            ("t", 3): bomb(64),
        }
        assert await stage.codes(stage.ask(batches)) == [0, 0, 0, InvalidRecord.code]
        assert [stage.values(number) for number in range(PARTITIONS)] == [
            [b"before"],
            [LARGE],
            [b"after"],
            [],
        ]

    run(tmp_path, scenario, **{"max.message.bytes": str(1 << 24)})


@pytest.mark.parametrize("transactional_id", [None, "orders"])
def test_batches_of_a_large_frame_are_appended_from_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactional_id: str | None
) -> None:
    """A hundred megabytes of them, copied, would hold up everyone; the connection leaves them alone until the
    coroutine has ended."""
    monkeypatch.setattr(produce, "KEPT_FRAME_SIZE", produce_work.SIZE_AT_ONCE)
    monkeypatch.setattr(produce, "copied", lambda _partitions: pytest.fail("they were copied"))
    value = bytes(produce_work.SIZE_AT_ONCE // PARTITIONS)
    header = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}

    async def scenario(stage: Stage) -> None:
        batches = {
            ("t", number): good(value, compression=0, **(header if transactional_id else {}))
            for number in range(PARTITIONS)
        }
        answer = stage.ask(batches, transactional_id, until_done=True)
        assert asyncio.iscoroutine(answer)
        assert await stage.codes(answer) == [0] * PARTITIONS
        assert [stage.values(number) for number in range(PARTITIONS)] == [[value]] * PARTITIONS

    run(tmp_path, scenario, **{"max.message.bytes": str(1 << 24)})


def test_very_many_batches_are_appended_with_others_turns_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_work, "BATCHES_AT_ONCE", 2)
    monkeypatch.setattr("millrace.broker.replication.off_loop.TURN_SECONDS", -1.0)

    async def scenario(stage: Stage) -> None:
        ended: list[int] = []

        async def another() -> None:
            while not ended:
                turns.append([len(stage.values(number)) for number in range(PARTITIONS)])
                await asyncio.sleep(0)

        turns: list[list[int]] = []
        beside = asyncio.ensure_future(another())
        answer = stage.ask({("t", number): good(b"v", compression=0) for number in range(PARTITIONS)})
        assert [len(stage.values(number)) for number in range(PARTITIONS)] == [1, 1, 0, 0]
        assert await stage.codes(answer) == [0] * PARTITIONS
        ended.append(1)
        await beside
        assert [1, 1, 1, 0] in turns

    run(tmp_path, scenario)


def test_a_closed_file_is_opened_where_the_disk_may_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions rest when nobody uses them; the first batch after that, on a slow disk, keeps nobody else
    waiting."""
    on_loop: list[bool] = []
    opened = LogFile._opened

    def opening(file: LogFile) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return opened(file)

    monkeypatch.setattr(LogFile, "_opened", opening)

    async def scenario(stage: Stage) -> None:
        before = stage.ask({("t", number): good(b"before", compression=0) for number in (0, 1)})
        assert await stage.codes(before) == [0, 0]
        resting = stage.replicas.leader_of("t", 0).log
        for _ in range(2):
            resting.rest(1_000)
        assert resting.is_at_rest
        answer = stage.ask({("t", number): good(b"after", compression=0) for number in (1, 0)})
        assert stage.values(1) == [b"before", b"after"]
        assert await stage.codes(answer) == [0, 0]
        assert on_loop == [False]
        assert stage.values() == [b"before", b"after"]

    run(tmp_path, scenario)


def test_recompression_is_work_too(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        value = bytes(produce_work.PLAIN_AT_ONCE // batch_validation.COMPRESSING_COST)
        little, much = good(b"v", compression=0), good(value, compression=0)
        assert not asyncio.iscoroutine(stage.ask({("t", 0): little}))
        answer = stage.ask({("t", 0): much})
        assert asyncio.iscoroutine(answer)
        assert await stage.codes(answer) == [0]
        (_, batch) = batches_of(stage.replicas.leader_of("t", 0).log)
        assert parse_header(batch).compression == GZIP

    run(tmp_path, scenario, **{"compression.type": "gzip"})


def test_a_batch_checked_before_has_the_time_of_its_append(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        log = stage.replicas.leader_of("t", 0).log
        batch = memoryview(good(b"v"))
        (checked,) = await stage.replicas.slow_appends.check([("t", 0, batch)], produce_work.budget_at_once())
        assert checked is not None and not isinstance(checked, Exception)
        log.append(batch, leader_epoch=0, now_ms=7_000, checked=checked)
        (record,) = [record for stored in batches_of(log) for record in read_records(stored)]
        assert record.timestamp_ms == 7_000

    run(tmp_path, scenario, **{"message.timestamp.type": "LogAppendTime"})


@pytest.mark.parametrize("transactional_id", [None, "orders"])
def test_large_batches_are_written_on_a_thread_and_others_are_served_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactional_id: str | None
) -> None:
    """A batch behind one to the same partition comes behind it in the log, too; others wait for nothing."""
    large = bytes(produce_work.SIZE_AT_ONCE + 1)
    gated = GatedWrites(monkeypatch, len(large))
    header = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}

    async def scenario(stage: Stage) -> None:
        producer = header if transactional_id else {}
        batches = {
            ("t", 0): good(large, compression=0, **producer),
            ("t", 1): good(b"behind it in the request", compression=0, **producer),
        }
        first = asyncio.ensure_future(stage.codes(stage.ask(batches, transactional_id, until_done=True)))
        await gated.one_has_begun()
        second = asyncio.ensure_future(stage.codes(stage.ask({("t", 0): good(b"after", compression=0)})))
        beside = stage.ask({("t", number): good(b"beside", compression=0) for number in (2, 3)})
        assert await stage.codes(beside) == [0, 0]
        assert stage.values(1) == []
        assert not first.done()
        assert not second.done()
        gated.may_go_on.set()
        assert (await first, await second) == ([0, 0], [0])
        assert stage.values() == [large, b"after"]
        assert stage.values(1) == [b"behind it in the request"]

    run(tmp_path, scenario, **{"max.message.bytes": str(1 << 26)})


def test_another_transaction_that_ends_while_a_large_batch_is_written_is_asked_about_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small batch that has to wait behind a large one was let in before."""
    large = bytes(produce_work.SIZE_AT_ONCE + 1)
    gated = GatedWrites(monkeypatch, len(large))
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}

    async def scenario(stage: Stage) -> None:
        first = asyncio.ensure_future(
            stage.codes(stage.ask({("t", 0): good(large, compression=0)}, until_done=True))
        )
        await gated.one_has_begun()
        second = asyncio.ensure_future(stage.codes(stage.ask({("t", 0): good(b"v", **producer)}, "orders")))
        for _ in range(50):
            await asyncio.sleep(0)
        stage.gate.answer = ErrorCode.invalid_txn_state
        gated.may_go_on.set()
        assert await first == [0]
        assert await second == [InvalidTxnState.code]
        assert stage.values() == [large]

    run(tmp_path, scenario, **{"max.message.bytes": str(1 << 26)})


@pytest.mark.parametrize("must_ask", [False, True])
def test_transactions_are_asked_about_after_what_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, must_ask: bool
) -> None:
    """Between the answer and the append, a transaction could end."""

    async def scenario(stage: Stage) -> None:
        producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
        stage.gate.must_ask = must_ask
        check = stage.replicas.slow_appends.check

        async def checked_while_it_ends(*arguments: Any) -> Any:
            found = await check(*arguments)
            stage.gate.answer = ErrorCode.invalid_txn_state
            return found

        monkeypatch.setattr(stage.replicas.slow_appends, "check", checked_while_it_ends)
        answer = stage.ask({("t", 0): good(b"v", **producer), ("t", 1): good(LARGE, **producer)}, "orders")
        first = InvalidTxnState.code if must_ask else 0
        assert await stage.codes(answer) == [first, InvalidTxnState.code]
        assert stage.gate.appended_count == (0 if must_ask else 1)
        assert stage.values(1) == []

    run(tmp_path, scenario, **{"max.message.bytes": str(1 << 24)})


def test_a_partition_that_stands_twice_in_a_request_is_refused(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        batches = {("t", number): good(b"v") for number in range(2)}
        request = bytearray(
            b"".join(hot_produce.encode_request(VERSION, 1, "raw", batches, acks=1, timeout_ms=1000))
        )
        size = len(batches["t", 1])
        at = request.rindex(batches["t", 1]) - (2 if size > 126 else 1) - 1
        assert request[at] == 1
        request[at] = 0
        assert await stage.codes(stage.ask_frame(bytes(request))) == [InvalidRequest.code] * 2
        assert stage.values() == []

    run(tmp_path, scenario)
