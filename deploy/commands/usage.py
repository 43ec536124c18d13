"""What is wrong with a command line, in the form of our own errors: where, what was found, what is expected.

For `cli.py`, which prints it. Typer says it in words of its own, and of pydantic's, which reads the values.
"""

from __future__ import annotations

from typing import Any

import typer


def usage_message(error: Exception) -> str:
    """One line. `error` is what Typer raised instead of running a command."""
    if type(error) is typer.BadParameter:  # a missing one is of a class below it
        found = _refused_value(error)
        if found is not None:
            return found
        where = error.param_hint if isinstance(error.param_hint, str) else _name(error.param)
        return f"{where}: {error.message}" if where else error.message
    return error.format_message() if hasattr(error, "format_message") else str(error)


def _refused_value(error: typer.BadParameter) -> str | None:
    """None where it is not pydantic that refused a value."""
    mistakes = getattr(error.__cause__, "errors", None)
    if mistakes is None or error.param is None:
        return None
    from millrace.broker.expectations import expectation

    mistake = mistakes()[0]
    choices = _choices(error.param)
    expected = f"one of {', '.join(choices)}" if choices else expectation(mistake)
    return f"{_name(error.param)}: got {mistake['input']!r}, expected {expected}"


def _choices(parameter: Any) -> list[str]:
    choices = getattr(parameter.type_descriptor, "choices", None) or ()
    return [str(getattr(each, "value", each)) for each in choices]


def _name(parameter: Any) -> str:
    """The long name of an option, as a person types it."""
    if parameter is None:
        return ""
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
