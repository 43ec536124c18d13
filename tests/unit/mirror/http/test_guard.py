"""Control calls are closed to the network and to web pages unless a token says otherwise."""

from __future__ import annotations

import pytest

from millrace.broker.protocol.address import Address
from millrace.mirror.control.http.guard import Guard, is_loopback
from millrace.mirror.control.http.messages import Refusal, Request

LOCAL, OPEN = "127.0.0.1:8090", "0.0.0.0:8090"
TOKEN = "a-token-of-some-length"


def control(**headers: str) -> Request:
    named = {"host": "127.0.0.1:8090", "content-type": "application/json"}
    return Request(
        "POST", "/pause", {**named, **{key.replace("_", "-"): text for key, text in headers.items()}}
    )


def guard_of(listen: str, token: str | None = None) -> Guard:
    return Guard(Address.parse_listener(listen), token)


def outcome(guard: Guard, request: Request, *, is_control: bool = True) -> int:
    try:
        guard.check(request, is_control=is_control)
    except Refusal as refusal:
        assert "\n" not in str(refusal)
        assert TOKEN not in str(refusal)
        return refusal.status
    return 200


@pytest.mark.parametrize("listen", [LOCAL, "localhost:8090", "[::1]:8090", "127.8.8.8:1"])
def test_loopback_takes_control_calls(listen: str) -> None:
    assert outcome(guard_of(listen), control()) == 200
    assert outcome(guard_of(listen), control(host="localhost:8090")) == 200
    assert outcome(guard_of(listen), control(host="[::1]:8090")) == 200


@pytest.mark.parametrize("listen", [OPEN, "[::]:8090", "10.0.0.7:8090", "mirror.example:8090"])
def test_open_port_without_token_refuses_control_and_gives_sight(listen: str) -> None:
    guard = guard_of(listen)
    assert outcome(guard, control()) == 403
    assert outcome(guard, control(host="mirror.example")) == 403
    assert outcome(guard, control(authorization=f"Bearer {TOKEN}")) == 403
    assert outcome(guard, Request("GET", "/metrics", {"host": "mirror.example"}), is_control=False) == 200
    with pytest.raises(Refusal, match=r"no control.token; set one, or listen on 127\.0\.0\.1"):
        guard.check(control(), is_control=True)


@pytest.mark.parametrize("listen", [LOCAL, OPEN])
def test_a_configured_token_is_needed_everywhere(listen: str) -> None:
    guard = guard_of(listen, TOKEN)
    assert outcome(guard, control()) == 401
    assert outcome(guard, control(authorization="Bearer wrong")) == 401
    assert outcome(guard, control(authorization=f"Basic {TOKEN}")) == 401
    assert outcome(guard, control(authorization="Bearer ")) == 401
    assert outcome(guard, control(authorization="Bearer \xe9")) == 401
    assert outcome(guard, control(authorization="Bearer ☃")) == 401
    assert outcome(guard, control(authorization=f"Bearer {TOKEN}x")) == 401
    assert outcome(guard, control(authorization=f"Bearer {TOKEN}")) == 200
    assert outcome(guard, control(authorization=f"bearer {TOKEN}")) == 200


def test_a_refused_caller_is_told_how_to_authenticate() -> None:
    with pytest.raises(Refusal) as caught:
        guard_of(LOCAL, TOKEN).check(control(), is_control=True)
    assert dict(caught.value.headers)["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8090", "10.0.0.7", "", "[fe80::1]"])
def test_names_that_only_lead_here_are_refused_on_loopback(host: str) -> None:
    """DNS rebinding: the page's own name was made to lead to 127.0.0.1."""
    assert outcome(guard_of(LOCAL), control(host=host)) == 403
    assert outcome(guard_of(LOCAL), Request("GET", "/status", {"host": host}), is_control=False) == 403


def test_a_request_without_host_is_no_browser() -> None:
    assert outcome(guard_of(LOCAL), Request("GET", "/metrics", {}), is_control=False) == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_what_a_foreign_page_can_send_unasked_is_refused(kind: str) -> None:
    assert outcome(guard_of(LOCAL), control(content_type=kind)) == 415


def test_a_json_body_may_name_its_charset() -> None:
    assert outcome(guard_of(LOCAL), control(content_type="Application/JSON; charset=utf-8")) == 200


def test_foreign_pages_are_refused_by_origin() -> None:
    assert outcome(guard_of(LOCAL), control(origin="http://127.0.0.1:8090")) == 200
    assert outcome(guard_of(LOCAL), control(origin="http://evil.example")) == 403
    assert outcome(guard_of(LOCAL), control(origin="http://127.0.0.1:9999")) == 403
    assert outcome(guard_of(LOCAL), control(origin="null")) == 403
    assert outcome(guard_of(LOCAL), control(sec_fetch_site="cross-site")) == 403
    assert outcome(guard_of(LOCAL), control(sec_fetch_site="same-site")) == 403
    assert outcome(guard_of(LOCAL), control(sec_fetch_site="same-origin")) == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "localhost.evil.example", "1.2.3.4", "::ffff:1.2.3.4"])
def test_other_names(host: str) -> None:
    assert not is_loopback(host)
