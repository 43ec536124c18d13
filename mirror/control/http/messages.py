"""Requests and answers of the HTTP surface as values. Pure.

Made by `server` from bytes, read by `guard` and `control`. Every answer that is not a page, a
metric or a health word is JSON; a refusal is `{"error": "one sentence that says what to do"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """`headers` has lower-case names; a header that came twice is joined by commas. `path` has no query."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Refusal(Exception):
    """A request that is not carried out. The message is for the person who sent it."""

    def __init__(self, status: int, message: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers

    def response(self) -> Response:
        return json_response({"error": str(self)}, self.status, self.headers)


def json_response(value: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(status, JSON, json.dumps(value).encode() + b"\n", headers)


def text_response(text: str, status: int = 200) -> Response:
    return Response(status, TEXT, text.encode() + b"\n")
