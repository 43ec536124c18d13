"""Whose an open transaction is, as far as the brokers say: silence of one is not an answer of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.open_transactions import OpenTransaction, open_transactions
from millrace.broker.errors import ProtocolError
from millrace.broker.protocol.frames import Api, RequestHead
from tests.servers import free_port
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import nested, response

PRODUCER_ID = 77
START_OFFSET = 1234


class Brokers:
    """Two of them; broker 1 leads `topic`, where a transaction is open. `states` and `codes` are what each
    one says of it as a coordinator."""

    def __init__(self, topic: str = "flights") -> None:
        self.topic = topic
        self.states: dict[int, Mapping[str, str]] = {1: {}, 2: {}}
        self.codes = {1: 0, 2: 0}
        self.is_away = False
        self.says_nothing = False
        self.brokers = {node_id: self._broker(node_id) for node_id in (1, 2)}

    def _broker(self, node_id: int) -> FakeBroker:
        return FakeBroker(
            {
                Api.DESCRIBE_PRODUCERS: self.producers,
                Api.LIST_TRANSACTIONS: lambda head, request: self.transactions(head, node_id),
            }
        )

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Cluster]:
        one, two = self.brokers.values()
        async with one, two, cluster(one.server.address, request_timeout_ms=20_000) as ewr:
            ports = {1: one.server.port, 2: free_port() if self.is_away else two.server.port}
            one.brokers = two.brokers = ports
            one.topics = two.topics = {self.topic: {0: 1}}
            yield ewr

    def producers(self, head: RequestHead, request: Any) -> Any:
        if self.says_nothing:
            return response(Api.DESCRIBE_PRODUCERS, head.version, topics=())

        def part(class_name: str, **values: Any) -> Any:
            return nested(Api.DESCRIBE_PRODUCERS, head.version, class_name, **values)

        state = part(
            "ProducerState",
            producer_id=PRODUCER_ID,
            producer_epoch=0,
            last_timestamp=0,
            coordinator_epoch=0,
            current_txn_start_offset=START_OFFSET,
        )
        partition = part(
            "PartitionResponse",
            partition_index=0,
            error_code=0,
            error_message=None,
            active_producers=(state,),
        )
        topic = part("TopicResponse", name=self.topic, partitions=(partition,))
        return response(Api.DESCRIBE_PRODUCERS, head.version, topics=(topic,))

    def transactions(self, head: RequestHead, node_id: int) -> Any:
        states = tuple(
            nested(
                Api.LIST_TRANSACTIONS,
                head.version,
                "TransactionState",
                transactional_id=transactional_id,
                producer_id=PRODUCER_ID,
                transaction_state=state,
            )
            for transactional_id, state in self.states[node_id].items()
        )
        return response(
            Api.LIST_TRANSACTIONS,
            head.version,
            error_code=self.codes[node_id],
            unknown_state_filters=(),
            transaction_states=states,
        )


def found(brokers: Brokers) -> OpenTransaction:
    async def main() -> OpenTransaction:
        async with brokers.serve() as ewr:
            (only,) = await open_transactions(ewr, brokers.topic, 0)
            return only

    return asyncio.run(main())


@pytest.mark.parametrize(("is_away", "code"), [(True, 0), (False, 14), (False, 15)])
def test_broker_that_did_not_say_is_named(is_away: bool, code: int) -> None:
    brokers = Brokers()
    brokers.is_away, brokers.codes[2] = is_away, code
    only = found(brokers)
    assert (only.transactional_id, only.silent, only.leader) == (None, (2,), 1)
    assert str(only) == "from offset 1234 of producer 77 (broker 2 did not say whose it is)"


def test_what_no_broker_shows_is_said_to_be_shown_by_none_once_all_have_answered() -> None:
    only = found(Brokers())
    assert (only.transactional_id, only.silent, only.is_in_hand) == (None, (), False)
    assert str(only) == "from offset 1234 of producer 77 (no coordinator shows whose it is)"


@pytest.mark.parametrize(
    ("state", "is_in_hand"), [("Ongoing", True), ("PrepareCommit", True), ("CompleteCommit", False)]
)
def test_transaction_is_named_by_its_coordinator_whatever_the_others_say(
    state: str, is_in_hand: bool
) -> None:
    brokers = Brokers()
    brokers.codes[1], brokers.states[2] = 14, {"orders": state}
    only = found(brokers)
    assert (only.transactional_id, only.state, only.silent) == ("orders", state, ())
    assert only.is_in_hand is is_in_hand
    assert str(only) == f"from offset 1234 of orders ({state})"


def test_broker_that_has_come_since_is_asked_too() -> None:
    async def main() -> None:
        brokers = Brokers()
        async with brokers.serve() as ewr:
            one = brokers.brokers[1]
            both, one.brokers = one.brokers, {1: one.server.port}
            await ewr.metadata(["flights"])
            one.brokers, brokers.states[2] = both, {"orders": "PrepareCommit"}
            (only,) = await open_transactions(ewr, "flights", 0)
            assert only.transactional_id == "orders"

    asyncio.run(main())


def test_answer_about_nothing_breaks_the_protocol() -> None:
    brokers = Brokers()
    brokers.says_nothing = True
    with pytest.raises(ProtocolError, match="broker 1 says nothing of the producers of flights-0"):
        found(brokers)
