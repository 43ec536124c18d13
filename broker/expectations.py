"""What was expected where pydantic refuses a value, in the words of our own errors.

Pydantic tells of its types ("Input should be a valid tuple"); a person who wrote a file or a command line
wants to know what to write. `expectation` completes "got 0, expected …", and `one_of` does where a name is
not known. Used for config files (`config_file.py`), control calls of the mirror, the command line and the
settings of audited clients. Pure; pydantic itself is not needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

_WHOLE, _NUMBER, _LIST, _MAPPING = "a whole number", "a number", "a list", "a mapping of keys to values"
_OF_TYPE = {
    "missing": "a value",
    "extra_forbidden": "no such key",
    "string_type": "text",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "path_type": "a path",
    "json_invalid": "valid JSON",
}
_OF_BOUND = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
    "string_pattern_mismatch": ("pattern", "text of the form {}"),
    "too_long": ("max_length", "at most {}"),
}


def expectation(mistake: Mapping[str, Any]) -> str:
    """`mistake` is one of `ValidationError.errors()`. What a validator of ours has raised stays as it is."""
    kind, context = mistake["type"], mistake.get("ctx") or {}
    if kind in _OF_TYPE:
        return _OF_TYPE[kind]
    if kind in _OF_BOUND:
        bound, words = _OF_BOUND[kind]
        return words.format(_plain(context[bound]))
    match kind:
        case "literal_error" | "enum":
            return str(context["expected"]).replace("'", "")
        case "too_short":
            return f"at least {_count(context['min_length'])}"
        case "string_too_short":
            return f"at least {_count(context['min_length'])} {_characters(context['min_length'])}"
        case "string_too_long":
            return f"at most {_count(context['max_length'])} {_characters(context['max_length'])}"
    message = str(mistake["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


def one_of(names: Sequence[str], given: str) -> str:
    """All that there are, and which of them was perhaps meant."""
    close = difflib.get_close_matches(given, names, n=1)
    return f"one of {', '.join(names)}" + (f" (did you mean {close[0]}?)" if close else "")


def _plain(bound: object) -> str:
    return str(int(bound)) if isinstance(bound, float) and bound.is_integer() else str(bound)


def _count(number: int) -> str:
    return "one" if number == 1 else str(number)


def _characters(number: int) -> str:
    return "character" if number == 1 else "characters"
