"""The Java example of EVENTS.md, taken from the file and run: what it sends and tells is proven."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import millrace.audit
from millrace.audit.contract.events import CLOSED
from millrace.audit.reconciliation.verdicts import Verdict
from tests.cluster.audited_topics import (
    DEADLINE_S,
    audit,
    facts_of,
    fate,
    ledger_of,
    make_topic,
    read_all,
    unique,
)
from tests.peers.kafka import gather_jars
from tests.verdicts import overall_verdict
from tests.waiting import patience

COUNT = 500
pytestmark = [pytest.mark.java, pytest.mark.kafka]


def example() -> str:
    document = (Path(millrace.audit.__path__[0]) / "contract" / "EVENTS.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```java\n(.*?)\n```$", document, re.MULTILINE | re.DOTALL)
    return program


def test_the_java_example_is_audited_like_everything_else(broker, tmp_path):
    bootstrap = broker.bootstrap
    topic, events_topic = make_topic(bootstrap, "java"), unique("events")
    source = tmp_path / "AuditedStream.java"
    source.write_text(example(), encoding="utf-8")
    command = ["java", "-Xmx256M", "-XX:TieredStopAtLevel=1", "-cp", f"{gather_jars()}/*", str(source)]
    done = subprocess.run(
        [*command, bootstrap, topic, events_topic, str(COUNT)],
        capture_output=True,
        text=True,
        timeout=patience(2 * DEADLINE_S),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = facts_of(ledger_of(bootstrap, events_topic), topic)
    assert (facts.state, facts.last_assigned, facts.last_settled) == (CLOSED, COUNT, COUNT)
    assert fate(facts, "acknowledged") == set(range(1, COUNT + 1))
    messages = read_all(bootstrap, topic)
    rows = audit(facts, messages)
    assert overall_verdict(rows) is Verdict.PROVEN and {row.producer for row in rows} == {"java@example"}
    rows = audit(facts, [message for message in messages if message.key() != b"k41"])
    assert [row.missing for row in rows if row.missing] == [{("produced", "source"): ((42, 42),)}]
