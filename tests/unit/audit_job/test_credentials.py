"""Logins that travel to executors which have none of the driver's files: whole, and shown nowhere."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.scanning.credentials import Carried, carry, security_of
from millrace.audit.spark import spark_source
from millrace.broker.client.security import Security
from millrace.broker.errors import ConfigError
from tests.certificates import Authority


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Certificate and key, a login by SCRAM with the password in a file."""
    folder = tmp_path / "driver"
    authority = Authority(folder)
    own = authority.issue("auditor")
    (folder / "password").write_text("hunter2\n")
    return {
        "protocol": "SASL_SSL",
        "ssl": {"ca": str(authority.pem), "cert": str(own.cert), "key": str(own.key)},
        "sasl": {
            "mechanism": "SCRAM-SHA-512",
            "username": "auditor",
            "password": {"file": str(folder / "password")},
        },
    }


def password_of(security: Security) -> str:
    assert security.sasl is not None and security.sasl.password is not None
    return security.sasl.password.read()


def test_a_login_is_whole_where_none_of_its_files_are(section, tmp_path):
    travelling = pickle.dumps(carry("ewr", section))
    shutil.rmtree(tmp_path / "driver")
    with pytest.raises(ConfigError, match=r"security of cluster ewr, on .*No such file"):
        security_of("ewr", section)
    arrived = pickle.loads(travelling)
    security = security_of("ewr", arrived)
    assert (security.protocol, password_of(security)) == ("SASL_SSL", "hunter2")
    assert security.ssl is not None and security.ssl.ca is not None
    assert "BEGIN CERTIFICATE" in security.ssl.ca.read_text()
    assert security_of("ewr", arrived) == security, "the same files, however often tasks connect"
    assert "hunter2" not in repr(arrived) and "hunter2" not in str(arrived.section)


def test_a_variable_of_the_driver_travels_too(section, monkeypatch):
    section["sasl"]["password"] = {"env": "AUDITOR_PASSWORD"}
    monkeypatch.setenv("AUDITOR_PASSWORD", "hunter3")
    login = carry("ewr", section)
    monkeypatch.delenv("AUDITOR_PASSWORD")
    assert password_of(security_of("ewr", login)) == "hunter3"
    assert section["sasl"]["password"] == {"env": "AUDITOR_PASSWORD"}, "the config stays as it is"


def test_what_a_token_endpoint_needs_travels_and_a_command_stays_one(section, tmp_path):
    (tmp_path / "secret").write_text("hunter4")
    token = {
        "endpoint": "https://login.example.com/token",
        "client_id": "auditor",
        "client_secret": {"file": str(tmp_path / "secret")},
        "ca": section["ssl"]["ca"],
    }
    given = {"protocol": "SASL_PLAINTEXT", "sasl": {"mechanism": "OAUTHBEARER", "token": token}}
    login = carry("ewr", given)
    (tmp_path / "secret").unlink()
    sasl = security_of("ewr", login).sasl
    assert sasl is not None and sasl.token is not None and sasl.token.client_secret is not None
    assert sasl.token.client_secret.read() == "hunter4"
    given["sasl"] = {"mechanism": "OAUTHBEARER", "token": {"command": ["/bin/token"]}}
    login = carry("ewr", given)
    assert isinstance(login, Carried) and not login.contents
    sasl = security_of("ewr", login).sasl
    assert sasl is not None and sasl.token is not None and sasl.token.command == ("/bin/token",)


def test_a_file_that_the_driver_cannot_read_is_one_line(section, tmp_path):
    (tmp_path / "driver" / "password").unlink()
    with pytest.raises(ConfigError, match=r"security of cluster ewr: got .*password', expected a file that"):
        carry("ewr", section)


class Session:
    """A Spark session that keeps what it is given to run."""

    def __init__(self, master: str) -> None:
        self.sparkContext = SimpleNamespace(master=master)

    def range(self, *_: int) -> Session:
        return self

    def mapInArrow(self, function: Any, _: str) -> Any:
        (cells,) = [each for each in function.__closure__ if hasattr(each.cell_contents, "securities")]
        return cells.cell_contents.securities["ewr"]


@pytest.mark.parametrize(("master", "travels"), [("local[2]", False), ("spark://host:7077", True)])
def test_only_workers_of_other_machines_are_sent_secrets(section, master, travels):
    options = {
        "bootstraps": '{"ewr": ["h:1"]}',
        "ranges": "[]",
        "securities": json.dumps({"ewr": section}),
    }
    login: Any = spark_source.read_pinned(Session(master), options)  # type: ignore[arg-type]
    assert isinstance(login, Carried) is travels


def test_the_public_source_takes_what_option_security_refers_to_along(section, tmp_path):
    """Executors of a cluster have none of the driver's files."""
    options = {
        "kafka.bootstrap.servers": "h:1",
        "subscribe": "flights",
        "security": json.dumps(section),
    }
    source = spark_source.MillraceDataSource(options)
    travelling = pickle.dumps(source.reader(source.schema()))  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "driver")
    reader = pickle.loads(travelling)
    login = reader._source.read.securities["cluster"]
    assert password_of(security_of("cluster", login)) == "hunter2"
    assert "hunter2" not in repr(reader._source) and "hunter2" not in json.dumps(source.options)
