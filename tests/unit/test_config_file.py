"""Mistakes in config files: the file, the line, the field, the value and what was expected."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from millrace.broker.config_file import ConfigText, check_config, read_config
from millrace.broker.errors import ConfigError


class Shelf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    books: list[str]
    width_mm: int | str | list[int] = 1


class Room(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    shelves: dict[str, Shelf] = {}


def mistake(tmp_path, text: str) -> str:
    path = tmp_path / "room.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_config(Room, read_config(path, "name, shelves"))
    return str(caught.value)


def test_nested_mistake_names_line_field_value_and_expectation(tmp_path):
    text = "name: study\nshelves:\n  EWR:\n    books:\n      - ok\n      - 7\n"
    assert mistake(tmp_path, text) == "room.yaml:6: shelves.EWR.books[1]: got 7, expected a valid string"


def test_missing_key_names_the_line_of_its_parent(tmp_path):
    found = mistake(tmp_path, "name: study\nshelves:\n  a: {}\n")
    assert found == "room.yaml:3: shelves.a.books: got nothing, expected a value: this key is required"


def test_unknown_key_at_the_top_lists_those_that_exist(tmp_path):
    found = mistake(tmp_path, "name: study\nshelfs: {}\n")
    assert found == "room.yaml:2: shelfs: got {}, expected one of name, shelves"


def test_branch_of_a_union_is_not_part_of_the_path_and_counts_once(tmp_path):
    found = mistake(tmp_path, "name: s\nshelves: {a: {books: [], width_mm: {}}}\n")
    assert found.startswith("room.yaml:2: shelves.a.width_mm: got {}, expected ")
    assert "more)" not in found


def test_further_mistakes_are_counted(tmp_path):
    assert mistake(tmp_path, "name: 1\nshelves: {}\nx: 1\ny: 2\n").endswith("(and 2 more)")


def test_long_value_is_cut(tmp_path):
    found = mistake(tmp_path, "name: [" + "a, " * 100 + "a]\n")
    assert "…" in found
    assert len(found) < 200


def test_broken_yaml_names_its_line(tmp_path):
    assert "room.yaml:2: got " in mistake(tmp_path, "name: study\nshelves: }\n")


def test_value_from_no_file_is_named_by_its_field_alone():
    with pytest.raises(ConfigError, match=r"^name: got nothing"):
        check_config(Room, ConfigText("", {}))
