"""A record or an answer of a thousand brackets is as little understood as any other that is none of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.audit.runs.told_routes import ToldRoutes
from millrace.broker.client.oauth import TokenUnavailable, _read_answer
from millrace.broker.client.sasl import _expiry
from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol import mirror_positions
from millrace.broker.protocol.foreign_json import read_json
from millrace.mirror.control import wishes
from millrace.mirror.control.wishes import Scope, Wishes, WishKind
from millrace.mirror.delivery.beginnings import Begun
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.offsets import offset_map
from millrace.mirror.sharing import assignment
from millrace.mirror.sharing.peers import Crew, crew_of
from millrace.mirror.topics.route_records import encode_key, read_routes

DEEP = b"[" * 100_000
TOO_LARGE = b'{"access_token":"t","expires_in":1' + b"0" * 400 + b"}"
ROUTE = encode_key("ewr", "flights")
PAUSE = wishes.encode_key(WishKind.PAUSE, Scope("ewr"))


def routes_of(key: bytes, value: bytes) -> object:
    return read_routes([(key, value)], mirror="m", cluster_id="c")


@pytest.mark.parametrize(
    ("read", "nothing"),
    [
        (lambda: routes_of(DEEP, b"{}"), {}),
        (lambda: routes_of(ROUTE, DEEP), {}),
        (lambda: mirror_positions.decode_key(DEEP), None),
        (lambda: Positions().apply(DEEP, b"{}"), None),
        (lambda: offset_map.decode_key(DEEP), None),
        (lambda: Begun().apply(DEEP, b"{}"), None),
        (lambda: Begun().apply(b'{"source":"ewr"}', DEEP), None),
        (lambda: Wishes().apply(DEEP, b"{}"), None),
        (lambda: Wishes().apply(PAUSE, DEEP), None),
        (lambda: crew_of(DEEP), Crew()),
        (lambda: _expiry("." + "W1tb" * 30_000 + "."), None),
    ],
)
def test_it_is_passed_over(read: Callable[[], object], nothing: object) -> None:
    assert read() == nothing


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda: read_json(DEEP), ValueError),
        (lambda: mirror_positions.decode_value(DEEP), UnreadableRecord),
        (lambda: wishes.decode_value(DEEP), UnreadableRecord),
        (lambda: assignment.decode_claim(DEEP), ValueError),
        (lambda: assignment.decode_share(DEEP), ValueError),
        (lambda: ToldRoutes().learn(DEEP, b"{}"), ValueError),
        (lambda: _read_answer("https://idp/token", DEEP), TokenUnavailable),
        (lambda: _read_answer("https://idp/token", TOO_LARGE), TokenUnavailable),
    ],
)
def test_or_it_is_the_error_that_its_reader_knows(read: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        read()
