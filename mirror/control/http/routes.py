"""Every call of the HTTP surface, and its OpenAPI description, which is made from this table alone. Pure.

`control` has one handler for each name here and no other; it looks up what a request asks for with
`find`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from millrace.mirror.control.http.bodies import (
    Done,
    ErrorAnswer,
    MirrorAnswer,
    NothingBody,
    ReloadAnswer,
    Selection,
    SkipBody,
    StatusAnswer,
    ThrottleBody,
)
from millrace.mirror.control.http.messages import JSON, TEXT, Refusal

HTML = "text/html; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENAPI_VERSION = "3.1.0"
_SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Route:
    """`errors`: the statuses it may refuse with, beside those that every call has."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[BaseModel] | None = None
    content_type: str = JSON
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    description: str = ""

    @property
    def is_control(self) -> bool:
        return self.method == "POST"


ROUTES: tuple[Route, ...] = (
    Route("GET", "/", "page", "The mirror at a glance, for people", content_type=HTML),
    Route("GET", "/metrics", "metrics", "Prometheus metrics of this worker", content_type=PROMETHEUS),
    Route("GET", "/healthz", "health", "200 while the process serves", content_type=TEXT),
    Route(
        "GET",
        "/readyz",
        "readiness",
        "200 when this worker has its share and carries all of it, otherwise 503 and why",
        content_type=TEXT,
        errors=(503,),
    ),
    Route("GET", "/status", "status", "This worker: what it carries, where it stands", StatusAnswer),
    Route(
        "GET",
        "/mirror",
        "mirror",
        "Every worker of the mirror, and which of them did not answer",
        MirrorAnswer,
        description="The worker that is asked asks the others. Answers are at most a second old.",
    ),
    Route("GET", "/openapi.json", "description", "This description"),
    Route(
        "POST",
        "/pause",
        "pause",
        "Stop reading a source, a topic or a partition",
        Done,
        body=Selection,
        errors=(404, 503),
        description="Holds for every worker and over restarts, until it is resumed. Of several words "
        "about one partition the newest counts.",
    ),
    Route(
        "POST",
        "/resume",
        "resume",
        "Go on: lift pauses, and try stopped partitions again",
        Done,
        body=Selection,
        errors=(404, 503),
    ),
    Route(
        "POST",
        "/retry",
        "retry",
        "Try again what stopped partitions, after its cause was removed",
        Done,
        body=Selection,
        errors=(404, 503),
    ),
    Route(
        "POST",
        "/skip",
        "skip",
        "Let one gap of a stopped partition pass",
        Done,
        body=SkipBody,
        errors=(404, 409, 503),
        description="The gap's event is written before the position passes it. Nothing else is skipped.",
    ),
    Route(
        "POST",
        "/throttle",
        "throttle",
        "Limit the bytes per second read from a source, over all workers together",
        Done,
        body=ThrottleBody,
        errors=(404, 503),
    ),
    Route(
        "POST",
        "/drain",
        "drain",
        "Give this worker's partitions to the others, with nothing lost or repeated",
        Done,
        body=NothingBody,
        errors=(409,),
        description="Answers when all is given up. The process goes on answering until it is ended.",
    ),
    Route(
        "POST",
        "/reload",
        "reload",
        "Read this worker's config file again",
        ReloadAnswer,
        body=NothingBody,
        errors=(409, 422),
        description="What cannot be changed without a restart is refused by name; then nothing is changed.",
    ),
)

_ERROR_TEXTS = {
    400: "The body is not what the call takes",
    401: "The token is missing or wrong",
    403: "Refused here: the sentence says why",
    404: "No such source, topic or partition in this mirror",
    409: "Not possible in the present state: the sentence says why",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "The config file has a mistake",
    503: "Not now: the target or the worker is not ready",
}


def find(method: str, path: str, routes: Sequence[Route] = ROUTES) -> Route:
    """The route of a request (HEAD is GET's). Raises Refusal 404 or 405."""
    wanted = "GET" if method == "HEAD" else method
    methods = [route for route in routes if route.path == path]
    for route in methods:
        if route.method == wanted:
            return route
    if methods:
        allowed = ", ".join(sorted({route.method for route in methods}))
        raise Refusal(405, f"{path} takes {allowed}", (("Allow", allowed),))
    raise Refusal(404, f"no {path} here; /openapi.json lists what there is")


def describe(version: str, routes: Sequence[Route] = ROUTES) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    models: list[type[BaseModel]] = [ErrorAnswer]
    for route in routes:
        models += [model for model in (route.body, route.answer) if model is not None]
    inputs = {route.body for route in routes}
    _, schemas = models_json_schema(
        [(model, "validation" if model in inputs else "serialization") for model in dict.fromkeys(models)],
        by_alias=True,
        ref_template=_SCHEMAS + "{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Millrace mirror",
            "version": version,
            "description": "Control and sight of one worker of a mirror. Control calls are taken on "
            "loopback, or with the token of `control.token`.",
        },
        "servers": [{"url": "/", "description": "The worker that gave this description"}],
        "tags": [
            {"name": "sight", "description": "Open to whoever reaches the port"},
            {"name": "control", "description": "Changes something: POST with a JSON body"},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    media = route.content_type.partition(";")[0]
    schema = (
        _reference(route.answer)
        if route.answer is not None
        else {"type": "object" if media == JSON else "string"}
    )
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": ["control" if route.is_control else "sight"],
        "responses": {
            "200": {
                "description": "Done" if route.is_control else route.summary,
                "content": {media: {"schema": schema}},
            }
        },
    }
    if route.description:
        operation["description"] = route.description
    statuses: tuple[int, ...] = (403,)
    if route.body is not None:
        statuses = (400, 401, 403, 413, 415)
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(route.body)}}}
        # Without a configured token the call is taken on loopback.
        operation["security"] = [{"token": []}, {}]
    for status in sorted({*statuses, *route.errors}):
        is_text = media == "text/plain" and status == 503
        content = (
            {"text/plain": {"schema": {"type": "string"}}}
            if is_text
            else {JSON: {"schema": _reference(ErrorAnswer)}}
        )
        operation["responses"][str(status)] = {"description": _ERROR_TEXTS[status], "content": content}
    return operation


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS + model.__name__}
