"""The port of a running mirror: it answers as its description says, is closed to strangers, and what cannot
be asked is told in one line."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from millrace.broker.client.admin import create_topic
from millrace.mirror.config import ControlConfig
from tests.cluster.mirror_calls import answered, call, command, runs
from tests.cluster.mirror_process import MirrorProcess, until
from tests.openapi import undescribed
from tests.pairs import Pair, in_pairs


@in_pairs("millrace-millrace", "kafka-millrace")
def test_the_port_answers_as_its_description_says(pair: Pair) -> None:
    topic = pair.unique("flights")

    async def prepare() -> MirrorProcess:
        async with pair.source.cluster() as source:
            await create_topic(source, topic, 1, 1)
        mirror = pair.mirror([topic])
        await runs(mirror, 1)
        return mirror

    mirror = asyncio.run(prepare())
    description = call(mirror, "GET", "/openapi.json")[2]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            # What is to be skipped is not stopped.
            expected = 409 if path == "/skip" else 200
            status, headers, answer = call(mirror, method.upper(), path, bodies_for(topic).get(path))
            assert status == expected, (path, answer)
            check_answer(description, operation, status, headers, answer)
    assert call(mirror, "GET", "/nothing")[0] == 404
    status, headers, _ = call(mirror, "POST", "/status", {})
    assert (status, headers["allow"]) == (405, "GET")
    status, _, answer = call(mirror, "POST", "/pause", {"sauce": "src"})
    check(description, {"$ref": "#/components/schemas/ErrorAnswer"}, answer)
    assert status == 400 and "sauce" in answer["error"]
    assert call(mirror, "POST", "/pause", {})[0] == 400  # not everything by mistake


def bodies_for(topic: str) -> dict[str, dict[str, Any]]:
    """A right body for each control call."""
    return {
        "/pause": {"source": "src", "topic": topic},
        "/resume": {"source": "src", "topic": topic},
        "/retry": {"all": True},
        "/skip": {"source": "src", "topic": topic, "partition": 0},
        "/throttle": {"source": "src", "bytes_per_second": None},
        "/reload": {},
        "/drain": {},
    }


def check_answer(
    description: dict[str, Any], operation: dict[str, Any], status: int, headers: dict[str, Any], answer: Any
) -> None:
    """It is one that the operation has, of the kind and form that it says."""
    (media, content), *_ = operation["responses"][str(status)]["content"].items()
    assert headers["content-type"].partition(";")[0] == media, (operation["operationId"], status)
    check(description, content["schema"], answer)
    if "$ref" in content["schema"]:
        assert undescribed(description, content["schema"]["$ref"].rpartition("/")[2], answer) == []
    assert headers["cache-control"] == "no-store"


def check(description: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": description["components"]}).validate(value)


@in_pairs("millrace-millrace", "millrace-kafka")
def test_control_is_closed_to_pages_and_to_the_network(pair: Pair) -> None:
    topic = pair.unique("flights")

    async def answers(mirror: MirrorProcess) -> None:
        async def ready() -> bool:
            return mirror.get("/healthz")[0] == 200

        await until(lambda: answered(ready), logs_of=[mirror])

    local, wide = (pair.mirror([topic], start=False) for _ in range(2))
    # As it listens where nothing is said; the port alone is one that is free.
    local.settings["control"] = {"listen": f"{ControlConfig().listen.host}:{local.port}"}
    wide.settings["control"] = {"listen": f"0.0.0.0:{wide.port}", "advertised": f"127.0.0.1:{wide.port}"}
    for mirror in (local, wide):
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
        mirror.start()
    asyncio.run(answers(local))
    asyncio.run(answers(wide))
    pause = {"all": True}
    assert call(local, "POST", "/pause", pause, Host="evil.example")[0] == 403
    assert call(local, "GET", "/status", Host="evil.example")[0] == 403
    assert call(local, "POST", "/pause", pause, Origin="http://evil.example")[0] == 403
    assert call(local, "POST", "/pause", pause, Content_Type="text/plain")[0] == 415
    assert call(wide, "GET", "/metrics", Host="mirror.example")[0] == 200
    assert "there is no control.token" in command(wide, "pause", "--all", expect=1)
    assert "control calls are refused" in wide.log
    ask_from_outside(local, wide, bodies_for(topic))

    token = pair.folder / "token"
    token.write_text("a-secret-for-this-test\n")
    wide.settings["control"] |= {"token": {"file": str(token)}}
    wide.config_path.write_text(yaml.safe_dump(wide.settings))
    wide.kill()
    wide.start()
    asyncio.run(answers(wide))
    assert call(wide, "POST", "/retry", pause)[0] == 401
    assert call(wide, "POST", "/retry", pause, Authorization="Bearer guess")[0] == 401

    async def taken() -> bool:
        return call(wide, "POST", "/retry", pause, Authorization="Bearer a-secret-for-this-test")[0] == 200

    asyncio.run(until(taken, logs_of=[wide]))
    assert "is tried again" in command(wide, "retry", "--all")
    # The token may change without a restart, and is said nowhere.
    token.write_text("another-secret")
    assert call(wide, "POST", "/retry", pause, Authorization="Bearer a-secret-for-this-test")[0] == 401
    assert "is tried again" in command(wide, "retry", "--all")
    assert "secret" not in wide.log


def ask_from_outside(local: MirrorProcess, wide: MirrorProcess, bodies: dict[str, dict[str, Any]]) -> None:
    """Every call of the description by an address that is not the one of the default listener. `local` has
    that one, `wide` listens everywhere and has no token."""
    outside = address_outside()
    description = call(wide, "GET", "/openapi.json", at=outside)[2]
    refused = set()
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            with pytest.raises(urllib.error.URLError) as closed:
                call(local, method.upper(), path, bodies.get(path), at=outside)
            assert isinstance(closed.value.reason, ConnectionRefusedError), closed.value
            status, headers, answer = call(wide, method.upper(), path, bodies.get(path), at=outside)
            check_answer(description, operation, status, headers, answer)
            if method == "post":
                assert status == 403 and "there is no control.token" in answer["error"], (path, answer)
                refused.add(path)
            else:
                # This mirror has nothing to carry, and is not ready.
                assert status == 200 or (path, status) == ("/readyz", 503), (path, answer)
    assert refused == bodies.keys()
    status = call(wide, "GET", "/status", at=outside)[2]
    throttles = [each["throttle_bytes_per_second"] for each in status["sources"]]
    assert (status["paused"], status["draining"], throttles) == ([], False, [None])


def address_outside() -> str:
    """Of this machine's network, where it has one; otherwise another one of loopback, which a listener on
    127.0.0.1 hears as little."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing; documentation's addresses lead outside
            found = str(probe.getsockname()[0])
        except OSError:
            found = "127.0.0.1"
    return "127.0.0.2" if found == "127.0.0.1" else found


def test_a_mirror_that_does_not_run_is_one_line(tmp_path: Any) -> None:
    mirror = MirrorProcess(tmp_path, "127.0.0.1:1", {"ewr": "127.0.0.1:2"})
    for words in (["status"], ["pause", "--all"], ["drain"], ["reload"], ["skip", "ewr/flights:0"]):
        said = command(mirror, *words, expect=20)
        assert f"no worker of the mirror answers at http://127.0.0.1:{mirror.port}" in said


@pytest.mark.parametrize(
    "words",
    [
        ["pause"],
        ["pause", "ewr", "--all"],
        ["pause", "ewr/flights:x"],
        ["skip", "ewr/flights"],
        ["skip", "*/flights:0"],
        ["throttle", "ewr"],
        ["throttle", "ewr", "fast"],
        ["throttle", "ewr", "1MB", "--off"],
        ["status", "--url", "ftp://x"],
        ["status", "--interval", "0"],
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(tmp_path: Any, words: list[str]) -> None:
    mirror = MirrorProcess(tmp_path, "127.0.0.1:1", {"ewr": "127.0.0.1:2"})
    assert "millrace:" in command(mirror, *words, expect=64)
