"""What was expected, in plain words, whatever pydantic says of it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from millrace.broker.expectations import expectation


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Box(BaseModel):
    width: int


def _refuse(value: str) -> str:
    raise ValueError("a name that nobody has")


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, "x", "a whole number"),
        (int, 1.5, "a whole number"),
        (int, None, "a whole number"),
        (float, "x", "a number"),
        (str, 1, "text"),
        (bool, "maybe", "true or false"),
        (bool, [], "true or false"),
        (list[int], 5, "a list"),
        (tuple[int, ...], 5, "a list"),
        (dict[str, int], 5, "a mapping of keys to values"),
        (Box, 5, "a mapping of keys to values"),
        (Box, {}, "a value"),
        (Path, 5, "a path"),
        (Literal["stop", "skip"], "go", "stop or skip"),
        (Colour, "green", "red or blue"),
        (Annotated[int, Field(ge=1)], 0, "1 or more"),
        (Annotated[int, Field(le=65535)], 70000, "at most 65535"),
        (Annotated[float, Field(gt=0)], 0, "more than 0"),
        (Annotated[float, Field(lt=0.5)], 1, "less than 0.5"),
        (Annotated[str, Field(min_length=1)], "", "at least one character"),
        (Annotated[str, Field(max_length=3)], "four", "at most 3 characters"),
        (Annotated[str, Field(pattern="^a+$")], "b", "text of the form ^a+$"),
        (Annotated[list[int], Field(min_length=1)], [], "at least one"),
        (Annotated[list[int], Field(max_length=1)], [1, 2], "at most 1"),
        (Annotated[str, AfterValidator(_refuse)], "x", "a name that nobody has"),
    ],
)
def test_expectation_is_told_in_plain_words(kind: Any, value: object, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(value)
    assert expectation(caught.value.errors(include_url=False)[0]) == words
