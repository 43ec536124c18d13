"""The `security:` section: what it takes, the line of every mistake, and that no secret is ever shown."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.broker.client.security import Secret, SecretUnreadable, Security
from millrace.broker.client.tls import TlsContexts
from millrace.broker.errors import ConfigError
from millrace.mirror.config import MirrorConfig, load_config
from tests.certificates import Authority

HIDDEN = "hunter2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def load(folder: Path, section: str) -> MirrorConfig:
    """A mirror.yaml whose target has this section from line 5 on."""
    (folder / "secret").write_text(HIDDEN + "\n")
    (folder / "mirror.yaml").write_text(
        "name: m\ntarget:\n  cluster: agg\n  bootstrap: ['127.0.0.1:1']\n  security:\n"
        + "".join(f"    {line}\n" for line in section.splitlines())
        + "sources: [{cluster: ewr, bootstrap: ['127.0.0.1:2'], topics: {include: [a]}}]\n"
    )
    return load_config(folder / "mirror.yaml")


def test_a_login_is_a_reference_to_its_secret(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "protocol: SASL_PLAINTEXT\n"
        "sasl: {mechanism: SCRAM-SHA-512, username: mirror, password: {file: secret}}",
    )
    sasl = config.target.security.sasl
    assert sasl is not None and sasl.password is not None
    assert sasl.password.read() == HIDDEN
    (tmp_path / "secret").write_text("changed")
    assert sasl.password.read() == "changed"
    (tmp_path / "secret").unlink()
    with pytest.raises(SecretUnreadable, match="No such file"):
        sasl.password.read()
    for shown in (repr(config), str(config), config.model_dump_json(), repr(sasl)):
        assert HIDDEN not in shown and "changed" not in shown


def test_sources_have_their_own(tmp_path: Path) -> None:
    config = load(tmp_path, "protocol: SSL")
    assert config.target.security.uses_tls
    assert config.sources[0].security == Security()


@pytest.mark.parametrize(
    ("section", "line", "words"),
    [
        ("protocol: TLS", 6, "security.protocol: got 'TLS', expected 'PLAINTEXT'"),
        ("protocol: SASL_SSL", 5, "security: got None, expected sasl: protocol SASL_SSL needs it"),
        ("ssl: {verify_hostname: true}", 6, "no ssl with protocol PLAINTEXT"),
        (
            "sasl: {mechanism: PLAIN, username: u, password: {file: secret}}",
            6,
            "no sasl with protocol PLAINTEXT",
        ),
        ("protocol: SASL_SSL\nsasl: {username: u}", 7, "mechanism"),
        ("protocol: SASL_SSL\nsasl:\n  mechanism: GSSAPI", 8, "got 'GSSAPI'"),
        ("protocol: SASL_SSL\nsasl:\n  mechanism: PLAIN\n  username: u", 7, "password: PLAIN needs it"),
        ("protocol: SASL_SSL\nsasl:\n  mechanism: OAUTHBEARER", 7, "token: OAUTHBEARER needs it"),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: OAUTHBEARER\n  token: {file: secret}\n  username: u",
            10,
            "no username: OAUTHBEARER has none",
        ),
        (
            f"protocol: SASL_SSL\nsasl:\n  mechanism: PLAIN\n  username: u\n  password: {HIDDEN}",
            10,
            "secrets are never written into the config itself",
        ),
        (
            f"protocol: SASL_SSL\nsasl:\n  mechanism: PLAIN\n  username: u\n  passwort: {HIDDEN}",
            7,
            "password: PLAIN needs it (and 1 more)",
        ),
        (f"protocol: SASL_SSL\nsasl: {HIDDEN}", 7, "security.sasl"),
        (f"protocol: SSL\npassword: {HIDDEN}", 7, "expected one of protocol, ssl, sasl"),
        (f"- {HIDDEN}", 5, "target.security"),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: PLAIN\n  username: u\n  password: {file: gone}",
            10,
            "gone: No such file",
        ),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: PLAIN\n  username: u\n"
            "  password: {env: MILLRACE_NOT_SET}",
            10,
            "environment variable MILLRACE_NOT_SET is not set",
        ),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: PLAIN\n  username: u\n  password: {file: a, env: B}",
            10,
            "{file: path} or {env: NAME}",
        ),
        ("protocol: SSL\nssl:\n  ca: gone.pem", 8, "a readable file (No such file or directory)"),
        ("protocol: SSL\nssl:\n  ca: secret", 8, "a PEM file of CA certificates"),
        ("protocol: SSL\nssl:\n  key: secret", 8, "cert as well"),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: OAUTHBEARER\n  token: {file: secret, env: A}",
            9,
            "one of file, env, command or endpoint",
        ),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: OAUTHBEARER\n  token:\n    endpoint: 'ftp://x'",
            10,
            "an address such as https://",
        ),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: OAUTHBEARER\n  token:\n    endpoint: 'https://x'",
            9,
            "client_id together with endpoint",
        ),
        (
            "protocol: SASL_SSL\nsasl:\n  mechanism: OAUTHBEARER\n  token: {file: secret}\n"
            "  extensions: {auth: x}",
            10,
            "names of letters (not auth)",
        ),
    ],
)
def test_every_mistake_has_its_line(tmp_path: Path, section: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        load(tmp_path, section)
    said = str(mistake.value)
    assert said.startswith(f"mirror.yaml:{line}: "), said
    assert words in said, said
    assert HIDDEN not in said
    assert "\n" not in said


def test_a_key_must_be_the_certificates(tmp_path: Path, authority: Authority) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    locked = authority.issue("locked", password="sesame")
    (tmp_path / "wrong").write_text("no")
    (tmp_path / "right").write_text("sesame")

    def section(key: Path, more: str = "", cert: Path = one.cert) -> str:
        return f"protocol: SSL\nssl:\n  cert: {cert}\n  key: {key}{more}"

    load(tmp_path, section(one.key))
    load(tmp_path, section(locked.key, f"\n  key_password: {{file: {tmp_path}/right}}", locked.cert))
    for text, words in (
        (section(other.key), "the certificate is of another key"),
        (section(locked.key, cert=locked.cert), "it is encrypted: set key_password"),
        (
            section(locked.key, f"\n  key_password: {{file: {tmp_path}/wrong}}", locked.cert),
            "key_password does not open it",
        ),
        (section(one.key, cert=one.key), "no certificate and key in PEM"),
    ):
        with pytest.raises(ConfigError, match=words) as mistake:
            load(tmp_path, text)
        assert str(mistake.value).startswith("mirror.yaml:9: target.security.ssl.key")


def test_secrets_are_never_in_other_lines_of_the_file_either(tmp_path: Path) -> None:
    sections: list[dict[str, Any]] = [
        {"name": {"security": HIDDEN}},
        {"target": [{"security": {"sasl": {"password": HIDDEN}}}]},
        {"sources": {"security": {"password": HIDDEN}}},
    ]
    for more in sections:
        whole = {
            "name": "m",
            "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
            "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["a"]}}],
        }
        path = tmp_path / "mirror.yaml"
        path.write_text(yaml.safe_dump(whole | more))
        with pytest.raises(ConfigError) as mistake:
            load_config(path)
        assert HIDDEN not in str(mistake.value)


def test_held_secrets_survive_a_pickle_and_stay_hidden() -> None:
    held = Secret.of(HIDDEN)
    assert pickle.loads(pickle.dumps(held)).read() == HIDDEN
    assert HIDDEN not in repr(held) + str(held) + held.model_dump_json()


def test_a_certificate_that_changed_on_disk_is_used_next(tmp_path: Path, authority: Authority) -> None:
    first, second = authority.issue("first"), authority.issue("second")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(first.cert.read_bytes())
    key.write_bytes(first.key.read_bytes())
    security = Security.model_validate({"protocol": "SSL", "ssl": {"cert": cert, "key": key}})
    assert security.ssl is not None
    contexts = TlsContexts(security.ssl)
    before = contexts.current()
    assert contexts.current() is before
    cert.write_bytes(second.cert.read_bytes())
    with pytest.raises(ValueError, match="of another key"):
        contexts.current()  # in the middle of the change
    key.write_bytes(second.key.read_bytes())
    assert contexts.current() is not before
