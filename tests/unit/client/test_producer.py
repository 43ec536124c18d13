"""The small producer: where keys go, and that a repeated batch is the same batch."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from aiokafka.partitioner import murmur2 as murmur2_of_aiokafka

from millrace.broker.client.producer import Producer, murmur2, partition_for_key
from millrace.broker.errors import OutOfOrderSequence, RecordTooLarge
from millrace.broker.protocol import hot_produce
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.frames import Api, RequestHead
from millrace.broker.protocol.records import read_records
from tests import seeds
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import response
from tests.waiting import patience


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed & 0xFFFFFFFF


def test_random_keys_hash_as_in_another_client() -> None:
    rng = random.Random(seeds.given())
    for _ in range(500):
        key = rng.randbytes(rng.randrange(40))
        assert murmur2(key) == murmur2_of_aiokafka(key) & 0xFFFFFFFF
        assert 0 <= partition_for_key(key, 7) < 7


class Log:
    """A produce handler that keeps batches and answers by a plan: an error code, or None for no answer
    and a closed connection; after the plan, success."""

    def __init__(self, plan: list[int | None]) -> None:
        self.plan = plan
        self.batches: list[bytes] = []
        self.producer_ids = 0

    def produce(self, head: RequestHead, request: hot_produce.ProduceRequest) -> bytes:
        answers = []
        for each in request.partitions:
            self.batches.append(bytes(each.records or b""))
            code = self.plan.pop(0) if self.plan else 0
            if code is None:
                raise ConnectionResetError
            answers.append(
                hot_produce.PartitionAnswer(each.topic, each.partition, code, 100 if not code else -1)
            )
        return hot_produce.encode_response(head.version, head.correlation_id, answers)

    def init_producer_id(self, head: RequestHead, request: Any) -> Any:
        self.producer_ids += 1
        return response(
            Api.INIT_PRODUCER_ID, head.version, error_code=0, producer_id=self.producer_ids, producer_epoch=0
        )

    def broker(self) -> FakeBroker:
        return FakeBroker({Api.PRODUCE: self.produce, Api.INIT_PRODUCER_ID: self.init_producer_id})


def test_lost_answer_is_repeated_with_the_very_same_bytes() -> None:
    async def main() -> None:
        log = Log([None, 6, 0])
        async with log.broker() as broker, cluster(broker.server.address) as ewr:
            async with Producer(ewr) as producer:
                futures = [
                    await producer.send("flights", key=b"k", value=b"%d" % number, timestamp_ms=number)
                    for number in range(3)
                ]
                acknowledged = await asyncio.gather(*futures)
            assert [each.offset for each in acknowledged] == [100, 101, 102]
        assert len(log.batches) == 3
        assert len(set(log.batches)) == 1
        assert [record.value for record in read_records(log.batches[0])] == [b"0", b"1", b"2"]

    asyncio.run(main())


def test_sequence_counts_records_through_batches() -> None:
    async def main() -> None:
        log = Log([])
        async with log.broker() as broker, cluster(broker.server.address) as ewr, Producer(ewr) as producer:
            for count in (2, 3, 1):
                for _ in range(count):
                    await producer.send("flights", key=None, value=b"v", partition=1)
                await producer.flush()
        headers = [parse_header(batch) for batch in log.batches]
        assert [header.base_sequence for header in headers] == [0, 2, 5]
        assert [header.producer_id for header in headers] == [1, 1, 1]

    asyncio.run(main())


def test_batch_known_to_be_written_counts_as_acknowledged() -> None:
    async def main() -> None:
        log = Log([46])
        async with log.broker() as broker, cluster(broker.server.address) as ewr, Producer(ewr) as producer:
            future = await producer.send("flights", key=b"k", value=b"v")
            assert (await future).offset == -1
        assert len(log.batches) == 1

    asyncio.run(main())


@pytest.mark.parametrize("refusal", [RecordTooLarge, OutOfOrderSequence])
def test_refused_batch_fails_its_records_and_the_next_has_a_new_producer_id(refusal: Any) -> None:
    async def main() -> None:
        log = Log([refusal.code])
        async with log.broker() as broker, cluster(broker.server.address) as ewr, Producer(ewr) as producer:
            refused = await producer.send("flights", key=None, value=b"v", partition=0)
            with pytest.raises(refusal, match="cluster ewr: flights-0: "):
                await refused
            accepted = await producer.send("flights", key=None, value=b"v", partition=0)
            assert (await accepted).offset == 100
        headers = [parse_header(batch) for batch in log.batches]
        assert [(header.producer_id, header.base_sequence) for header in headers] == [(1, 0), (2, 0)]

    asyncio.run(main())


def test_full_batch_goes_out_before_it_lingers() -> None:
    async def main() -> None:
        log = Log([])
        async with log.broker() as broker, cluster(broker.server.address) as ewr:
            async with Producer(ewr, linger_ms=3_600_000, batch_size=1000) as producer:
                first = await producer.send("flights", key=None, value=bytes(600), partition=0)
                second = await producer.send("flights", key=None, value=bytes(600), partition=0)
                assert (await asyncio.wait_for(first, patience())).partition == 0
                assert not second.done()
            assert second.done()

    asyncio.run(main())


def test_a_record_that_cannot_be_encoded_fails_and_holds_up_no_other() -> None:
    async def main() -> None:
        log = Log([])
        no_bytes: Any = "text"
        async with (
            asyncio.timeout(patience()),
            log.broker() as broker,
            cluster(broker.server.address) as ewr,
            Producer(ewr) as producer,
        ):
            wrong = await producer.send("flights", key=None, value=no_bytes, partition=0)
            with pytest.raises(TypeError):
                await wrong
            right = await producer.send("flights", key=None, value=b"v", partition=0)
            assert (await right).offset == 100

    asyncio.run(main())


def test_a_record_that_is_late_for_the_closing_is_refused() -> None:
    async def main() -> None:
        log = Log([])
        async with log.broker() as broker, cluster(broker.server.address) as ewr, asyncio.timeout(patience()):
            producer = Producer(ewr)
            late = asyncio.ensure_future(producer.send("flights", key=None, value=b"v"))
            await asyncio.sleep(0)  # it asks for the topic's partitions
            await producer.close()
            with pytest.raises(RuntimeError, match="closed"):
                await late

    asyncio.run(main())
