"""Mistakes in config files: the file, the line, the field, the value and what was expected."""

from __future__ import annotations

from pathlib import Path

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
    assert mistake(tmp_path, text) == "room.yaml:6: shelves.EWR.books[1]: got 7, expected text"


def test_missing_key_names_the_line_of_its_parent(tmp_path):
    found = mistake(tmp_path, "name: study\nshelves:\n  a: {}\n")
    assert found == "room.yaml:3: shelves.a.books: got nothing, expected a value: this key is required"


def test_unknown_key_at_the_top_lists_those_that_exist(tmp_path):
    found = mistake(tmp_path, "name: study\nshelfs: {}\n")
    assert found == "room.yaml:2: shelfs: got {}, expected one of name, shelves (did you mean shelves?)"


def test_unknown_key_deep_in_the_file_lists_those_of_its_place_and_names_the_one_that_was_meant(tmp_path):
    found = mistake(tmp_path, "name: s\nshelves: {a: {books: [x], widht_mm: 2}}\n")
    assert found == (
        "room.yaml:2: shelves.a.widht_mm: got 2, expected one of books, width_mm (did you mean width_mm?)"
    )


@pytest.mark.parametrize("value", ["2026-11-21", "2026-11-21T08:00:00+00:00"])
def test_a_date_is_shown_as_it_is_written(tmp_path, value):
    assert mistake(tmp_path, f"name: {value}\n") == f"room.yaml:1: name: got {value}, expected text"


@pytest.mark.parametrize("value", ["2026-13-01", "2026-02-30T00:00:00Z", "0b_"])
def test_date_or_number_that_does_not_exist_is_named_by_its_line_and_not_shown(tmp_path, value):
    found = mistake(tmp_path, f"shelves: {{}}\nname: {value}\n")
    assert found == (
        f"{tmp_path}/room.yaml:2: got a date, time or number that does not exist, "
        "expected one that does, or text in quotes"
    )


def test_branch_of_a_union_is_not_part_of_the_path_and_counts_once(tmp_path):
    found = mistake(tmp_path, "name: s\nshelves: {a: {books: [], width_mm: {}}}\n")
    assert found.startswith("room.yaml:2: shelves.a.width_mm: got {}, expected ")
    assert "more)" not in found


def test_further_mistakes_are_counted_and_each_is_told(tmp_path):
    path = tmp_path / "room.yaml"
    path.write_text("name: 1\nshelves: {}\nx: 1\ny: 2\n")
    with pytest.raises(ConfigError) as caught:
        check_config(Room, read_config(path, "name, shelves"))
    assert str(caught.value).endswith("(and 2 more)")
    assert [str(each) for each in caught.value.each()] == [
        "room.yaml:1: name: got 1, expected text",
        "room.yaml:3: x: got 1, expected one of name, shelves",
        "room.yaml:4: y: got 2, expected one of name, shelves",
    ]


def test_long_value_is_cut(tmp_path):
    found = mistake(tmp_path, "name: [" + "a, " * 100 + "a]\n")
    assert "…" in found
    assert len(found) < 200


def test_broken_yaml_names_its_line(tmp_path):
    assert "room.yaml:2: got " in mistake(tmp_path, "name: study\nshelves: }\n")


@pytest.mark.parametrize("text", ["[" * 5_000, "a: " + "{b: " * 5_000])
def test_what_is_nested_too_deep_is_one_line(tmp_path, text):
    said = mistake(tmp_path, text)
    assert said.endswith("got 'hundreds of lists or mappings in each other', expected few of them")


def test_value_from_no_file_is_named_by_its_field_alone():
    with pytest.raises(ConfigError, match=r"^name: got nothing"):
        check_config(Room, ConfigText("", {}))


@pytest.mark.parametrize(
    ("text", "line", "key", "before"),
    [
        ("window: 10s\ntopics: [a]\nwindow: 20s\n", 3, "window", 1),
        ("clusters:\n  ewr:\n    tier: source\n    tier: aggregate\n", 4, "tier", 3),
        ("sources:\n- {cluster: a, cluster: b}\n", 2, "cluster", 2),
    ],
)
def test_a_key_that_stands_twice_is_a_mistake(tmp_path: Path, text: str, line: int, key: str, before: int):
    """YAML takes the last one, and an operator looks at the first."""
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, "window")
    assert f"some.yaml:{line}: {key}" in str(caught.value)
    assert f"line {before} has it" in str(caught.value)


def test_merged_and_repeated_mappings_are_no_repeated_keys(tmp_path: Path):
    path = tmp_path / "some.yaml"
    path.write_text("a: &x {k: 1}\nb: *x\nc:\n  <<: *x\n  k: 2\n")
    assert read_config(path, "a").content == {"a": {"k": 1}, "b": {"k": 1}, "c": {"k": 2}}
