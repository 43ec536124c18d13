"""One Apache Kafka node with a listener for every way to be let in, for tests of the client's security.

`secure_kafka` (a fixture for a module) is a `SecureKafka`: `address(listener)` says where each is, `folder`
has the certificates. The plain listener (`peer.bootstrap`) is open, so that a test can look from beside.

    TLS          SSL, no client certificate        MTLS       SSL, one is required
    EXPIRED      SSL, certificate has expired      OTHERNAME  SSL, certificate for another host
    LOGIN        SASL_PLAINTEXT, all mechanisms    SECURE     SASL_SSL, all mechanisms
    SCRAMONLY    SASL_PLAINTEXT, SCRAM-SHA-512     SHORT      SASL_PLAINTEXT, sessions of 3 s (KIP-368)
    ROTATED      SSL, expired until `renew_certificate`
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.protocol.frames import Api
from tests.certificates import Authority, TokenIssuer
from tests.peers.kafka import TEST_JVM_OPTIONS, KafkaPeer

# A user whose password tests change, each test back again.
CHANGING_USER = "changing"
USER, PASSWORD = "mirror", "päss-ª=wörd"
"""The password has characters that SASLprep would change; Apache Kafka leaves them as they are."""
SECOND_USER, SECOND_PASSWORD = "mirror-too", "the-other-key-4711"

SESSION_MS = 3_000
_BROKER = 4

LISTENERS = {
    "TLS": "SSL",
    "MTLS": "SSL",
    "EXPIRED": "SSL",
    "OTHERNAME": "SSL",
    "LOGIN": "SASL_PLAINTEXT",
    "SECURE": "SASL_SSL",
    "SCRAMONLY": "SASL_PLAINTEXT",
    "SHORT": "SASL_PLAINTEXT",
    "ROTATED": "SSL",
}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_JAAS = "org.apache.kafka.common.security"


class SecureKafka:
    """See the module's text."""

    def __init__(
        self,
        folder: Path,
        *,
        user: str = USER,
        password: str = PASSWORD,
        listeners: Mapping[str, str] = LISTENERS,
    ) -> None:
        self.folder = folder
        self.user = user
        self.secret = password
        self._listeners = listeners
        self._renewals = 0
        self.authority = Authority(folder / "ca")
        self.stranger = Authority(folder / "stranger", "Somebody else's CA")
        self.client = self.authority.issue("client", password="key password")
        self.issuer = TokenIssuer(folder / "tokens")
        secret = folder / "password"
        secret.write_text(password + "\n", encoding="utf-8")
        self.password = {"file": str(secret)}
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.issuer.jwks.as_uri()}"
        users = [
            f"{mechanism}=[name={name},password={password}]"
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for name in (user, CHANGING_USER)
        ]
        self.peer = KafkaPeer(
            folder / "kafka",
            settings=self._settings(),
            jvm_options=(*TEST_JVM_OPTIONS, "-Dfile.encoding=UTF-8", "-Dsun.jnu.encoding=UTF-8", allowed),
            listeners=listeners,
            format_arguments=tuple(word for user in users for word in ("--add-scram", user)),
        )

    def address(self, listener: str) -> str:
        return self.peer.address(listener)

    def tls(self, **more: Any) -> dict[str, Any]:
        """The `ssl:` section that trusts this cluster."""
        return {"ca": str(self.authority.pem), **more}

    def login(self, mechanism: str = "SCRAM-SHA-256", **more: Any) -> dict[str, Any]:
        """The `sasl:` section of the user that this cluster knows."""
        return {"mechanism": mechanism, "username": self.user, "password": self.password, **more}

    def own_certificate(self) -> dict[str, str | dict[str, str]]:
        """What to add to `ssl:` for the client's certificate."""
        secret = self.folder / "key-password"
        secret.write_text("key password")
        return {
            "cert": str(self.client.cert),
            "key": str(self.client.key),
            "key_password": {"file": str(secret)},
        }

    async def renew_certificate(self, *, expired: bool = False) -> None:
        """Listener ROTATED has a valid certificate from here on, or again one that has expired."""
        self._renewals += 1  # a location that it has already is not read again
        renewed = self.folder / f"renewed-{self._renewals}.keystore.pem"
        valid = {"valid_s": (-7200, -60)} if expired else {}
        renewed.write_text(self.authority.issue(renewed.stem, subject="expired", **valid).keystore)
        schema = request_schema(Api.INCREMENTAL_ALTER_CONFIGS, 1)
        setting = schema.AlterableConfig(
            name="listener.name.rotated.ssl.keystore.location", config_operation=0, value=str(renewed)
        )
        resource = schema.AlterConfigsResource(
            resource_type=_BROKER, resource_name=str(self.peer.node_id), configs=(setting,)
        )
        request = schema.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
        async with Cluster("beside", [self.peer.bootstrap]) as cluster:
            answer = await cluster.request(request, node_id=self.peer.node_id)
        assert answer.responses[0].error_code == 0, answer

    async def change_password(self, password: str) -> None:
        """Give CHANGING_USER another password (SCRAM-SHA-256)."""
        schema = request_schema(Api.ALTER_USER_SCRAM_CREDENTIALS, 0)
        salt = os.urandom(16)
        change = schema.ScramCredentialUpsertion(
            name=CHANGING_USER,
            mechanism=1,
            iterations=4096,
            salt=salt,
            salted_password=hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 4096),
        )
        request = schema.AlterUserScramCredentialsRequest(deletions=(), upsertions=(change,))
        async with Cluster("beside", [self.peer.bootstrap]) as cluster:
            answer = await cluster.request(request)
        assert all(result.error_code == 0 for result in answer.results), answer

    def _settings(self) -> dict[str, str]:
        trust = self.authority.pem
        stores = {
            "TLS": self.authority.issue("server"),
            "EXPIRED": self.authority.issue("expired", valid_s=(-7200, -60)),
            "OTHERNAME": self.authority.issue("other", names="DNS:kafka.elsewhere.example"),
        }
        stores["ROTATED"] = stores["EXPIRED"]
        stores["MTLS"] = stores["SECURE"] = stores["TLS"]
        settings = {
            "group.initial.rebalance.delay.ms": "0",
            "sasl.enabled.mechanisms": ",".join(MECHANISMS),
            # Said outright: the default chooses the client's validator here, which looks at no signature.
            "sasl.oauthbearer.jwt.validator.class": f"{_JAAS}.oauthbearer.BrokerJwtValidator",
            "sasl.oauthbearer.jwks.endpoint.url": self.issuer.jwks.as_uri(),
            "sasl.oauthbearer.expected.audience": self.issuer.AUDIENCE,
            "sasl.oauthbearer.expected.issuer": self.issuer.ISSUER,
        }
        for listener in stores.keys() & self._listeners.keys():
            certificate = stores[listener]
            keystore = self.folder / f"{listener}.keystore.pem"
            keystore.write_text(certificate.keystore)
            name = f"listener.name.{listener.lower()}.ssl"
            settings |= {
                f"{name}.keystore.type": "PEM",
                f"{name}.keystore.location": str(keystore),
                f"{name}.truststore.type": "PEM",
                f"{name}.truststore.location": str(trust),
                f"{name}.client.auth": "required" if listener == "MTLS" else "none",
            }
        for listener, protocol in self._listeners.items():
            if protocol.startswith("SASL"):
                settings |= self._login_settings(f"listener.name.{listener.lower()}")
        settings["listener.name.scramonly.sasl.enabled.mechanisms"] = "SCRAM-SHA-512"
        for mechanism in MECHANISMS:
            name = f"listener.name.short.{mechanism.lower()}"
            settings[f"{name}.connections.max.reauth.ms"] = str(SESSION_MS)
        return settings

    def _login_settings(self, name: str) -> dict[str, str]:
        # A properties file is read as Latin-1: what is not in it is written as an escape.
        password = "".join(each if each.isascii() else f"\\u{ord(each):04x}" for each in self.secret)
        oauth = f"{_JAAS}.oauthbearer"
        scram = f"{_JAAS}.scram.ScramLoginModule required;"
        return {
            f"{name}.plain.sasl.jaas.config": (
                f'{_JAAS}.plain.PlainLoginModule required user_{self.user}="{password}";'
            ),
            f"{name}.scram-sha-256.sasl.jaas.config": scram,
            f"{name}.scram-sha-512.sasl.jaas.config": scram,
            f"{name}.oauthbearer.sasl.jaas.config": f"{oauth}.OAuthBearerLoginModule required;",
            f"{name}.oauthbearer.sasl.server.callback.handler.class": (
                f"{oauth}.OAuthBearerValidatorCallbackHandler"
            ),
        }


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """One node for a module; its tests use topics, groups and mirrors of their own."""
    yield from _started(SecureKafka(tmp_path_factory.mktemp("secure-kafka")))


@pytest.fixture(scope="session")
def second_secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """Another one, with a CA, a user and a token issuer of its own, and one way in."""
    yield from _started(
        SecureKafka(
            tmp_path_factory.mktemp("second-secure-kafka"),
            user=SECOND_USER,
            password=SECOND_PASSWORD,
            listeners={"SECURE": LISTENERS["SECURE"]},
        )
    )


def _started(kafka: SecureKafka) -> Iterator[SecureKafka]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "C.UTF-8")  # the password goes to the storage tool as an argument
        kafka.peer.start()
    try:
        yield kafka
    finally:
        kafka.peer.stop()
