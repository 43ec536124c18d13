"""How old each part of what a client knows of a cluster is."""

from __future__ import annotations

from millrace.broker.client.known_metadata import KnownMetadata
from millrace.broker.client.metadata import NO_TOPIC_ID, ClusterMetadata, TopicMetadata


def answer(*topics: str, missing: tuple[str, ...] = ()) -> ClusterMetadata:
    described = {name: TopicMetadata(name, NO_TOPIC_ID, False, {}) for name in topics}
    return ClusterMetadata("id", 1, {}, described, dict.fromkeys(missing, 3))


def test_before_the_first_answer_nothing_is_fresh() -> None:
    assert not KnownMetadata().is_fresh([], -1.0)


def test_answer_about_one_topic_makes_no_other_fresh_nor_the_list_of_all() -> None:
    known = KnownMetadata()
    known.take(answer("a", "b"), None, 10.0)
    known.take(answer("a"), ["a"], 20.0)
    assert known.is_fresh(["a"], 15.0)
    assert known.is_fresh([], 15.0), "the brokers are those of the last answer"
    assert not known.is_fresh(["a", "b"], 15.0)
    assert not known.is_fresh(None, 15.0)
    assert known.is_fresh(["a", "b"], 5.0)
    assert known.is_fresh(None, 5.0)


def test_topic_that_was_not_there_is_never_fresh() -> None:
    known = KnownMetadata()
    known.take(answer("a", missing=("b",)), ["a", "b"], 10.0)
    assert known.is_fresh(["a"], 5.0)
    assert not known.is_fresh(["b"], 5.0)


def test_what_is_invalidated_is_not_fresh_but_still_says_whom_to_ask() -> None:
    known = KnownMetadata()
    view = known.take(answer("a"), None, 10.0)
    known.invalidate()
    assert known.view is view
    assert not any(known.is_fresh(topics, 5.0) for topics in ([], ["a"], None))
