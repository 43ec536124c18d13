"""The table of calls, what their bodies take, and the OpenAPI description that is made from both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator, validate
from pydantic import ValidationError

from millrace.mirror.control.http.bodies import NothingBody, Selection, SkipBody, ThrottleBody
from millrace.mirror.control.http.messages import Refusal
from millrace.mirror.control.http.routes import ROUTES, describe, find
from millrace.mirror.control.wishes import Scope


def test_the_description_is_valid_openapi() -> None:
    document = json.loads(json.dumps(describe("1.2.3")))
    assert document["openapi"].startswith("3.1")
    validate(document, cls=OpenAPIV31SpecValidator)


def test_every_route_is_described_and_nothing_else() -> None:
    paths = describe("1")["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}


def test_every_change_is_a_post_with_a_body_and_can_be_refused() -> None:
    for path, methods in describe("1")["paths"].items():
        for method, operation in methods.items():
            if method == "get":
                assert "requestBody" not in operation
                continue
            assert operation["requestBody"]["required"] is True, path
            assert {"200", "400", "401", "403", "415"} <= set(operation["responses"]), path
            assert operation["security"] == [{"token": []}, {}]


def test_schemas_are_the_models_themselves() -> None:
    """A body that the description allows is taken, and one that it forbids is refused."""
    schemas = describe("1")["components"]["schemas"]
    cases: list[tuple[type, dict[str, Any]]] = [
        (Selection, {"source": "ewr"}),
        (Selection, {"source": "ewr", "topic": "flights", "partition": 0}),
        (Selection, {"source": 1}),
        (Selection, {"sauce": "ewr"}),
        (Selection, {"source": "ewr", "topic": "f", "partition": -1}),
        (Selection, {"all": "true"}),
        (SkipBody, {"source": "ewr", "topic": "f", "partition": 0, "from": 7, "class": "expired"}),
        (SkipBody, {"source": "ewr", "topic": "f", "partition": 0, "from": 7, "class": "other"}),
        (SkipBody, {"source": "ewr", "topic": "f"}),
        (ThrottleBody, {"source": "ewr", "bytes_per_second": 1}),
        (ThrottleBody, {"source": "ewr", "bytes_per_second": None}),
        (ThrottleBody, {"source": "ewr", "bytes_per_second": 0}),
        (ThrottleBody, {"source": "ewr"}),
        (NothingBody, {}),
        (NothingBody, {"x": 1}),
    ]
    for model, body in cases:
        schema = {**schemas[model.__name__], "$defs": schemas}
        text = json.dumps(schema).replace("#/components/schemas/", "#/$defs/")
        allowed = Draft202012Validator(json.loads(text)).is_valid(body)
        try:
            model.model_validate_json(json.dumps(body))  # type: ignore[attr-defined]
            taken = True
        except ValidationError:
            taken = False
        assert allowed == taken, (model.__name__, body)


@pytest.mark.parametrize(
    ("body", "scope"),
    [
        ({"source": "ewr"}, Scope("ewr")),
        ({"source": "ewr", "topic": "flights"}, Scope("ewr", "flights")),
        ({"topic": "flights"}, Scope(None, "flights")),
        ({"source": "ewr", "topic": "flights", "partition": 3}, Scope("ewr", "flights", 3)),
        ({"all": True}, Scope()),
    ],
)
def test_a_selection_is_a_scope(body: dict[str, Any], scope: Scope) -> None:
    assert Selection.model_validate_json(json.dumps(body)).scope == scope


@pytest.mark.parametrize(
    "body", [{}, {"all": False}, {"all": True, "source": "ewr"}, {"source": "ewr", "partition": 1}]
)
def test_everything_must_be_asked_for_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Selection.model_validate_json(json.dumps(body))


def test_a_gap_is_named_whole_or_not_at_all() -> None:
    where = {"source": "ewr", "topic": "f", "partition": 0}
    with pytest.raises(ValidationError):
        SkipBody.model_validate({**where, "from": 7})
    with pytest.raises(ValidationError):
        SkipBody.model_validate_json(json.dumps({**where, "class": "expired"}))
    assert SkipBody.model_validate(where).from_offset is None


def test_unknown_paths_and_wrong_methods_are_told_apart() -> None:
    assert find("HEAD", "/metrics").name == "metrics"
    with pytest.raises(Refusal) as caught:
        find("GET", "/pause")
    assert (caught.value.status, dict(caught.value.headers)) == (405, {"Allow": "POST"})
    with pytest.raises(Refusal) as caught:
        find("DELETE", "/status")
    assert caught.value.status == 405
    with pytest.raises(Refusal) as caught:
        find("GET", "/nothing")
    assert caught.value.status == 404
