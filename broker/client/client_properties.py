"""Client files of Apache Kafka (`client.properties`), as its tools take them, read into a `Security`.

Called by the command line for `--command-config FILE`. What says how to connect and log in is taken; settings
of Kafka's clients that are about other things are passed over, and names that none of them has are told
(`client_property_names`). PEM only: Java's own keystores (JKS, PKCS12) are refused with the command that
turns them into PEM. A secret that stands in the file stays in memory and is shown nowhere.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from millrace.broker.client.client_property_names import unknown_names
from millrace.broker.client.security import Secret, Security
from millrace.broker.config_file import ConfigText, check_config
from millrace.broker.errors import ConfigError

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_LOGIN_MODULE = re.compile(
    r"\s*[\w.$]+\s+(?:required|requisite|sufficient|optional)\b(?P<options>.*?);\s*", re.S
)
_LOGIN_OPTION = re.compile(r'([\w.$-]+)\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^\s";]+))', re.S)
_FROM_PROPERTIES = {
    "protocol": "security.protocol",
    "ssl.ca": "ssl.truststore.location",
    "ssl.cert": "ssl.keystore.location",
    "ssl.key": "ssl.keystore.location",
    "ssl.key_password": "ssl.key.password",
    "ssl": "security.protocol",
    "sasl": "sasl.jaas.config",
    "sasl.mechanism": "sasl.mechanism",
    "sasl.username": "sasl.jaas.config",
    "sasl.password": "sasl.jaas.config",
    "sasl.token": "sasl.oauthbearer.token.endpoint.url",
    "sasl.token.endpoint": "sasl.oauthbearer.token.endpoint.url",
    "sasl.token.client_id": "sasl.jaas.config",
    "sasl.token.client_secret": "sasl.jaas.config",
}


def load_client_properties(path: Path | str, say: Callable[[str], None] = lambda line: None) -> Security:
    """What the file says. `say` is told, in one line, of names that are no client's setting: one that is
    mistyped may mean a connection in plain text. Raises ConfigError with the file, the property and what was
    expected."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error), "a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "bytes that are not UTF-8", "a properties file in UTF-8") from None
    properties = parse_properties(text)
    if unknown := unknown_names(properties):
        say(f"{path.name}: passed over, as no client has such a setting: {unknown}")
    return security_of(properties, path.name, path.absolute().parent)


def parse_properties(text: str) -> dict[str, str]:
    """The names and values of a properties file, with Java's escapes and continued lines."""
    properties: dict[str, str] = {}
    line = ""
    for part in [*text.splitlines(), ""]:
        part = part.lstrip(" \t\f")
        if not line and part[:1] in ("#", "!"):
            continue
        line += part
        if (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1]
            continue
        if line:
            name, value = _split(line)
            properties[_unescape(name)] = _unescape(value)
        line = ""
    return properties


def security_of(properties: Mapping[str, str], name: str, folder: Path) -> Security:
    """What the properties mean. Raises ConfigError."""
    section: dict[str, Any] = {"protocol": properties.get("security.protocol", "PLAINTEXT").upper()}
    if section["protocol"].endswith("SSL"):
        section["ssl"] = _ssl(properties, name, folder)
    if section["protocol"].startswith("SASL"):
        section["sasl"] = _sasl(properties, name)
    try:
        return check_config(Security, ConfigText("", section, folder=folder))
    except ConfigError as error:
        raise ConfigError(
            f"{name}: {_FROM_PROPERTIES.get(error.path, error.path)}", error.value, error.expected
        ) from None


def _ssl(properties: Mapping[str, str], name: str, folder: Path) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for store, key in (("truststore", "ca"), ("keystore", "cert")):
        location = properties.get(f"ssl.{store}.location")
        kind = properties.get(f"ssl.{store}.type", "JKS").upper()
        inline = properties.get(
            "ssl.truststore.certificates" if key == "ca" else "ssl.keystore.certificate.chain"
        )
        if inline is not None:
            section[key] = _as_file(inline, key)
        elif location is not None:
            if kind != "PEM":
                raise ConfigError(
                    f"{name}: ssl.{store}.type", _Shown(kind),
                    "PEM; `keytool -importkeystore -deststoretype PKCS12` and then `openssl pkcs12 -nodes` "
                    "turn a Java keystore into it",
                )  # fmt: skip
            section[key] = location
            if key == "cert":
                section["key"] = location
    if "ssl.keystore.key" in properties:
        section["key"] = _as_file(properties["ssl.keystore.key"], "key")
    if "ssl.key.password" in properties and "key" in section:
        section["key_password"] = Secret.of(properties["ssl.key.password"])
    # An empty algorithm is how Kafka's clients are told not to look at the name.
    section["verify_hostname"] = properties.get("ssl.endpoint.identification.algorithm", "https") != ""
    return section


def _sasl(properties: Mapping[str, str], name: str) -> dict[str, Any]:
    mechanism = properties.get("sasl.mechanism", "GSSAPI").upper()
    jaas = properties.get("sasl.jaas.config", "")
    found = _LOGIN_MODULE.fullmatch(jaas)
    if jaas and found is None:
        raise ConfigError(
            f"{name}: sasl.jaas.config", _Shown("a text that is not shown here, as it may hold a secret"),
            'LoginModule required name="value" …;, with the semicolon',
        )  # fmt: skip
    options = {
        option[1]: re.sub(r"\\(.)", r"\1", option[2]) if option[2] is not None else option[3]
        for option in _LOGIN_OPTION.finditer(found["options"] if found is not None else "")
    }
    section: dict[str, Any] = {"mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        section["token"] = _token(properties, options)
        section["extensions"] = {
            key.removeprefix("extension_"): value
            for key, value in options.items()
            if key.startswith("extension_")
        }
    else:
        section["username"] = options.get("username")
        section["password"] = Secret.of(options["password"]) if options.get("password") else None
    return section


def _token(properties: Mapping[str, str], options: Mapping[str, str]) -> dict[str, Any] | None:
    address = properties.get("sasl.oauthbearer.token.endpoint.url")
    if address is None:
        return None
    parts = urlsplit(address)
    if parts.scheme == "file":
        return {"file": unquote(parts.path)}
    credentials = "sasl.oauthbearer.client.credentials.client"
    secret = properties.get(f"{credentials}.secret") or options.get("clientSecret")
    return {
        "endpoint": address,
        "client_id": properties.get(f"{credentials}.id") or options.get("clientId"),
        "client_secret": Secret.of(secret) if secret else None,
        "scope": properties.get("sasl.oauthbearer.scope") or options.get("scope"),
        "urlencode": properties.get("sasl.oauthbearer.header.urlencode", "false").lower() == "true",
    }


def _as_file(pem: str, kind: str) -> str:
    """OpenSSL's bindings read certificates and keys from files alone: one that only this user may read, for
    the life of the process."""
    path = Path(_inline_files().name) / f"{kind}-{next(_file_numbers)}.pem"
    path.touch(mode=0o600)
    path.write_text(pem + "\n")
    return str(path)


_file_numbers = itertools.count(1)


@cache
def _inline_files() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="millrace-pem-")


def _split(line: str) -> tuple[str, str]:
    position = 0
    while position < len(line) and line[position] not in "=: \t\f":
        position += 2 if line[position] == "\\" else 1
    rest = line[position:].lstrip(" \t\f")
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(" \t\f")
    return line[:position], rest


def _unescape(text: str) -> str:
    def replace(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        return _ESCAPES.get(found[2], found[2])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", replace, text, flags=re.S)


class _Shown:
    """Text that an error shows without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
