"""How tasks on other machines are let into clusters: a cluster's login in a form that travels.

`connect` in `range_reader` asks `security_of` for what a `Cluster` takes. A login is one of three:

- a `security:` section of audit.yaml, whose references (files, variables) are followed where it is used;
- `Carried`: such a section with the contents of what it refers to. The driver makes it for executors on other
  machines (`carry`), which have none of those files;
- `ClientProperties`: settings of Apache Kafka's Java client, as users of `format("millrace")` give them.

What must stay true: a secret stands in no repr, no error, no option and no name. It travels inside the
pickled function of a task, which Spark shows nowhere; who can read the traffic of the Spark cluster can read
that, too, unless Spark encrypts it (`spark.network.crypto.enabled`). On an executor, what TLS wants as files
is in memory only, and gone with the Python worker.
"""

from __future__ import annotations

import copy
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from millrace.broker.client.client_properties import security_of as security_of_properties
from millrace.broker.client.security import Security
from millrace.broker.config_file import ConfigText, check_config
from millrace.broker.errors import ConfigError

Section = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Carried:
    """A section whose files and variables travel with it: {"file": name} is a name of `contents`."""

    section: Section
    contents: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientProperties:
    """Names and values as in a client file of Apache Kafka."""

    values: Mapping[str, str] = field(repr=False)


Login = Section | Carried | ClientProperties


def security_of(cluster: str, login: Login) -> Security:
    """The checked login. Raises ConfigError where what it refers to is not on this machine."""
    if isinstance(login, ClientProperties):
        return security_of_properties(login.values, "option kafka", Path())
    where = f"security of cluster {cluster}, on {platform.node()}"
    section = _unpacked(login) if isinstance(login, Carried) else dict(login)
    return check_config(Security, ConfigText(where, section))


def carry(cluster: str, login: Login) -> Login:
    """The same login with all that it refers to. A command for tokens stays a command: it must be there.

    Raises ConfigError where a file or variable cannot be read here.
    """
    if isinstance(login, Carried | ClientProperties):
        return login
    contents: dict[str, bytes] = {}

    def pack(kind: str, value: str) -> dict[str, str]:
        name = f"{len(contents)}-{Path(value).name if kind == 'file' else 'variable'}"
        contents[name] = _content(cluster, kind, value)
        return {"file": name}

    return Carried(_with_references(login, pack), contents)


def _content(cluster: str, kind: str, value: str) -> bytes:
    try:
        return Path(value).read_bytes() if kind == "file" else os.environ[value].encode()
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except KeyError:
        reason = "not set"
    raise ConfigError(f"security of cluster {cluster}", value, f"a {kind} that can be read here ({reason})")


def _with_references(section: Section, packed: Callable[[str, str], dict[str, str]]) -> dict[str, Any]:
    """A copy in which each file and variable is what `packed(kind, value)` gives for it."""
    made = copy.deepcopy(dict(section))
    for name in ("ca", "cert", "key"):
        if name in made.get("ssl", {}):
            made["ssl"][name] = packed("file", made["ssl"][name])["file"]
    token = made.get("sasl", {}).get("token", {})
    if "ca" in token:
        token["ca"] = packed("file", token["ca"])["file"]
    for holder, name in (
        (made.get("ssl", {}), "key_password"),
        (made.get("sasl", {}), "password"),
        (made.get("sasl", {}), "token"),
        (token, "client_secret"),
    ):
        secret = holder.get(name) or {}
        for kind in ("file", "env"):
            if kind in secret:
                secret.update(packed(kind, secret.pop(kind)))
                break
    return made


def _unpacked(login: Carried) -> dict[str, Any]:
    """The section with paths of this process."""
    return _with_references(login.section, lambda _, name: {"file": _as_file(login.contents[name])})


@cache
def _as_file(content: bytes) -> str:
    """A path that reads as the content, as long as this process lives. A worker is ended without a chance to
    clean up behind itself, so that nothing is written to a disk where the system can do without."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("millrace-login")
        path = f"/proc/self/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="millrace-login-")  # only this user may read it
    with open(handle, "wb", closefd=not path.startswith("/proc/")) as file:
        file.write(content)
    return path
