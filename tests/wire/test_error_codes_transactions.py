"""The transaction protocol step by step, without a client library in between: its codes and its states."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kafka import KafkaAdminClient

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from tests.raw_client import RawClient, batch_of
from tests.wire.foreign_clients import error_name, wait_until

pytestmark = pytest.mark.usefixtures("coordinators")

WAKING = {"COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR"}
UNDER_WAY = {"CONCURRENT_TRANSACTIONS"}


class Transaction:
    """A producer with a transactional id that speaks the protocol itself (KIP-98's first version)."""

    def __init__(self, raw: RawClient, transactional_id: str, timeout_ms: int = 60_000) -> None:
        self.raw = raw
        self.id = transactional_id
        self.producer_id, self.epoch = -1, -1
        self.sequences: dict[tuple[str, int], int] = {}
        assert self.init(timeout_ms) == "NONE"

    def init(self, timeout_ms: int = 60_000, *, producer_id: int = -1, epoch: int = -1) -> str:
        code, answer = asked_until_settled(
            lambda: self.raw.ask(
                Api.INIT_PRODUCER_ID,
                4,
                transactional_id=self.id,
                transaction_timeout=timeout_ms,
                producer_id=producer_id,
                producer_epoch=epoch,
            )
        )
        if code == "NONE":
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.sequences.clear()
        return code

    def add(self, *places: tuple[str, int], epoch: int | None = None, producer_id: int | None = None) -> Any:
        """The codes of every partition, in the order of `places`."""
        topics: dict[str, list[int]] = {}
        for topic, partition in places:
            topics.setdefault(topic, []).append(partition)

        def ask() -> Any:
            return self.raw.ask(
                Api.ADD_PARTITIONS_TO_TXN,
                3,
                v3_and_below_transactional_id=self.id,
                v3_and_below_producer_id=self.producer_id if producer_id is None else producer_id,
                v3_and_below_producer_epoch=self.epoch if epoch is None else epoch,
                v3_and_below_topics=[{"name": name, "partitions": parts} for name, parts in topics.items()],
            )

        codes: dict[tuple[str, int], str] = {}

        def settled() -> bool:
            for topic in ask().results_by_topic_v3_and_below:
                for found in topic.results_by_partition:
                    codes[topic.name, found.partition_index] = error_name(found.partition_error_code)
            return not set(codes.values()) & (WAKING | UNDER_WAY)

        wait_until(settled, "partitions added")
        return [codes[place] for place in places]

    def send(self, topic: str, *values: bytes, partition: int = 0, version: int = 9) -> tuple[str, int]:
        place = (topic, partition)
        batch = batch_of(
            *values,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequences.get(place, 0),
            transactional=True,
            # As markers have the time of now: much older records would be in an older segment than these.
            timestamp_ms=int(time.time() * 1000),
        )
        (answer,) = self.raw.produce({place: batch}, acks=-1, transactional_id=self.id, version=version)
        if answer.error_code == 0:
            self.sequences[place] = self.sequences.get(place, 0) + len(values)
        return error_name(answer.error_code), answer.base_offset

    def end(self, *, committed: bool, epoch: int | None = None, producer_id: int | None = None) -> str:
        code, _ = asked_until_settled(
            lambda: self.raw.ask(
                Api.END_TXN,
                3,
                transactional_id=self.id,
                producer_id=self.producer_id if producer_id is None else producer_id,
                producer_epoch=self.epoch if epoch is None else epoch,
                committed=committed,
            )
        )
        return code


def asked_until_settled(ask: Any) -> tuple[str, Any]:
    """The first answer that is about the request, not about a coordinator that has other things to do."""
    answers: list[Any] = []

    def settled() -> bool:
        answers.append(ask())
        return error_name(answers[-1].error_code) not in WAKING | UNDER_WAY

    wait_until(settled, "the coordinator")
    return error_name(answers[-1].error_code), answers[-1]


@pytest.fixture
def begin(raw, fresh_name):
    return lambda **options: Transaction(raw, fresh_name("transactional"), **options)


@pytest.fixture
def state(server) -> Any:
    """`state(transaction)`: its state, when it began and what is in it; a start of -1 is too much for kio."""
    admin = KafkaAdminClient(bootstrap_servers=server.bootstrap)

    def describe(transaction: Transaction) -> tuple[str, bool, set[tuple[str, int]]]:
        shown = admin.describe_transactions([transaction.id])[transaction.id]
        assert (shown.producer_id, shown.producer_epoch) == (transaction.producer_id, transaction.epoch)
        assert shown.transaction_timeout_ms == 60_000
        places = {(place.topic, place.partition) for place in shown.topic_partitions}
        return shown.state.value, shown.transaction_start_time_ms > 0, places

    yield describe
    admin.close()


def last_stable(raw: RawClient, topic: str, partition: int = 0) -> tuple[int, int]:
    (given,) = raw.fetch(PartitionFetch(topic, partition, 0, 1), read_committed=True).partitions
    return given.last_stable_offset, given.high_watermark


def test_identities_are_given_and_taken_over(raw, fresh_name, begin):
    first = begin()
    before = first.producer_id, first.epoch
    again = Transaction(raw, first.id)
    assert (again.producer_id, again.epoch) == (before[0], before[1] + 1), "the same producer, one epoch on"
    other = begin()
    assert other.producer_id != first.producer_id
    # A producer may raise its own epoch; one that is behind may not.
    assert again.init(producer_id=again.producer_id, epoch=again.epoch) == "NONE"
    assert again.epoch == before[1] + 2
    codes = {
        "behind": first.init(producer_id=before[0], epoch=before[1]),
        "another's": again.init(producer_id=other.producer_id, epoch=0),
        "timeout too long": again.init(timeout_ms=900_001),
        "no timeout": again.init(timeout_ms=0),
        "negative timeout": again.init(timeout_ms=-1),
    }
    codes["empty id"] = error_name(
        raw.ask(
            Api.INIT_PRODUCER_ID,
            4,
            transactional_id="",
            transaction_timeout=1_000,
            producer_id=-1,
            producer_epoch=-1,
        ).error_code
    )
    assert codes == {
        "behind": "PRODUCER_FENCED",
        "another's": "PRODUCER_FENCED",
        "timeout too long": "INVALID_TRANSACTION_TIMEOUT",
        "no timeout": "INVALID_TRANSACTION_TIMEOUT",
        "negative timeout": "INVALID_TRANSACTION_TIMEOUT",
        "empty id": "INVALID_REQUEST",
    }


def test_states_of_a_transaction_from_begin_to_end(raw, new_topic, begin, state):
    topic, transaction = new_topic(partitions=2), begin()
    assert state(transaction) == ("Empty", False, set())
    assert transaction.add((topic, 0), (topic, 1)) == ["NONE", "NONE"]
    assert state(transaction) == ("Ongoing", True, {(topic, 0), (topic, 1)})
    assert transaction.add((topic, 1)) == ["NONE"], "adding twice does no harm"
    assert transaction.send(topic, b"a", b"b") == ("NONE", 0)
    assert last_stable(raw, topic) == (0, 2)
    assert transaction.end(committed=True) == "NONE"
    wait_until(lambda: state(transaction)[0] == "CompleteCommit", "the markers are written")
    assert state(transaction) == ("CompleteCommit", True, set())
    assert last_stable(raw, topic) == (3, 3)
    assert last_stable(raw, topic, 1) == (1, 1), "a marker also where nothing was written"
    assert transaction.end(committed=True) == "NONE", "a commit that is sent again"
    assert transaction.end(committed=False) == "INVALID_TXN_STATE"
    assert transaction.add((topic, 0)) == ["NONE"]
    assert transaction.send(topic, b"c") == ("NONE", 3)
    assert transaction.end(committed=False) == "NONE"
    wait_until(lambda: state(transaction)[0] == "CompleteAbort", "the markers are written")
    assert transaction.end(committed=False) == "NONE"
    assert transaction.end(committed=True) == "INVALID_TXN_STATE"
    (given,) = raw.fetch(PartitionFetch(topic, 0, 0, 10_000), read_committed=True).partitions
    assert list(given.aborted or ()) == [(transaction.producer_id, 3)]
    (given,) = raw.fetch(PartitionFetch(topic, 0, 0, 10_000)).partitions
    assert not given.aborted


def test_steps_out_of_turn_are_refused(raw, new_topic, fresh_name, begin):
    topic, transaction, stranger = new_topic(), begin(), begin()
    unknown = Transaction(raw, fresh_name("transactional"))
    unknown.id = fresh_name("unknown")
    codes = {
        "end before begin": begin().end(committed=True),
        "write before adding the partition": transaction.send(topic, b"x")[0],
        "add an unknown topic": transaction.add((fresh_name("unknown"), 0)),
        "add an unknown partition": transaction.add((topic, 0), (topic, 9)),
        "add with an older epoch": transaction.add((topic, 0), epoch=transaction.epoch - 1),
        "add with a newer epoch": transaction.add((topic, 0), epoch=transaction.epoch + 1),
        "add as another": transaction.add((topic, 0), producer_id=stranger.producer_id),
        "add with an unknown id": unknown.add((topic, 0)),
        "end with an older epoch": transaction.end(committed=True, epoch=transaction.epoch - 1),
        "end as another": transaction.end(committed=True, producer_id=stranger.producer_id),
        "end with an unknown id": unknown.end(committed=True),
    }
    assert codes == {
        "end before begin": "INVALID_TXN_STATE",
        "write before adding the partition": "INVALID_TXN_STATE",
        "add an unknown topic": ["UNKNOWN_TOPIC_OR_PARTITION"],
        "add an unknown partition": ["OPERATION_NOT_ATTEMPTED", "UNKNOWN_TOPIC_OR_PARTITION"],
        "add with an older epoch": ["PRODUCER_FENCED"],
        "add with a newer epoch": ["PRODUCER_FENCED"],
        "add as another": ["INVALID_PRODUCER_ID_MAPPING"],
        "add with an unknown id": ["INVALID_PRODUCER_ID_MAPPING"],
        "end with an older epoch": "PRODUCER_FENCED",
        "end as another": "INVALID_PRODUCER_ID_MAPPING",
        "end with an unknown id": "INVALID_PRODUCER_ID_MAPPING",
    }
    assert last_stable(raw, topic) == (0, 0), "nothing was stored"


def test_older_versions_are_told_of_fencing_in_their_own_words(raw, new_topic, begin):
    """PRODUCER_FENCED is newer than the first versions: those hear INVALID_PRODUCER_EPOCH."""
    topic, transaction = new_topic(), begin()
    ended = raw.ask(
        Api.END_TXN,
        1,
        transactional_id=transaction.id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.epoch + 1,
        committed=True,
    )
    added = raw.ask(
        Api.ADD_PARTITIONS_TO_TXN,
        1,
        v3_and_below_transactional_id=transaction.id,
        v3_and_below_producer_id=transaction.producer_id,
        v3_and_below_producer_epoch=transaction.epoch + 1,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )
    (found,) = added.results_by_topic_v3_and_below[0].results_by_partition
    assert error_name(ended.error_code) == "INVALID_PRODUCER_EPOCH"
    assert error_name(found.partition_error_code) == "INVALID_PRODUCER_EPOCH"


def test_plain_and_transactional_batches_do_not_mix(raw, new_topic, begin):
    topic, transaction = new_topic(), begin()
    assert transaction.add((topic, 0)) == ["NONE"]
    assert transaction.send(topic, b"in the transaction") == ("NONE", 0)
    plain = batch_of(
        b"not in it", producer_id=transaction.producer_id, producer_epoch=transaction.epoch, base_sequence=1
    )
    (answer,) = raw.produce({(topic, 0): plain}, acks=-1)
    assert error_name(answer.error_code) == "INVALID_TXN_STATE"
    assert transaction.end(committed=True) == "NONE"
    wait_until(lambda: last_stable(raw, topic) == (2, 2), "the marker")


def test_offsets_in_a_transaction_are_pending_until_it_ends(raw, new_topic, fresh_name, begin):
    topic, group, transaction = new_topic(), fresh_name("group"), begin()

    def commit(offset: int, epoch: int | None = None) -> str:
        partition = {
            "partition_index": 0,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "note",
        }
        answer = raw.ask(
            Api.TXN_OFFSET_COMMIT,
            3,
            transactional_id=transaction.id,
            group_id=group,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.epoch if epoch is None else epoch,
            generation_id=-1,
            member_id="",
            topics=[{"name": topic, "partitions": [partition]}],
        )
        return error_name(answer.topics[0].partitions[0].error_code)

    def committed(*, stable: bool) -> tuple[int, str]:
        asked = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}
        (shown,) = raw.ask(Api.OFFSET_FETCH, 8, groups=[asked], require_stable=stable).groups
        (found,) = shown.topics[0].partitions
        return found.committed_offset, error_name(found.error_code)

    def add_offsets() -> str:
        code, _ = asked_until_settled(
            lambda: raw.ask(
                Api.ADD_OFFSETS_TO_TXN,
                3,
                transactional_id=transaction.id,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.epoch,
                group_id=group,
            )
        )
        return code

    assert add_offsets() == "NONE"
    assert commit(5) == "NONE"
    assert committed(stable=False) == (-1, "NONE")
    assert committed(stable=True) == (-1, "UNSTABLE_OFFSET_COMMIT")
    assert transaction.end(committed=True) == "NONE"
    wait_until(lambda: committed(stable=True) == (5, "NONE"), "the offset is committed")

    assert add_offsets() == "NONE"
    assert commit(9) == "NONE"
    assert committed(stable=False) == (5, "NONE")
    assert committed(stable=True) == (-1, "UNSTABLE_OFFSET_COMMIT")
    assert transaction.end(committed=False) == "NONE"
    wait_until(lambda: committed(stable=True) == (5, "NONE"), "the older offset is there again")


def test_producers_and_transactions_are_described(raw, new_topic, fresh_name, begin):
    topic, transaction = new_topic(), begin()
    transaction.add((topic, 0))
    transaction.send(topic, b"a", b"b")

    def producers(topic: str) -> tuple[str, list[tuple[int, int, int, int]]]:
        answer = raw.ask(Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": topic, "partition_indexes": [0]}])
        (found,) = answer.topics[0].partitions
        return error_name(found.error_code), [
            (p.producer_id, p.producer_epoch, p.last_sequence, p.current_txn_start_offset)
            for p in found.active_producers
        ]

    def listed(**filters: Any) -> dict[str, str]:
        answer = raw.ask(Api.LIST_TRANSACTIONS, 0, **filters)
        assert error_name(answer.error_code) == "NONE"
        return {t.transactional_id: t.transaction_state for t in answer.transaction_states}

    assert producers(topic) == ("NONE", [(transaction.producer_id, transaction.epoch, 1, 0)])
    assert producers(fresh_name("unknown")) == ("UNKNOWN_TOPIC_OR_PARTITION", [])
    assert listed()[transaction.id] == "Ongoing"
    assert listed(producer_id_filters=[transaction.producer_id]) == {transaction.id: "Ongoing"}
    assert transaction.id in listed(state_filters=["Ongoing"])
    assert transaction.id not in listed(state_filters=["CompleteAbort"])
    answer = raw.ask(Api.LIST_TRANSACTIONS, 0, state_filters=["NoSuchState"])
    assert list(answer.unknown_state_filters) == ["NoSuchState"]
    transaction.end(committed=False)
    wait_until(lambda: producers(topic)[1][0][3] == -1, "no transaction is open")
    assert listed()[transaction.id] in ("PrepareAbort", "CompleteAbort")
    (unknown,) = raw.ask(
        Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[fresh_name("unknown")]
    ).transaction_states
    assert error_name(unknown.error_code) == "TRANSACTIONAL_ID_NOT_FOUND"


def test_epoch_of_a_timed_out_transaction_is_over(raw, new_topic, begin):
    topic, transaction = new_topic(), begin(timeout_ms=500)
    transaction.add((topic, 0))
    assert transaction.send(topic, b"slow") == ("NONE", 0)
    wait_until(lambda: last_stable(raw, topic) == (2, 2), "the coordinator's abort")
    codes = {
        "write": transaction.send(topic, b"too late")[0],
        "end": transaction.end(committed=True),
        "add": transaction.add((topic, 0)),
        "begin anew": transaction.init(),
        "write anew": (transaction.add((topic, 0)), transaction.send(topic, b"fresh")[0]),
    }
    assert codes == {
        "write": "INVALID_PRODUCER_EPOCH",
        "end": "PRODUCER_FENCED",
        "add": ["PRODUCER_FENCED"],
        "begin anew": "NONE",
        "write anew": (["NONE"], "NONE"),
    }
