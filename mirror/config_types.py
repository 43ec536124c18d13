"""The kinds of values in mirror.yaml: names, patterns, starting points. Pure, but for a name that
the environment gives.

Called by `config` and by the sections that other modules add to it. Each kind is checked when the file is
read, and says in words what was expected.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from millrace.broker.times import time_ms

MEBIBYTE = 1 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def _name(value: str) -> str:
    if NAME.fullmatch(value) is None:
        raise ValueError("a name of letters, digits, '.', '_' and '-'")
    return value


def _from_environment(value: Any) -> Any:
    """`{env: NAME}`: so that workers on several machines can have one file and names of their own."""
    if not isinstance(value, dict):
        return value
    if set(value) != {"env"} or not isinstance(value["env"], str):
        raise ValueError("a name, or {env: VARIABLE}")
    if not os.environ.get(value["env"]):
        raise ValueError("an environment variable that is set")
    return os.environ[value["env"]]


def _worker_name(value: str) -> str:
    if NAME.fullmatch(value) is None or value in (".", ".."):
        raise ValueError("a name of at most 200 letters, digits, '.', '_' and '-', or {env: VARIABLE}")
    return value


def _topic_name(value: str) -> str:
    if TOPIC_NAME.fullmatch(value) is None or value in (".", ".."):
        raise ValueError("a topic's name: at most 249 letters, digits, '.', '_' and '-'")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        hint = "; whatever a name begins with is .*" if value.startswith("*") else ""
        raise ValueError(f"a regular expression ({error}{hint})") from None
    return value


def _start(value: Any) -> Any:
    if isinstance(value, str) and value in ("earliest", "latest"):
        return value
    try:
        return time_ms(value)
    except ValueError as problem:
        raise ValueError(f"earliest, latest or {problem}") from None


Name = Annotated[str, AfterValidator(_name)]
WorkerName = Annotated[str, BeforeValidator(_from_environment), AfterValidator(_worker_name)]
TopicName = Annotated[str, AfterValidator(_topic_name)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Start = Annotated[Literal["earliest", "latest"] | int, BeforeValidator(_start)]


class Section(BaseModel):
    """A part of the file: unknown keys are mistakes, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
