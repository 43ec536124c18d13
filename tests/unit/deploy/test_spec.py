"""The sandbox file: what is refused, and with which words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.broker.errors import ConfigError
from millrace.deploy.local.spec import DEFAULT_FILE, load_spec, parse_spec

GOOD: dict[str, Any] = {
    "name": "two",
    "data": "/tmp/two",
    "zookeeper": {"listen": "127.0.0.1:2181"},
    "clusters": {"a": {"listen": "127.0.0.1:9092"}, "b": {"listen": "127.0.0.1:9192"}},
    "mirrors": [
        {
            "name": "m",
            "target": "b",
            "sources": ["a"],
            "topics": {"include": [".*"]},
            "control": ["127.0.0.1:8090"],
        }
    ],
}


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(GOOD)
    where: Any = content
    for part in path[:-1]:
        where = where[part]
    where[path[-1]] = value
    return content


def test_file_in_the_package_is_good_and_has_three_sources_and_two_mirror_processes() -> None:
    spec = load_spec(DEFAULT_FILE)
    assert list(spec.clusters) == ["ewr", "jfk", "lga", "agg"]
    (mirror,) = spec.mirrors
    assert (mirror.target, mirror.sources, len(mirror.control)) == ("agg", ["ewr", "jfk", "lga"], 2)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["zookeeper", "listen"], "2181", "zookeeper.listen: got '2181', expected host:port"),
        (["clusters", "a", "listen"], "127.0.0.1:99999", "clusters.a.listen.*127.0.0.1:9092"),
        (["clusters", "a", "listen"], "127.0.0.1:9192", "clusters.b.listen.*nothing else here has"),
        (["clusters", "a", "color"], "red", "clusters.a.color: got 'red', expected one of listen, settings"),
        (["mirrors", 0, "target"], "c", r"mirrors\[0\].target: got 'c', expected one of a, b"),
        (["mirrors", 0, "sources"], ["x"], r"mirrors\[0\].sources: got 'x'"),
        (["mirrors"], GOOD["mirrors"] * 2, r"mirrors\[1\].name: got 'm', expected a name that no other"),
        (["mirrors", 0, "topics"], {}, r"mirrors\[0\].topics.include: got nothing"),
        (["clusters"], {}, "clusters: got {}"),
        (["name"], "Not A Name", "name: got 'Not A Name'"),
        (["unknown"], 1, "unknown: got 1, expected one of name, data"),
    ],
)
def test_wrong_value_is_refused_with_its_path_and_what_was_expected(
    path: list[Any], value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_spec(changed(path, value), where="sandbox.yaml")
    assert str(caught.value).startswith("sandbox.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\x00"])
def test_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sandbox.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sandbox\.yaml") as caught:
        load_spec(path)
    assert "\n" not in str(caught.value)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_spec(tmp_path / "none.yaml")


def test_spec_written_and_read_again_is_the_same(tmp_path: Path) -> None:
    spec = parse_spec(GOOD, where="here")
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert load_spec(path) == spec
