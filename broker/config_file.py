"""Config files: YAML in, checked pydantic models out, and every mistake one line that says where to look.

Called by the `load_config` of the broker, the mirror, the audit and the sandbox. A mistake is a `ConfigError`
whose path names the file, the line and the field (`mirror.yaml:7: sources[0].bootstrap`), with the value
found and what was expected; of several the first, and how many more there are. Unknown keys are mistakes (the
models forbid them). A `ConfigError` that a model's own validator raises keeps its field and gets the file's
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from millrace.broker.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]

# A value is shown so that it is recognised, not so that the line wraps around the screen.
SHOWN_VALUE_SIZE = 80


class _Nothing:
    """Shown where a required key is missing."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


@dataclass(frozen=True, slots=True)
class ConfigText:
    """A parsed file: its values, and the tree that knows on which line each stands.

    `name` is empty for values that come from no file, such as command-line options.
    """

    name: str
    content: dict[str, Any]
    tree: yaml.Node | None = None

    def place(self, location: Location) -> str:
        """`name:line` of the deepest part of `location` that the file has."""
        if self.tree is None:
            return self.name
        node, line = self.tree, None
        for part in location:
            found = _child(node, part)
            if found is not None:  # pydantic also names branches of unions, which are in no file
                node, line = found
        return self.name if line is None else f"{self.name}:{line + 1}"


def read_config(path: Path | str, keys: str) -> ConfigText:
    """Parse a file whose top level is a mapping; `keys` names them for the error. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error), "a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "bytes that are not UTF-8", "a YAML file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(where, getattr(error, "problem", None) or "broken text", "valid YAML") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), _shown(content), f"a mapping with the keys {keys}")
    return ConfigText(path.name, content, tree)


def check_config(
    model: type[Model], text: ConfigText, expectations: Mapping[str, str] | None = None
) -> Model:
    """The checked model. `expectations` says in words what a top-level field takes, where pydantic's own
    words would not help. Raises ConfigError."""
    try:
        return model.model_validate(text.content)
    except ValidationError as error:
        raise _first_mistake(model, error, text, expectations or {}) from None
    except ConfigError as error:
        raise ConfigError(_path(text.name, error.path), error.value, error.expected) from None


def _first_mistake(
    model: type[BaseModel], error: ValidationError, text: ConfigText, expectations: Mapping[str, str]
) -> ConfigError:
    mistakes = error.errors(include_url=False)
    fields = [
        _field_path(mistake["loc"], text.content, missing=mistake["type"] == "missing")
        for mistake in mistakes
    ]
    first, location = mistakes[0], mistakes[0]["loc"]
    more = len(set(fields)) - 1
    counted = f" (and {more} more)" if more else ""
    path = _path(text.place(location), fields[0])
    top_level = str(location[0]) if location else ""
    if first["type"] == "missing":
        expected = expectations.get(top_level, "a value: this key is required")
        return ConfigError(path, NOTHING, expected + counted)
    if first["type"] == "extra_forbidden":
        known = (
            f"one of {', '.join(_keys(model))}" if len(location) == 1 else "no such key: check its spelling"
        )
        return ConfigError(path, _shown(first["input"]), known + counted)
    expected = expectations.get(top_level) or _in_words(first["type"], first["msg"])
    return ConfigError(path, _shown(first["input"]), expected + counted)


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _path(place: str, field: str) -> str:
    return f"{place}: {field}" if place and field else place or field


def _in_words(kind: str, message: str) -> str:
    if kind == "too_short":
        return "at least one"
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


def _field_path(location: Location, content: Any, *, missing: bool) -> str:
    """`sources[0].topics.include`: the parts that the file has, as pydantic also names branches of unions."""
    path = ""
    for depth, part in enumerate(location):
        is_last = depth == len(location) - 1
        if isinstance(part, int) and isinstance(content, list) and part < len(content):
            path += f"[{part}]"
            content = content[part]
        elif isinstance(content, dict) and part in content:
            path += f".{part}" if path else str(part)
            content = content[part]
        elif missing and is_last:
            path += f".{part}" if path else str(part)
    return path


class _Shortened:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(value: object) -> object:
    text = repr(value)
    return value if len(text) <= SHOWN_VALUE_SIZE else _Shortened(text[: SHOWN_VALUE_SIZE - 1] + "…")


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, int] | None:
    """The value below `node` under a key or index, and the line on which the key (or item) stands."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value, key.start_mark.line
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line
    return None
