"""A cluster's `security:` section as settings of the Java client, for Spark's Kafka connector.

Called by `connector_reader` on the driver. A secret is never read into a setting: Spark's plan, its page and
its event log show them. The Java client resolves references where it runs (KIP-297, KIP-421): a file's by its
DirectoryConfigProvider, a variable's by its EnvVarConfigProvider. So the files and variables must be there on
every executor, as for our own reader. What cannot be handed over this way is refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.broker.client.security import SaslConfig, Secret, Security, TlsConfig
from millrace.broker.config_file import ConfigText, check_config
from millrace.broker.errors import ConfigError

_PROVIDED_BY = "org.apache.kafka.common.config.provider"
_PROVIDERS = {
    "kafka.config.providers": "millracefile,millraceenv",
    "kafka.config.providers.millracefile.class": f"{_PROVIDED_BY}.DirectoryConfigProvider",
    "kafka.config.providers.millraceenv.class": f"{_PROVIDED_BY}.EnvVarConfigProvider",
}
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_MARKS = frozenset("${}:")  # would be read as part of a reference


def client_settings(cluster: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Options of the connector, by name. Raises ConfigError for a wrong section, or one it cannot follow."""
    where = f"clusters.{cluster}.security"
    security = check_config(Security, ConfigText(where, dict(section)))
    if security.protocol == "PLAINTEXT":
        return {}
    given = {"kafka.security.protocol": security.protocol, **_PROVIDERS}
    if security.ssl is not None:
        given |= _tls(where, security.ssl)
    if security.sasl is not None:
        given |= _sasl(where, security.sasl)
    return given


def _tls(where: str, tls: TlsConfig) -> dict[str, str]:
    given: dict[str, str] = {}
    if tls.ca is not None:
        given |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": str(tls.ca.absolute())}
    if tls.cert is not None:
        key = tls.key or tls.cert
        if b"-----BEGIN PRIVATE KEY-----" not in key.read_bytes() and (
            b"-----BEGIN ENCRYPTED PRIVATE KEY-----" not in key.read_bytes()
        ):
            raise _refusal(f"{where}.ssl.key", key, "a key in PKCS #8 (-----BEGIN PRIVATE KEY-----)")
        given |= {
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.certificate.chain": _file_reference(f"{where}.ssl.cert", tls.cert),
            "kafka.ssl.keystore.key": _file_reference(f"{where}.ssl.key", key),
        }
    if tls.key_password is not None:
        given["kafka.ssl.key.password"] = _reference(f"{where}.ssl.key_password", tls.key_password)
    if not tls.verify_hostname:
        given["kafka.ssl.endpoint.identification.algorithm"] = ""
    return given


def _sasl(where: str, sasl: SaslConfig) -> dict[str, str]:
    module = _LOGIN_MODULES.get(sasl.mechanism)
    if module is None or sasl.password is None:
        expected = f"a login with one of {', '.join(_LOGIN_MODULES)}"
        raise _refusal(f"{where}.sasl.mechanism", sasl.mechanism, expected)
    place = f"{where}.sasl.password"
    password = sasl.password.read()
    if any(mark in password for mark in '"\\\r\n'):
        raise _refusal(place, "a password that is not shown", "one without quotes, backslashes and line ends")
    name = (sasl.username or "").replace("\\", "\\\\").replace('"', '\\"')
    if _MARKS & {"$"} & set(name):
        raise _refusal(f"{where}.sasl.username", sasl.username, "a name without $")
    reference = _reference(place, sasl.password)
    return {
        "kafka.sasl.mechanism": sasl.mechanism,
        "kafka.sasl.jaas.config": f'{module} required username="{name}" password="{reference}";',
    }


def _reference(where: str, secret: Secret) -> str:
    if secret.env is not None:
        if _MARKS & set(secret.env):
            raise _refusal(where, secret.env, "a variable's name without any of $ { } :")
        return f"${{millraceenv:{secret.env}}}"
    if secret.file is None:
        raise _refusal(where, "a secret that is not shown", "a reference, {file: path} or {env: NAME}")
    if secret.file.read_bytes().endswith((b"\n", b"\r")):
        raise _refusal(where, secret.file, "a file without a line end after the secret")
    return _file_reference(where, secret.file)


def _file_reference(where: str, path: Path) -> str:
    path = path.absolute()
    if _MARKS & set(str(path)):
        raise _refusal(where, path, "a path without any of $ { } :")
    return f"${{millracefile:{path.parent}:{path.name}}}"


def _refusal(where: str, value: object, expected: str) -> ConfigError:
    return ConfigError(where, str(value), f"{expected}, for reader: spark-kafka (or reader: millrace)")
