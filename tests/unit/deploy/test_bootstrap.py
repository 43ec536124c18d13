"""The set-up script on machines that lack something and where it may not install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "bootstrap.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, and programs of its own before all others: an `id` that is not root."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(SCRIPT, tmp_path / "deploy")
    program(tmp_path, "id", "echo 1000")
    return tmp_path


def program(checkout: Path, name: str, text: str) -> None:
    path = checkout / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def bootstrap(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(checkout / "deploy" / "bootstrap.sh"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path, **environment},
    )


def test_old_python_is_refused_by_name(checkout: Path) -> None:
    program(checkout, "python-old", "exit 1")
    answer = bootstrap(checkout, "demo", PYTHON="python-old")
    assert answer.returncode == 1
    assert answer.stderr == "millrace: PYTHON=python-old is not a Python 3.11 or newer\n"


def test_python_without_ensurepip_says_what_to_install(checkout: Path) -> None:
    program(
        checkout,
        "python-bare",
        'case "$2" in *ensurepip*) exit 1;; *venv*) echo python3.11-venv;; esac',
    )
    answer = bootstrap(checkout, "test", PYTHON="python-bare")
    assert answer.returncode == 1
    assert answer.stderr == (
        "millrace: python-bare lacks ensurepip: run  sudo apt-get install python3.11-venv\n"
    )


@pytest.mark.parametrize("arguments", [[], ["other"]])
def test_wrong_argument_shows_the_usage(checkout: Path, arguments: list[str]) -> None:
    answer = bootstrap(checkout, *arguments)
    assert answer.returncode == 1
    assert "demo|test" in answer.stderr


def test_failed_install_of_the_package_is_a_failure(checkout: Path) -> None:
    program(
        checkout,
        "python-whole",
        'if [ "$2" = venv ]; then mkdir -p .venv/bin; '
        'printf "#!/bin/sh\\n[ \\"\\$3\\" != install ]\\n" > .venv/bin/python; chmod +x .venv/bin/python; fi',
    )
    answer = bootstrap(checkout, "demo", PYTHON="python-whole")
    assert answer.returncode == 1
    assert "installing the pinned dependencies" in answer.stderr


TEST_PROGRAMS = ("kcat", "openssl", "chromium", "mvn", "ip", "mkfs.ext4", "prometheus", "promtool", "Burrow")


def machine(checkout: Path, *, lacking: str) -> dict[str, str]:
    """An environment in which everything that `bootstrap.sh test` looks for is there but one program."""
    for tool in ("bash", "cat", "dirname", "head", "mktemp", "rm", "sed", "tail"):
        (checkout / "bin" / tool).symlink_to(str(shutil.which(tool)))
    for name in TEST_PROGRAMS:
        if name != lacking:
            program(checkout, name, "exit 0")
    program(checkout, "java", """echo 'openjdk version "21.0.1"' >&2""")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(checkout / "bin" / "prometheus")
    return {"PATH": str(checkout / "bin"), "JAVA_HOME": ""}


@pytest.mark.parametrize(
    ("lacking", "package"), [("kcat", "kcat"), ("ip", "iproute2"), ("mkfs.ext4", "e2fsprogs")]
)
def test_root_gets_what_the_tests_need(checkout: Path, lacking: str, package: str) -> None:
    environment = machine(checkout, lacking=lacking)
    program(checkout, "id", "echo 0")
    program(checkout, "apt-get", f'echo "$*" >> {checkout}/asked')
    answer = bootstrap(checkout, "test", **environment)
    assert answer.returncode == 0, answer.stderr
    update, install = (checkout / "asked").read_text().splitlines()
    assert update.startswith("update")
    assert install.split()[-1] == package


def test_others_are_told_what_the_tests_need(checkout: Path) -> None:
    answer = bootstrap(checkout, "test", **machine(checkout, lacking="ip"))
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == (
        "millrace: the tests need ip: run  sudo apt-get install iproute2"
    )


def test_who_cannot_mount_needs_no_program_that_makes_file_systems(checkout: Path) -> None:
    answer = bootstrap(checkout, "test", **machine(checkout, lacking="mkfs.ext4"))
    assert answer.returncode == 0, answer.stderr


def test_jars_that_cannot_be_fetched_now_do_not_stop_the_set_up(checkout: Path) -> None:
    environment = machine(checkout, lacking="none")
    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    program(checkout, "python-offline", 'case "$*" in *tests.peers.kafka*) exit 1;; esac')
    python.symlink_to(checkout / "bin" / "python-offline")
    answer = bootstrap(checkout, "test", **environment)
    assert answer.returncode == 0, answer.stderr
    (said,) = [line for line in answer.stderr.splitlines() if "Maven" in line]
    assert said == "Maven could not fetch the jars of tests/peers/kafka.py: the tests will try again"


def test_every_kernel_is_compiled_at_set_up() -> None:
    """Or the first processes that need it compile it, each for itself."""
    text = SCRIPT.read_text()
    imports = re.findall(r"^import (millrace\S+)$", text[text.index("warm_kernels() {") :], re.MULTILINE)
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, {', '.join(imports)}\nprint(*sys.modules, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    ).stdout.split()
    root = SCRIPT.parents[1]
    with_kernels = {
        f"millrace.{path.relative_to(root).with_suffix('').as_posix().replace('/', '.')}"
        for part in ("broker", "mirror", "audit", "deploy")
        for path in (root / part).rglob("*.py")
        if "import njit" in path.read_text()
    }
    assert len(with_kernels) > 9
    assert with_kernels <= set(loaded)
