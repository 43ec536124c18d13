"""Config files: YAML in, checked pydantic models out, and every mistake one line that says where to look.

Called by the `load_config` of the broker, the mirror, the audit and the sandbox. A mistake is a `ConfigError`
whose path names the file, the line and the field (`mirror.yaml:7: sources[0].bootstrap`), with the value
found and what was expected; of several the first, with the others in its `further`. Unknown keys are mistakes
(the models forbid them). A `ConfigError` that a model's own validator raises keeps its field and gets the
file's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, InstanceOf, ValidationError

from millrace.broker.errors import ConfigError
from millrace.broker.expectations import expectation, one_of
from millrace.broker.protocol.address import ADDRESS_EXPECTED, Address

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]

_MERGE_TAG = "tag:yaml.org,2002:merge"

# A value is shown so that it is recognised, not so that the line wraps around the screen.
SHOWN_VALUE_SIZE = 80


# A password may stand where none belongs: below these keys, an error shows only what cannot be one.
SECRET_KEYS = frozenset({"security", "password", "key_password", "client_secret", "token"})
PUBLIC_KEYS = frozenset(
    {"protocol", "mechanism", "ca", "cert", "key", "verify_hostname", "endpoint", "file", "env"}
)


def _server_address(value: object) -> str:
    return str(Address.parse(_address_text(value)))


def _listen_address(value: object) -> Address:
    return value if isinstance(value, Address) else Address.parse_listener(_address_text(value))


def _address_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(ADDRESS_EXPECTED)
    return value


ServerAddress = Annotated[str, BeforeValidator(_server_address)]
"""`host:port` of a server to connect to (`Address.parse`); it stays text, as clients take it."""

ListenAddress = Annotated[InstanceOf[Address], BeforeValidator(_listen_address)]
"""`host:port` to listen on (`Address.parse_listener`)."""


OLDER_NAME: dict[str, Any] = {"is_older_name": True}
"""`json_schema_extra` of a field that is taken and no longer offered."""


class _Nothing:
    """Shown where a required key is missing."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


@dataclass(frozen=True, slots=True)
class ConfigText:
    """A parsed file: its values, and the tree that knows on which line each stands.

    `name` is empty for values that come from no file, such as command-line options. Relative paths in the
    file are meant from `folder`; models that hold some find it in their validation context.
    """

    name: str
    content: dict[str, Any]
    tree: yaml.Node | None = None
    folder: Path | None = None

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

    def where(self, path: str) -> str:
        """`name:line: path` for a path such as `sources[0].topics.include`."""
        return _path(self.place(_location(path, self.content)), path)


class _NoSuchValue(Exception):
    """A scalar has the form of a date or number, and is none: `2026-13-01`. `line` counts from 0. It is not
    shown: it may be a password."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Loader(yaml.SafeLoader):
    """YAML's own loader lets the bare ValueError of such a scalar out, which does not say where it stands."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError):
            raise _NoSuchValue(node.start_mark.line) from None


def read_config(path: Path | str, keys: str) -> ConfigText:
    """Parse a file whose top level is a mapping; `keys` names them for the error. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error), "a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "bytes that are not UTF-8", "a YAML file in UTF-8") from None
    except _NoSuchValue as error:
        found = _Shortened("a date, time or number that does not exist")
        raise ConfigError(f"{path}:{error.line + 1}", found, "one that does, or text in quotes") from None
    except RecursionError:  # PyYAML's, at some hundred of them
        raise ConfigError(str(path), "hundreds of lists or mappings in each other", "few of them") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(where, getattr(error, "problem", None) or "broken text", "valid YAML") from None
    if tree is not None and (repeated := _repeated_key(tree)) is not None:
        first, second = repeated
        where = f"{path}:{second.start_mark.line + 1}"
        raise ConfigError(
            f"{where}: {second.value}", "the key again", f"it once; line {first.start_mark.line + 1} has it"
        )
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), _shown(content), f"a mapping with the keys {keys}")
    return ConfigText(path.name, content, tree, path.absolute().parent)


def _repeated_key(tree: yaml.Node) -> tuple[yaml.ScalarNode, yaml.ScalarNode] | None:
    """A key that stands twice in one mapping: YAML would silently take the last."""
    waiting, seen = [tree], {id(tree)}
    while waiting:
        node = waiting.pop()
        children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            keys: dict[str, yaml.ScalarNode] = {}
            for key, value in node.value:
                children.append(value)
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
                    first = keys.setdefault(key.value, key)
                    if first is not key:
                        return first, key
        for child in children:
            if id(child) not in seen:  # an alias stands for a node that was looked at
                seen.add(id(child))
                waiting.append(child)
    return None


def check_config(
    model: type[Model], text: ConfigText, expectations: Mapping[str, str] | None = None
) -> Model:
    """The checked model. `expectations` says in words what a top-level field takes, where pydantic's own
    words would not help. Raises ConfigError."""
    try:
        return model.model_validate(text.content, context={"folder": text.folder})
    except ValidationError as error:
        raise all_in_one(_mistakes(model, error, text, expectations or {})) from None
    except ConfigError as error:
        raise all_in_one(
            [ConfigError(text.where(each.path), each.value, each.expected) for each in error.each()]
        ) from None


def all_in_one(mistakes: list[ConfigError]) -> ConfigError:
    """The first, which has the others in its `further`; there is one at least."""
    first, *further = mistakes
    return ConfigError(first.path, first.value, first.expected, tuple(further))


def _mistakes(
    model: type[BaseModel], error: ValidationError, text: ConfigText, expectations: Mapping[str, str]
) -> list[ConfigError]:
    """One for each field, in pydantic's order."""
    found: dict[str, ConfigError] = {}
    for mistake in error.errors(include_url=False):
        if _follows_from_another(mistake, error):
            continue
        field = _field_path(mistake["loc"], text.content, missing=mistake["type"] == "missing")
        if field not in found:  # of a union, every branch has something to say
            found[field] = _mistake(model, mistake, _path(text.place(mistake["loc"]), field), expectations)
    return list(found.values())


def _mistake(model: type[BaseModel], mistake: Any, path: str, expectations: Mapping[str, str]) -> ConfigError:
    location = mistake["loc"]
    top_level = str(location[0]) if location else ""
    if mistake["type"] == "missing":
        return ConfigError(path, NOTHING, expectations.get(top_level, "a value: this key is required"))
    shown = _shown(mistake["input"], location)
    if mistake["type"] == "extra_forbidden":
        return ConfigError(path, shown, _known_keys(model, location))
    expected = expectations.get(top_level) or expectation(mistake)
    return ConfigError(path, shown, expected)


def _known_keys(model: type[BaseModel], location: Location) -> str:
    """What stands where the unknown last part of `location` does, and which of it was perhaps meant."""
    models = [model]
    for part in location[:-1]:
        # An index, a name of the user's and a branch of a union are no field: what holds them stays.
        below = [each for one in models for each in _models_of(one, part)]
        models = below or models
    keys = list(dict.fromkeys(key for each in models for key in _keys(each)))
    return one_of(keys, str(location[-1]))


def _models_of(model: type[BaseModel], key: int | str) -> list[type[BaseModel]]:
    return [
        found
        for name, field in model.model_fields.items()
        if key in (name, field.alias)
        for found in _models_in(field.annotation)
    ]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a type names, however deep: those of `dict[str, Shelf | None]` are `[Shelf]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for each in get_args(annotation) for found in _models_in(each)]


def _follows_from_another(mistake: Any, error: ValidationError) -> bool:
    """pydantic counts only the good items of a list: one with a single bad item is also "too short"."""
    location = mistake["loc"]
    return mistake["type"] == "too_short" and any(
        len(other["loc"]) > len(location) and other["loc"][: len(location)] == location
        for other in error.errors(include_url=False)
    )


def _keys(model: type[BaseModel]) -> list[str]:
    return [
        field.alias or name
        for name, field in model.model_fields.items()
        if field.json_schema_extra != OLDER_NAME
    ]


def _path(place: str, field: str) -> str:
    return f"{place}: {field}" if place and field else place or field


def _location(path: str, content: Any) -> Location:
    """The parts of a path. Keys may hold dots, so a part is the longest key of the content that fits; what
    the content has not (a default) ends it."""
    parts: list[int | str] = []
    while path:
        index = re.match(r"\[(\d+)\]", path)
        if index is not None and isinstance(content, list) and int(index[1]) < len(content):
            part: int | str = int(index[1])
            path = path[index.end() :].removeprefix(".")
        elif isinstance(content, dict) and (keys := [str(key) for key in content if _opens(path, str(key))]):
            part = max(keys, key=len)
            path = path[len(part) :].removeprefix(".")
        else:
            break
        parts.append(part)
        content = _below(content, part)
    return tuple(parts)


def _below(content: Any, part: int | str) -> Any:
    if isinstance(content, list) and isinstance(part, int):
        return content[part]
    return next(value for key, value in content.items() if str(key) == part)


def _opens(path: str, key: str) -> bool:
    return path.startswith(key) and path[len(key) : len(key) + 1] in ("", ".", "[")


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


def _has_secrets(value: object) -> bool:
    if isinstance(value, dict):
        return not SECRET_KEYS.isdisjoint(value) or any(_has_secrets(each) for each in value.values())
    return isinstance(value, list | tuple) and any(_has_secrets(each) for each in value)


class _Shortened:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(value: object, location: Location = ()) -> object:
    if isinstance(value, dict | list | tuple) and _has_secrets(value):
        return _Shortened("something that is not shown here, as it may hold secrets")
    is_public = isinstance(value, bool | None) or (location and location[-1] in PUBLIC_KEYS)
    if not SECRET_KEYS.isdisjoint(location) and not is_public:
        return _Shortened("a value that is not shown here, as it may be a secret")
    if isinstance(value, date):  # YAML makes one of 2026-11-21
        return _Shortened(value.isoformat())
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
