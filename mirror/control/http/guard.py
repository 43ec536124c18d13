"""Who may call what: the rules that keep the control calls away from the network and from web pages. Pure.

Called by `mirror/control/control.py` for every request.

1. Reading (metrics, health, status, the page) is open to whoever reaches the port. While the port is on
   loopback, a request must also name a loopback host: a web page whose own name was made to lead to 127.0.0.1
   (DNS rebinding) reads nothing.
2. With `control.token` every control call needs `Authorization: Bearer <token>`.
3. Without a token control calls are taken on a loopback address only; on any other they are refused, whoever
   sends them: behind a proxy or a tunnel the network looks like loopback.
4. A control call is a POST with `Content-Type: application/json`, and not from another site's page: such a
   page can send forms and plain text to 127.0.0.1, but no JSON without being allowed to, which is never
   granted.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass

from millrace.broker.protocol.address import Address
from millrace.mirror.control.http.messages import JSON, Refusal, Request


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Guard:
    """The rules for one listening address. `token` None: none is configured."""

    listen: Address
    token: str | None = None

    @property
    def is_local(self) -> bool:
        return is_loopback(self.listen.host)

    def check(self, request: Request, *, is_control: bool) -> None:
        """Raises Refusal."""
        # A browser always names a host; what names none (HTTP/1.0) is no browser.
        host = request.headers.get("host")
        if self.is_local and host is not None and not is_loopback(_host_name(host)):
            raise Refusal(
                403,
                f"Host {host!r} is not this machine: the port is open on "
                f"{self.listen} only, so ask for that address",
            )
        if not is_control:
            return
        self._check_caller(request)
        self._check_no_foreign_page(request)

    def _check_caller(self, request: Request) -> None:
        if self.token is None:
            if not self.is_local:
                raise Refusal(
                    403,
                    f"control calls are refused: {self.listen} is open to the network and there is no "
                    "control.token; set one, or listen on 127.0.0.1",
                )
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Refusal(
                401,
                "control calls need the token of control.token, as Authorization: Bearer <token>",
                (("WWW-Authenticate", 'Bearer realm="millrace mirror"'),),
            )
        # Latin-1, as header bytes arrived: compare_digest takes no other text than ASCII.
        if not hmac.compare_digest(given.strip().encode("latin-1", "replace"), self.token.encode()):
            raise Refusal(
                401,
                "the token is not the one of control.token",
                (("WWW-Authenticate", 'Bearer realm="millrace mirror", error="invalid_token"'),),
            )

    def _check_no_foreign_page(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise Refusal(415, f"control calls take a JSON body with Content-Type: {JSON}")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise Refusal(403, f"a page of {origin} may not control this mirror")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refusal(403, "a page of another site may not control this mirror")


def _host_name(host: str) -> str:
    """The host of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
