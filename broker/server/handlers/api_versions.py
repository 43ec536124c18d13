"""ApiVersions, versions 0 to 4: which APIs and versions this broker speaks.

The list is the registry's own (see `server/registry.py`); the ranges follow Apache Kafka 3.9 as far as an
API is implemented, because some clients infer a broker's version from them. A request with a version that
is not spoken gets error 35 in a body of version 0, from which the client learns what to ask next. The
request's body (the client's name) is not looked at. No features are listed: none is finalised here.
"""

from __future__ import annotations

from millrace.broker.errors import UnsupportedVersion
from millrace.broker.protocol.frames import Api, RequestHead, encode_response
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import RequestContext

API = Api.API_VERSIONS
VERSIONS = range(5)
FRAME_VERSIONS = VERSIONS


def handle_frame(head: RequestHead, _frame: memoryview, _position: int, context: RequestContext) -> bytes:
    """Answer at once; never fails."""
    known = head.version in VERSIONS
    return encode_response(
        head,
        answer(
            API,
            head.version if known else 0,
            error_code=NO_ERROR if known else UnsupportedVersion.code,
            api_keys=[
                {"api_key": spoken.api_key, "min_version": spoken.first, "max_version": spoken.last}
                for spoken in context.broker.spoken
            ],
        ),
    )
