"""Fetch sessions: what a reader is asked for and told under KIP-227, and who gets a slot."""

from __future__ import annotations

import random
import uuid

import pytest

from millrace.broker.errors import FetchSessionIdNotFound, FetchSessionTopicIdError, InvalidFetchSessionEpoch
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionData, PartitionFetch, Topic
from millrace.broker.protocol.session_epochs import FINAL_EPOCH, FULL, LARGEST_EPOCH, next_epoch
from millrace.broker.server import fetch_sessions
from millrace.broker.server.fetch_sessions import EVICTION_MS, FetchSessionCache, SessionFetch


def request(
    *partitions: PartitionFetch,
    session_id: int = 0,
    epoch: int = FULL,
    forgotten: tuple[tuple[Topic, int], ...] = (),
    replica_id: int = -1,
) -> FetchRequest:
    return FetchRequest(0, 1, 1 << 20, False, partitions, session_id, epoch, forgotten, replica_id=replica_id)


def asked(partition: int, offset: int = 0, topic: Topic = "t") -> PartitionFetch:
    return PartitionFetch(topic, partition, offset, 1_000)


def given(
    partition: int, high: int = 10, records: bytes = b"", error: int = 0, start: int = 0
) -> PartitionData:
    return PartitionData("t", partition, error, high, high, start, records)


def resolve(
    cache: FetchSessionCache, asking: FetchRequest, now_ms: int = 0, ids: bool = False
) -> SessionFetch:
    resolved = cache.resolve(asking, ids, now_ms)
    assert isinstance(resolved, SessionFetch), resolved
    return resolved


def opened(cache: FetchSessionCache, *numbers: int, now_ms: int = 0, replica_id: int = -1) -> int:
    asking = request(*map(asked, numbers), replica_id=replica_id)
    code, session_id, _ = resolve(cache, asking, now_ms).finish([given(n) for n in numbers], now_ms)
    assert code == 0
    return session_id


def told(parts: object) -> list[int]:
    return [part.partition for part in parts]  # type: ignore[attr-defined]


def test_full_fetch_opens_a_session_and_answers_in_full() -> None:
    cache = FetchSessionCache(10, random.Random(1))
    fetch = resolve(cache, request(asked(0), asked(1)))
    assert fetch.partitions == (asked(0), asked(1))
    code, session_id, parts = fetch.finish([given(0), given(1)], 0)
    assert (code, told(parts)) == (0, [0, 1])
    assert session_id > 0
    assert (len(cache), cache.partition_count) == (1, 2)


def test_increments_carry_only_changes() -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0, 1, 2)
    quiet = resolve(cache, request(session_id=session, epoch=1))
    assert quiet.partitions == [asked(0), asked(1), asked(2)]
    assert quiet.finish([given(0), given(1), given(2)], 0) == (0, session, [])
    busy = resolve(cache, request(asked(1, offset=5), session_id=session, epoch=2))
    assert busy.partitions == [asked(0), asked(1, offset=5), asked(2)]
    answer = [given(0, high=11), given(1, records=b"x"), given(2)]
    assert told(busy.finish(answer, 0)[2]) == [0, 1]
    # A partition with data is read last the next time.
    again = resolve(cache, request(session_id=session, epoch=3))
    assert told(again.partitions) == [0, 2, 1]
    assert told(again.finish([given(0, high=11), given(2, start=1), given(1)], 0)[2]) == [2]


def test_error_is_told_again_and_so_is_its_end() -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0)
    for epoch, error, is_told in ((1, 0, False), (2, 3, True), (3, 3, True), (4, 0, True), (5, 0, False)):
        fetch = resolve(cache, request(session_id=session, epoch=epoch))
        assert bool(fetch.finish([given(0, error=error)], 0)[2]) is is_told


@pytest.mark.parametrize("change", [{"preferred_read_replica": 2}, {"diverging": (1, 2)}])
def test_other_news_is_told(change: dict[str, object]) -> None:
    cache = FetchSessionCache(10)
    fetch = resolve(cache, request(session_id=opened(cache, 0), epoch=1))
    assert told(fetch.finish([given(0)._replace(**change)], 0)[2]) == [0]


def test_partitions_come_and_go() -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0, 1)
    fetch = resolve(cache, request(asked(2), session_id=session, epoch=1, forgotten=(("t", 0), ("t", 9))))
    assert told(fetch.partitions) == [1, 2]
    assert cache.partition_count == 2
    # The new one is told whatever there is to say of it.
    assert told(fetch.finish([given(1), given(2)], 0)[2]) == [2]
    emptied = resolve(cache, request(session_id=session, epoch=2, forgotten=(("t", 1), ("t", 2))))
    assert emptied.finish([], 0)[:2] == (0, 0)
    assert (len(cache), cache.partition_count) == (0, 0)


def test_errors_of_sessions() -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0)
    assert cache.resolve(request(session_id=session + 1, epoch=1), False, 0) == (
        FetchSessionIdNotFound.code,
        0,
    )
    assert cache.resolve(request(session_id=0, epoch=1), False, 0) == (FetchSessionIdNotFound.code, 0)
    assert cache.resolve(request(session_id=session, epoch=2), False, 0) == (InvalidFetchSessionEpoch.code, 0)
    assert cache.resolve(request(session_id=session, epoch=1), True, 0) == (FetchSessionTopicIdError.code, 0)
    resolve(cache, request(session_id=session, epoch=1))


def test_session_of_ids_takes_no_names() -> None:
    cache = FetchSessionCache(10)
    topic = uuid.UUID(int=7)
    fetch = resolve(cache, request(asked(0, topic=topic)), ids=True)
    _, session, _ = fetch.finish([given(0)._replace(topic=topic)], 0)
    code = FetchSessionTopicIdError.code
    assert cache.resolve(request(session_id=session, epoch=1), False, 0) == (code, 0)
    assert resolve(cache, request(session_id=session, epoch=1), ids=True).partitions == [
        asked(0, topic=topic)
    ]


def test_answer_of_an_overtaken_request_is_an_error() -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0)
    late = resolve(cache, request(session_id=session, epoch=1))
    resolve(cache, request(session_id=session, epoch=2))
    assert late.finish([given(0, records=b"x")], 0) == (InvalidFetchSessionEpoch.code, session, ())
    assert late.finish_empty() == (InvalidFetchSessionEpoch.code, session, ())


def test_throttled_answer_takes_nothing_as_told() -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0)
    assert resolve(cache, request(session_id=session, epoch=1)).finish_empty() == (0, session, ())
    fetch = resolve(cache, request(session_id=session, epoch=2))
    assert told(fetch.finish([given(0, high=11)], 0)[2]) == [0]
    assert resolve(cache, request(asked(0))).finish_empty() == (0, 0, ())
    assert len(cache) == 1


@pytest.mark.parametrize("epoch", [FULL, FINAL_EPOCH])
def test_full_request_ends_the_session_it_names(epoch: int) -> None:
    cache = FetchSessionCache(10)
    session = opened(cache, 0)
    fetch = resolve(cache, request(asked(0), session_id=session, epoch=epoch))
    code, new, parts = fetch.finish([given(0)], 0)
    assert (code, told(parts)) == (0, [0])
    assert new != session
    assert (new == 0) is (epoch == FINAL_EPOCH)
    assert len(cache) == (epoch == FULL)


def test_epochs_go_round() -> None:
    assert next_epoch(FULL) == 1
    assert next_epoch(LARGEST_EPOCH) == 1


def test_full_cache_gives_no_session_until_one_is_stale() -> None:
    cache = FetchSessionCache(2)
    first, second = opened(cache, 0), opened(cache, 1, now_ms=10)
    assert opened(cache, 2, now_ms=EVICTION_MS) == 0
    resolve(cache, request(session_id=first, epoch=1), now_ms=EVICTION_MS)
    third = opened(cache, 2, now_ms=EVICTION_MS + 11)  # the second was not used for long enough
    assert third
    assert cache.resolve(request(session_id=second, epoch=1), False, 0) == (FetchSessionIdNotFound.code, 0)
    assert cache.evictions == 1


def test_larger_session_takes_the_slot_of_an_old_smaller_one_only() -> None:
    cache = FetchSessionCache(2)
    small, large = opened(cache, 0), opened(cache, *range(5))

    def keep_in_use(now_ms: int) -> None:
        for session in (small, large):
            cache._sessions[session].used_ms = now_ms

    keep_in_use(EVICTION_MS)
    assert opened(cache, *range(3), now_ms=EVICTION_MS) == 0  # both are young yet
    later = 2 * EVICTION_MS
    keep_in_use(later)
    assert opened(cache, 7, now_ms=later) == 0  # worth no more than the smallest
    assert opened(cache, 7, 8, now_ms=later + 1)
    assert cache.resolve(request(session_id=small, epoch=1), False, later)[0] == FetchSessionIdNotFound.code  # type: ignore[index]
    resolve(cache, request(session_id=large, epoch=1), now_ms=later)


def test_followers_push_out_consumers_and_never_the_other_way() -> None:
    cache = FetchSessionCache(1)
    assert opened(cache, *range(9))
    follower = opened(cache, 0, replica_id=2)
    assert follower
    cache._sessions[follower].used_ms = 10 * EVICTION_MS
    assert opened(cache, *range(9), now_ms=10 * EVICTION_MS) == 0
    assert opened(cache, 0, 1, now_ms=10 * EVICTION_MS, replica_id=3)  # an old follower of less worth


def test_partitions_in_all_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "MOST_PARTITIONS", 10)
    cache = FetchSessionCache(10)
    session = opened(cache, *range(8))
    assert opened(cache, 0, 1, 2) == 0
    growing = request(*map(asked, range(8, 12)), session_id=session, epoch=1)
    assert cache.resolve(growing, False, 0) == (FetchSessionIdNotFound.code, 0)
    assert (len(cache), cache.partition_count) == (0, 0)


def test_sessions_unused_for_long_make_room_for_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a follower that has another leader now."""
    monkeypatch.setattr(fetch_sessions, "MOST_PARTITIONS", 10)
    cache = FetchSessionCache(10)
    for first in (0, 5):
        assert opened(cache, *range(first, first + 5))
    everyone = request(*map(asked, range(7)), epoch=0)
    answers = [PartitionData("t", number, 0, 5) for number in range(7)]
    assert cache.open(everyone, False, answers, EVICTION_MS) == 0
    assert cache.open(everyone, False, answers, EVICTION_MS + 1)
    assert (len(cache), cache.partition_count, cache.evictions) == (1, 7, 2)


def test_very_many_partitions_have_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are looked at in one go; who asks for more is answered in full."""
    monkeypatch.setattr(fetch_sessions, "MOST_IN_SESSION", 4)
    cache = FetchSessionCache(10)
    assert opened(cache, *range(5)) == 0
    session = opened(cache, *range(4))
    assert session
    growing = request(asked(4), session_id=session, epoch=1)
    assert cache.resolve(growing, False, 0) == (FetchSessionIdNotFound.code, 0)
    assert (len(cache), cache.partition_count) == (0, 0)
    session = opened(cache, 0)
    many = request(*map(asked, range(5)), session_id=session, epoch=1)
    monkeypatch.setattr(FetchSessionCache, "_update", lambda *_: pytest.fail("each of them was looked at"))
    assert cache.resolve(many, False, 0) == (FetchSessionIdNotFound.code, 0)
    assert (len(cache), cache.partition_count) == (0, 0)


def test_random_use_keeps_the_count_and_the_view() -> None:
    """Against a reader's own model of what it has been told."""
    rng = random.Random(5)
    cache = FetchSessionCache(3, rng)
    for _ in range(200):
        state = {number: rng.randrange(3) for number in range(6)}
        wanted = set(rng.sample(range(6), 3))
        view: dict[int, int] = {}
        session, epoch = 0, FULL
        changed, forgotten = set(wanted), set()
        for _ in range(8):
            asking = request(
                *map(asked, sorted(changed)),
                session_id=session,
                epoch=epoch,
                forgotten=tuple(("t", number) for number in forgotten),
            )
            fetch = resolve(cache, asking)
            code, session, parts = fetch.finish(
                [given(part.partition, high=state[part.partition]) for part in fetch.partitions], 0
            )
            assert code == 0
            for part in parts:
                view[part.partition] = part.high_watermark
            assert {number: view[number] for number in wanted} == {number: state[number] for number in wanted}
            if session == 0:
                break
            epoch = next_epoch(epoch)
            for number in rng.sample(range(6), 2):
                state[number] += rng.randrange(2)
            new = set(rng.sample(range(6), 3))
            changed, forgotten = new - wanted, wanted - new
            wanted = new
        assert cache.partition_count == sum(len(kept.partitions) for kept in cache._sessions.values())
        if len(cache) == 3:
            cache = FetchSessionCache(3, rng)
