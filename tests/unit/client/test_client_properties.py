from __future__ import annotations

from pathlib import Path

import pytest

from millrace.broker.client.client_properties import load_client_properties, parse_properties
from millrace.broker.errors import ConfigError
from tests.certificates import Authority

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def written(folder: Path, text: str) -> Path:
    path = folder / "client.properties"
    path.write_text(text, encoding="utf-8")
    return path


def test_properties_are_read_as_java_reads_them() -> None:
    text = (
        "# comment\n! too\n\n a = 1\nb:2\nc 3\nempty=\nkey\\ with\\=signs=v\n"
        "long=one \\\n    two\nu=\\u00e4\\t|\nslash=C\\\\path\nend=x\\"
    )
    assert parse_properties(text) == {
        "a": "1",
        "b": "2",
        "c": "3",
        "empty": "",
        "key with=signs": "v",
        "long": "one two",
        "u": "ä\t|",
        "slash": "C\\path",
        "end": "x",
    }


def test_login_and_tls_are_taken(tmp_path: Path, authority: Authority) -> None:
    client = authority.issue("properties", password="open sesame")
    store = tmp_path / "store.pem"
    store.write_text(client.keystore)
    security = load_client_properties(
        written(
            tmp_path,
            f"security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nacks=all\n"
            f'sasl.jaas.config={SCRAM} required \\\n  username="mirror" password="a\\\\"b;c";\n'
            f"ssl.truststore.type=PEM\nssl.truststore.location={authority.pem}\n"
            "ssl.keystore.type=PEM\nssl.keystore.location=store.pem\nssl.key.password=open sesame\n"
            "ssl.endpoint.identification.algorithm=\n",
        )
    )
    assert security.protocol == "SASL_SSL"
    assert security.ssl is not None and security.sasl is not None
    assert security.ssl.ca == authority.pem
    assert security.ssl.cert == security.ssl.key == store
    assert not security.ssl.verify_hostname
    assert security.sasl.username == "mirror"
    assert security.sasl.password is not None
    assert security.sasl.password.read() == 'a"b;c'
    assert "open sesame" not in repr(security) + security.model_dump_json()
    assert "b;c" not in repr(security) + security.model_dump_json()


def test_tokens_of_a_file_and_of_an_endpoint(tmp_path: Path) -> None:
    start = "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n"
    token = tmp_path / "token"
    token.write_text("abc")
    url = "sasl.oauthbearer.token.endpoint.url"
    security = load_client_properties(written(tmp_path, f"{start}{url}={token.as_uri()}\n"))
    assert security.sasl is not None and security.sasl.token is not None
    assert security.sasl.token.file == token
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    security = load_client_properties(
        written(
            tmp_path,
            f"{start}{url}=https://login.test/token\nsasl.jaas.config={module} required "
            'clientId="id" clientSecret="hush" scope="kafka" extension_logicalCluster="lkc-1";\n',
        )
    )
    assert security.sasl is not None and security.sasl.token is not None
    token_config = security.sasl.token
    assert (token_config.endpoint, token_config.client_id) == ("https://login.test/token", "id")
    assert token_config.scope == "kafka"
    assert token_config.client_secret is not None
    assert token_config.client_secret.read() == "hush"
    assert security.sasl.extensions == {"logicalCluster": "lkc-1"}
    assert "hush" not in repr(security)


def test_certificates_may_stand_in_the_file(tmp_path: Path, authority: Authority) -> None:
    client = authority.issue("inline")

    def inline(path: Path) -> str:
        return path.read_text().strip().replace("\n", " \\\n").replace(" \\\n", "\\n\\\n")

    security = load_client_properties(
        written(
            tmp_path,
            "security.protocol=SSL\nssl.truststore.type=PEM\nssl.keystore.type=PEM\n"
            f"ssl.truststore.certificates={inline(authority.pem)}\n"
            f"ssl.keystore.certificate.chain={inline(client.cert)}\nssl.keystore.key={inline(client.key)}\n",
        )
    )
    assert security.ssl is not None and security.ssl.key is not None
    assert security.ssl.key.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("securty.protocol=SSL", "securty.protocol (did you mean security.protocol?)"),
        ("a.plugins.own=x\nssl.ca.location=x\nb.c=1", "a.plugins.own, ssl.ca.location (did you mean ssl."),
        ("#securty.protocol=SSL\nsecurity.protocol=PLAINTEXT\nacks=all\nretries=3", ""),
        ("x.a=1\nx.b=1\nx.c=1\nx.d=1\nx.e=1\nx.f=1\nx.g=1", "x.a, x.b, x.c, x.d, x.e and 2 more"),
        ("sasl.jaas.config=\nMIIEvQIBADANBgkqhkiG9w0BAQEF\nhunter2", "2 that are not shown here"),
    ],
)
def test_names_that_are_no_clients_settings_are_told_in_one_line_and_no_secret_with_them(
    tmp_path: Path, text: str, said: str
) -> None:
    lines: list[str] = []
    load_client_properties(written(tmp_path, text), lines.append)
    start = "client.properties: passed over, as no client has such a setting: "
    assert [line.startswith(start + said) for line in lines] == ([True] if said else []), lines


def test_a_mistyped_name_is_told_before_what_comes_of_it(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"sasl\.mechanism"):
        load_client_properties(
            written(tmp_path, "security.protocol=SASL_PLAINTEXT\nsasl.mechansim=PLAIN"), lines.append
        )
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("security.protocol=SASL_TLS", "client.properties: security.protocol: got"),
        ("security.protocol=SASL_PLAINTEXT", "sasl.mechanism"),
        ("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN", "sasl.jaas.config"),
        (
            "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
            'sasl.jaas.config=x.Y required password="p4ss"',
            "with the semicolon",
        ),
        (
            "security.protocol=SSL\nssl.truststore.location=/x.jks",
            "ssl.truststore.type: got JKS, expected PEM; `keytool",
        ),
        ("security.protocol=SSL\nssl.truststore.type=PEM\nssl.truststore.location=gone.pem", "gone.pem"),
        ("security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER", "sasl.oauthbearer.token.endpoint.url"),
    ],
)
def test_a_mistake_names_file_and_property(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        load_client_properties(written(tmp_path, text))
    assert words in str(mistake.value)
    assert "p4ss" not in str(mistake.value)
