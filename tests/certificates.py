"""Certificates for tests, made by openssl: an authority of the test's own and what it signs.

`Authority(folder)` makes a CA; `issue(name, …)` a key and a certificate, also one that has expired or is for
another host. Everything is a PEM file below the folder.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import patience

LOCAL_NAMES = "DNS:localhost,IP:127.0.0.1"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")

_CA_CONFIG = """\
[ca]
default_ca = here
[here]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = any
unique_subject = no
x509_extensions = names
[any]
commonName = supplied
[names]
subjectAltName = {names}
extendedKeyUsage = serverAuth, clientAuth
"""


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path

    @property
    def keystore(self) -> str:
        """Key and certificate in one PEM text, as Apache Kafka's PEM keystores are."""
        return self.key.read_text() + self.cert.read_text()


class Authority:
    """A CA; `pem` is its certificate."""

    def __init__(self, folder: Path, name: str = "Test CA") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.pem, self._key = folder / "ca.pem", folder / "ca.key"
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        openssl(
            "req", "-x509", *_CURVE, "-nodes", "-days", "30", "-subj", f"/CN={name}",
            "-keyout", str(self._key), "-out", str(self.pem),
        )  # fmt: skip

    def issue(
        self,
        name: str,
        *,
        names: str = LOCAL_NAMES,
        valid_s: tuple[float, float] = (-3600, 86_400),
        password: str | None = None,
        subject: str | None = None,
    ) -> Certificate:
        """A certificate for these names, valid from and until so many seconds from now; `name` is what its
        files are called, and its subject unless that is given."""
        key, request, cert = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        secret = ("-passout", f"pass:{password}") if password else ("-nodes",)
        openssl(
            "req",
            *_CURVE,
            *secret,
            "-subj",
            f"/CN={subject or name}",
            "-keyout",
            str(key),
            "-out",
            str(request),
        )
        config = self.folder / f"{name}.cnf"
        config.write_text(_CA_CONFIG.format(folder=self.folder, names=names))
        begin, end = (time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + each)) for each in valid_s)
        openssl(
            "ca", "-batch", "-notext", "-config", str(config), "-startdate", begin, "-enddate", end,
            "-cert", str(self.pem), "-keyfile", str(self._key), "-in", str(request), "-out", str(cert),
        )  # fmt: skip
        return Certificate(cert, key)


class TokenIssuer:
    """Signs JWTs as an identity provider does; `jwks` is the file with its public key."""

    ISSUER, AUDIENCE, KEY_ID = "https://login.test", "kafka", "one"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._key, self.jwks = folder / "token.key", folder / "jwks.json"
        openssl("genrsa", "-out", str(self._key), "2048")
        modulus = openssl("rsa", "-in", str(self._key), "-noout", "-modulus").decode().strip().split("=")[1]
        key = {"kty": "RSA", "kid": self.KEY_ID, "use": "sig", "alg": "RS256", "e": "AQAB"}
        self.jwks.write_text(json.dumps({"keys": [{**key, "n": _base64(bytes.fromhex(modulus))}]}))

    def token(self, subject: str, *, life_s: float = 3600) -> str:
        now = int(time.time())
        claims = {"sub": subject, "iss": self.ISSUER, "aud": self.AUDIENCE, "scope": "kafka"}
        claims |= {"iat": now - 60, "exp": int(now + life_s)}
        parts = ({"alg": "RS256", "typ": "JWT", "kid": self.KEY_ID}, claims)
        signed = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        signature = openssl("dgst", "-sha256", "-sign", str(self._key), given=signed.encode())
        return f"{signed}.{_base64(signature)}"


def openssl(*arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(
        ["openssl", *arguments], input=given, capture_output=True, timeout=patience(60), check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.decode()[-1000:]}")
    return done.stdout


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
