"""The client at every kind of listener that Apache Kafka has: let in, or told in one line why not."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import ssl
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import uvloop
import yaml
from typer.testing import CliRunner

from millrace.audit.config import load_config as load_audit_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.runs.capture import capture
from millrace.audit.spark.read_options import RECORDS, parse_options
from millrace.audit.spark.spark_cells import cluster_options
from millrace.audit.spark.task_plan import OffsetRange, ranges_option
from millrace.audit.spark.task_reader import read_task
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.security import Security
from millrace.broker.errors import AccessRefused, ClusterUnreachable, ConfigError
from millrace.broker.protocol.records import Record, build_batch
from millrace.deploy.commands.topics import app as topics_app
from tests.certificates import TokenIssuer
from tests.cluster.mirror_process import record_bytes, send
from tests.secure_kafka import MECHANISMS, PASSWORD, USER, SecureKafka

pytestmark = [pytest.mark.java, pytest.mark.kafka]

Section = dict[str, Any]


@pytest.fixture(
    params=[pytest.param(asyncio.run, marks=pytest.mark.long), uvloop.run], ids=["asyncio", "uvloop"]
)
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Both event loops have a TLS of their own."""
    return request.param  # type: ignore[no-any-return]


def client(kafka: SecureKafka, listener: str, section: Section, **more: Any) -> Cluster:
    return Cluster("agg", [kafka.address(listener)], security=Security.model_validate(section), **more)


def token_file(kafka: SecureKafka, folder: Path, **claims: Any) -> Section:
    path = folder / "token"
    path.write_text(kafka.issuer.token(USER, **claims) + "\n")
    return {"mechanism": "OAUTHBEARER", "token": {"file": str(path)}}


def login_by(kafka: SecureKafka, mechanism: str, folder: Path) -> Section:
    return token_file(kafka, folder) if mechanism == "OAUTHBEARER" else kafka.login(mechanism)


async def there_and_back(cluster: Cluster, topic: str) -> None:
    """2 MiB in large batches: frames longer than a TLS record, more than a socket takes at once."""
    async with cluster:
        await create_topic(cluster, topic, 1, 1, {})
        batches = [build_batch([Record(None, bytes([n]) * 500_000, (), n)]) for n in range(4)]
        await asyncio.gather(*(send(cluster, topic, 0, batch) for batch in batches))
        sections = await record_bytes(cluster, topic, 0)
        assert sorted(len(section) for section in sections) == sorted(len(batch) - 61 for batch in batches)


def test_tls(secure_kafka: SecureKafka, run: Callable[[Any], Any], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    run(
        there_and_back(
            client(secure_kafka, "TLS", {"protocol": "SSL", "ssl": secure_kafka.tls()}), f"tls-{name}"
        )
    )
    own = secure_kafka.tls(**secure_kafka.own_certificate())
    run(there_and_back(client(secure_kafka, "MTLS", {"protocol": "SSL", "ssl": own}), f"mtls-{name}"))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_logins(secure_kafka: SecureKafka, mechanism: str, tmp_path: Path) -> None:
    sasl = login_by(secure_kafka, mechanism, tmp_path)
    plain = {"protocol": "SASL_PLAINTEXT", "sasl": sasl}
    asyncio.run(there_and_back(client(secure_kafka, "LOGIN", plain), f"login-{mechanism}"))
    secure = {"protocol": "SASL_SSL", "sasl": sasl, "ssl": secure_kafka.tls()}
    uvloop.run(there_and_back(client(secure_kafka, "SECURE", secure), f"secure-{mechanism}"))


async def refusal(cluster: Cluster) -> str:
    async with cluster:
        with pytest.raises((AccessRefused, ClusterUnreachable)) as refused:
            await cluster.metadata()
    said = str(refused.value)
    assert said.startswith("cluster agg: ") and "\n" not in said
    assert PASSWORD not in said
    return said


def test_each_refusal_is_one_line_that_says_what_to_do(
    secure_kafka: SecureKafka, run: Callable[[Any], Any], tmp_path: Path
) -> None:
    kafka, tls = secure_kafka, secure_kafka.tls()
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    other, old = kafka.stranger.issue("client"), kafka.authority.issue("old", valid_s=(-7200, -60))

    def with_password(mechanism: str) -> Section:
        sasl = kafka.login(mechanism, password={"file": str(wrong)})
        return {"protocol": "SASL_PLAINTEXT", "sasl": sasl}

    def with_cert(certificate: Any) -> Section:
        own = {"cert": str(certificate.cert), "key": str(certificate.key)}
        return {"protocol": "SSL", "ssl": kafka.tls(**own)}

    expired = token_file(kafka, tmp_path, life_s=-300)
    login = {"protocol": "SASL_PLAINTEXT", "sasl": kafka.login()}
    cases: list[tuple[str, Section, str]] = [
        ("EXPIRED", {"protocol": "SSL", "ssl": tls}, "the server's certificate has expired"),
        ("OTHERNAME", {"protocol": "SSL", "ssl": tls}, "the server's certificate is not for 127.0.0.1"),
        ("TLS", {"protocol": "SSL", "ssl": {"ca": str(kafka.stranger.pem)}}, "not signed by a CA in "),
        ("TLS", {"protocol": "SSL"}, "not signed by a CA of this system; set security.ssl.ca"),
        ("MTLS", {"protocol": "SSL", "ssl": tls}, "asks for a client certificate; set security.ssl.cert"),
        ("MTLS", with_cert(other), f"refuses the certificate {other.cert}"),
        ("MTLS", with_cert(old), f"refuses the certificate {old.cert}"),
        ("TLS", {"protocol": "PLAINTEXT"}, "the port speaks TLS; set security.protocol to SSL or SASL_SSL"),
        ("TLS", login, "the port speaks TLS; set security.protocol to SSL or SASL_SSL"),
        ("LOGIN", {"protocol": "SSL", "ssl": tls}, "a port without TLS does that: see security.protocol"),
        ("LOGIN", {"protocol": "PLAINTEXT"}, "one that asks for a login does that: see security.protocol"),
        ("TLS", {"protocol": "SASL_SSL", "ssl": tls, "sasl": kafka.login()}, "this port asks for no login"),
        ("SCRAMONLY", login, "takes no logins by SCRAM-SHA-256; set security.sasl.mechanism to one of"),
        ("LOGIN", {"protocol": "SASL_PLAINTEXT", "sasl": expired}, "the token is refused (it has expired)"),
        ("LOGIN", login | {"sasl": kafka.login(username="nobody")}, "check security.sasl's username"),
        *(
            ("LOGIN", with_password(mechanism), f"the login by {mechanism} is refused; check security.sasl")
            for mechanism in MECHANISMS[:3]
        ),
    ]  # fmt: skip

    async def all_of_them() -> list[str]:
        return await asyncio.gather(
            *(
                refusal(client(kafka, listener, section, request_timeout_ms=4_000))
                for listener, section, _ in cases
            )
        )

    for (listener, section, words), said in zip(cases, run(all_of_them()), strict=True):
        assert words in said, (listener, section, said)
        assert kafka.address(listener) in said


def test_the_name_need_not_match_when_told_so(secure_kafka: SecureKafka) -> None:
    section = {"protocol": "SSL", "ssl": secure_kafka.tls(verify_hostname=False)}

    async def look() -> None:
        async with client(secure_kafka, "OTHERNAME", section) as cluster:
            assert (await cluster.metadata()).brokers

    asyncio.run(look())


def test_a_foreign_token_is_refused(secure_kafka: SecureKafka, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TokenIssuer(tmp_path / "foreign").token(USER))
    sasl = {"mechanism": "OAUTHBEARER", "token": {"file": str(path)}}
    said = asyncio.run(refusal(client(secure_kafka, "LOGIN", {"protocol": "SASL_PLAINTEXT", "sasl": sasl})))
    assert "the token is refused" in said and "check security.sasl.token" in said


class _TokenEndpoint(http.server.BaseHTTPRequestHandler):
    """As identity providers have it: client credentials in, a token out (RFC 6749, section 4.4)."""

    kafka: SecureKafka
    forms: list[dict[str, list[str]]]

    def do_POST(self) -> None:
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.forms.append(form)
        given = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        if given == "mirror-client:client+secret":
            code, answer = 200, {"access_token": self.kafka.issuer.token(USER), "expires_in": 3600}
        else:
            code, answer = 401, {"error": "invalid_client", "secret": "not to be shown"}
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(secure_kafka: SecureKafka) -> Iterator[str]:
    """An HTTPS token endpoint; `_TokenEndpoint.forms` has what it was asked."""
    _TokenEndpoint.kafka, _TokenEndpoint.forms = secure_kafka, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _TokenEndpoint)
    certificate = secure_kafka.authority.issue("endpoint")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/token"
    server.shutdown()
    thread.join()
    server.server_close()


def test_tokens_of_an_endpoint_are_kept_while_they_live(
    secure_kafka: SecureKafka, endpoint: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("client+secret")
    token: Section = {
        "endpoint": endpoint,
        "client_id": "mirror-client",
        "client_secret": {"file": str(secret)},
        "scope": "kafka",
        "ca": str(secure_kafka.authority.pem),
    }

    def section() -> Section:
        return {"protocol": "SASL_PLAINTEXT", "sasl": {"mechanism": "OAUTHBEARER", "token": token}}

    async def look() -> None:
        async with client(secure_kafka, "LOGIN", section()) as cluster:
            await cluster.metadata()
            for purpose in ("one", "two", "three"):
                assert (await cluster.connection(1, purpose)).is_open

    asyncio.run(look())
    assert _TokenEndpoint.forms == [{"grant_type": ["client_credentials"], "scope": ["kafka"]}]
    secret.write_text("wrong+secret")
    said = asyncio.run(refusal(client(secure_kafka, "LOGIN", section())))
    assert f"no token: {endpoint} answers HTTP 401, 'invalid_client'" in said
    assert "wrong+secret" not in said and "not to be shown" not in said
    del token["ca"]
    said = asyncio.run(refusal(client(secure_kafka, "LOGIN", section())))
    assert f"no token: {endpoint} cannot be asked" in said and "CERTIFICATE_VERIFY_FAILED" in said


def test_tokens_of_a_command(secure_kafka: SecureKafka, tmp_path: Path) -> None:
    token_file(secure_kafka, tmp_path)

    def section(code: str) -> Section:
        token = {"command": [sys.executable, "-c", code]}
        return {"protocol": "SASL_PLAINTEXT", "sasl": {"mechanism": "OAUTHBEARER", "token": token}}

    async def look() -> None:
        code = f"print(open({str(tmp_path / 'token')!r}).read())"
        async with client(secure_kafka, "LOGIN", section(code)) as cluster:
            assert (await cluster.metadata()).brokers

    asyncio.run(look())
    said = asyncio.run(
        refusal(client(secure_kafka, "LOGIN", section("import sys; print('hush'); sys.exit('hush')")))
    )
    assert "ended with status 1" in said and "hush" not in said.replace("hush')", "")
    assert "printed nothing" in asyncio.run(refusal(client(secure_kafka, "LOGIN", section("pass"))))


def test_the_command_line_takes_kafkas_client_files(
    secure_kafka: SecureKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    properties = tmp_path / "client.properties"

    def write(password: str) -> None:
        properties.write_text(
            "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\n"
            f'sasl.jaas.config={module} required username="{USER}" password="{password}";\n'
            f"ssl.truststore.type=PEM\nssl.truststore.location={secure_kafka.authority.pem}\n",
            encoding="utf-8",
        )

    words = ["--bootstrap", secure_kafka.address("SECURE"), "--command-config", str(properties)]
    write(PASSWORD)
    made = CliRunner().invoke(topics_app, ["create", "by-command-line", *words])
    assert made.exit_code == 0, made.output
    listed = CliRunner().invoke(topics_app, ["list", *words])
    assert "by-command-line" in listed.output
    write("wrong")
    refused = CliRunner().invoke(topics_app, ["list", *words])
    assert isinstance(refused.exception, AccessRefused)
    assert "the login by SCRAM-SHA-512 is refused" in str(refused.exception)


def test_the_audit_reads_secured_clusters(secure_kafka: SecureKafka, tmp_path: Path) -> None:
    """The driver's look at the clusters, and a task as Spark's workers run it: from options that are text."""
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    security = {
        "protocol": "SASL_SSL",
        "ssl": secure_kafka.tls(),
        "sasl": {"mechanism": "SCRAM-SHA-256", "username": USER, "password": {"file": str(password)}},
    }
    address = secure_kafka.address("SECURE")
    path = tmp_path / "audit.yaml"
    clusters = {
        name: {"bootstrap": [address], "tier": tier, "security": security, "topics": {"flights": topic}}
        for name, tier, topic in (("ewr", "source", "audited-source"), ("agg", "aggregate", "audited"))
    }
    path.write_text(yaml.safe_dump({"clusters": clusters, "topics": ["flights"]}))
    config = load_audit_config(path)

    async def fill() -> None:
        async with Cluster("beside", [secure_kafka.peer.bootstrap]) as beside:
            for topic in ("audited-source", "audited", "millrace.audit"):
                await create_topic(beside, topic, 1, 1, {})
            await send(beside, "audited", 0, build_batch([Record(b"k", b"v", (), 1)] * 7))

    asyncio.run(fill())
    captured = asyncio.run(capture(config, EventLedger(), lambda: 0))
    assert {(pin.cluster, pin.end_offset) for pin in captured.pins} == {("ewr", 0), ("agg", 7)}

    options = cluster_options(config)
    assert PASSWORD not in str(options)
    range_ = OffsetRange("agg", "aggregate", "flights", "audited", 0, 0, 7)
    text = {**options, "ranges": ranges_option([range_])}

    def read() -> Iterator[pa.RecordBatch]:
        return read_task([range_], replace(parse_options(text), mode=RECORDS))

    rows = [row for batch in read() for row in batch.to_pylist()]
    assert len(rows) == 7
    password.unlink()
    with pytest.raises(ConfigError, match=r"security of cluster agg, on .*: sasl.password: .*No such file"):
        list(read())
