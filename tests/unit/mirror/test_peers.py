"""Workers know each other by the group's messages, and split a limit without exceeding it."""

from __future__ import annotations

import pytest

from millrace.mirror.sharing.assignment import (
    Claim,
    Share,
    decode_claim,
    decode_share,
    encode_claim,
    encode_share,
)
from millrace.mirror.sharing.peers import Crew, Peer, add_address, add_crew, crew_of
from millrace.mirror.topics.routes import SourcePartition

PARTITIONS = [SourcePartition("ewr", "flights", number) for number in range(4)] + [
    SourcePartition("lhr", "flights", 0)
]


def test_addresses_travel_with_the_groups_messages_and_change_nothing_in_them() -> None:
    claims = {
        "b": add_address(encode_claim(Claim(frozenset(PARTITIONS[:2]), 3)), "http://b:1"),
        "a": encode_claim(Claim()),  # an older worker says no address
    }
    assert decode_claim(claims["b"]) == Claim(frozenset(PARTITIONS[:2]), 3)
    share = add_crew(encode_share(Share(tuple(PARTITIONS[1:3]))), claims, PARTITIONS)
    assert decode_share(share).partitions == tuple(PARTITIONS[1:3])
    crew = crew_of(share)
    assert crew.workers == (Peer("a", None), Peer("b", "http://b:1"))
    assert crew.partition_counts == {"ewr": 4, "lhr": 1}


@pytest.mark.parametrize("share", [b"", b"nonsense", b"[]", b'{"version":1}', b'{"workers":3,"counts":[]}'])
def test_a_share_of_another_version_has_no_crew(share: bytes) -> None:
    assert crew_of(share) == Crew()


def test_parts_of_a_limit_never_exceed_it() -> None:
    crew = Crew((Peer("a", None), Peer("b", None), Peer("c", None)), {"ewr": 4})
    parts = [crew.share_of_rate("ewr", owned, 1000.0) for owned in (2, 1, 1)]
    assert parts == [500, 250, 250]
    assert sum(crew.share_of_rate("ewr", owned, 1000.0) for owned in (1, 1, 0)) <= 1000


def test_while_the_whole_is_not_known_the_parts_are_equal() -> None:
    crew = Crew((Peer("a", None), Peer("b", None)))
    assert crew.share_of_rate("ewr", 3, 1000.0) == 500
    assert Crew().share_of_rate("ewr", 3, 1000.0) == 1000
