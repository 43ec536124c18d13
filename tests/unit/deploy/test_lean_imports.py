"""Libraries that are left out while a server is imported."""

from __future__ import annotations

import importlib
import json  # noqa: F401
import sys

import pytest

from millrace.deploy.lean_imports import without


def test_what_is_left_out_cannot_be_imported_meanwhile_and_can_afterwards() -> None:
    sys.modules.pop("sched", None)
    loaded = sys.modules["json"]
    with without("sched", "json"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("sched")
        assert sys.modules["json"] is loaded  # loaded already: it stays
    assert importlib.import_module("sched").scheduler


def test_names_are_given_free_when_the_import_fails() -> None:
    with pytest.raises(ZeroDivisionError), without("sndhdr"):
        raise ZeroDivisionError
    assert "sndhdr" not in sys.modules
