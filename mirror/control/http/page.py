"""The page for people: one file, nothing from anywhere else.

`page.html` shows what `/mirror` says and asks again every two seconds. The answer forbids the browser
everything but that: the one script and the one style are named by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from millrace.mirror.control.http.messages import Response

HTML = "text/html; charset=utf-8"


@cache
def page_response() -> Response:
    html = files("millrace.mirror.control.http").joinpath("page.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(200, HTML, html.encode(), (("Content-Security-Policy", policy),))


def _hash(html: str, tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
