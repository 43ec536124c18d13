"""Which Java is taken, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.broker.errors import JavaMissing
from millrace.deploy.java import find_java, java_home, java_version


def fake_java(folder: Path, version: str) -> Path:
    """A program that answers `-version` as a Java of that version does."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def no_jvms(tmp_path: Path) -> Path:
    return tmp_path / "no-jvms"


def test_java_home_and_path_both_good_takes_java_home(tmp_path: Path, no_jvms: Path) -> None:
    home = fake_java(tmp_path / "home", "21.0.1")
    on_path = fake_java(tmp_path / "path", "17.0.9")
    environment = {"JAVA_HOME": str(home.parent.parent), "PATH": str(on_path.parent)}
    assert find_java(environment, no_jvms) == home


def test_old_java_home_passes_over_to_the_new_one_on_path(tmp_path: Path, no_jvms: Path) -> None:
    old = fake_java(tmp_path / "home", "11.0.2")
    new = fake_java(tmp_path / "path", "17")
    environment = {"JAVA_HOME": str(old.parent.parent), "PATH": str(new.parent)}
    assert find_java(environment, no_jvms) == new


def test_no_java_on_path_takes_the_system_folder(tmp_path: Path) -> None:
    installed = fake_java(tmp_path / "jvm" / "java-17", "17.0.15")
    assert find_java({"PATH": ""}, tmp_path / "jvm") == installed


def test_no_java_at_all_says_in_one_line_what_to_install(no_jvms: Path) -> None:
    with pytest.raises(JavaMissing, match="apt-get install default-jre-headless") as caught:
        find_java({"PATH": ""}, no_jvms)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 13


def test_only_an_old_java_is_named_with_its_version(tmp_path: Path, no_jvms: Path) -> None:
    old = fake_java(tmp_path / "old", "1.8.0_402")
    with pytest.raises(JavaMissing, match=f"{old} is version 8"):
        find_java({"PATH": str(old.parent)}, no_jvms)


def test_a_program_that_is_no_java_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path / "missing") is None
    silent = fake_java(tmp_path, "17")
    silent.write_text("#!/bin/sh\nexit 0\n")
    assert java_version(silent) is None


def test_home_of_a_linked_java_is_where_it_really_lies(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "jvm", "17")
    link = tmp_path / "java"
    link.symlink_to(real)
    assert java_home(link) == tmp_path / "jvm"
