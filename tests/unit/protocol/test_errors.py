"""The table of error codes against the protocol's own, both ways."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker import errors


def test_every_code_of_the_protocol_has_its_class() -> None:
    for code in ErrorCode:
        if code is ErrorCode.none:
            continue
        error = errors.error_for_code(code.value, "why")
        assert error.code == code.value
        assert error.name == code.name.upper()
        assert error.retriable == code.retriable
        assert str(error) == "why"


def test_every_class_has_its_own_code() -> None:
    classes = [cls for cls in errors.KafkaError.__subclasses__() if cls is not errors.UnknownErrorCode]
    assert {cls.code for cls in classes} == {code.value for code in ErrorCode} - {0}
    assert len({cls.code for cls in classes}) == len(classes)
    assert all(type(errors.error_for_code(cls.code)) is cls for cls in classes)


def test_unknown_code_keeps_its_number() -> None:
    error = errors.error_for_code(9999)
    assert isinstance(error, errors.UnknownErrorCode)
    assert "9999" in str(error)


def test_code_of_no_error_is_refused() -> None:
    with pytest.raises(ValueError, match="no error"):
        errors.error_for_code(0)


def test_message_defaults_to_the_code_s_name() -> None:
    assert str(errors.OffsetOutOfRange()) == "offset out of range"


def test_fatal_errors_have_exit_statuses_of_their_own() -> None:
    of_the_tree = [cls for cls in errors.FatalError.__subclasses__() if cls.__module__ == errors.__name__]
    statuses = [cls.exit_status for cls in of_the_tree]
    assert len(statuses) > 5
    assert len(set(statuses)) == len(statuses)
    assert 0 not in statuses


def test_config_error_names_path_value_and_expectation() -> None:
    error = errors.ConfigError("broker.yaml: id", -1, "an integer from 0")
    assert str(error) == "broker.yaml: id: got -1, expected an integer from 0"
