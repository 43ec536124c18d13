"""The JVM that runs Apache Kafka's tools for these tests (`java_tools`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wire.java_tools import MAIN_CLASSES, Host, JavaTools

NOBODY = "127.0.0.1:1"


def test_host_that_takes_too_long_is_begun_anew_and_an_empty_word_is_a_word(tmp_path: Path) -> None:
    start, topics = JavaTools(NOBODY, tmp_path).start(), MAIN_CLASSES["topics"]
    host = Host()
    try:
        with pytest.raises(AssertionError, match=f"ended at {topics} --list --bootstrap-server {NOBODY}"):
            host.run(start, topics, "--list", "--bootstrap-server", NOBODY, within_s=0.01)
        nothing = host.run(start, topics, "--list", "--bootstrap-server")
        assert (nothing.status, "requires an argument" in nothing.err) == (1, True)
        empty = host.run(start, topics, "--list", "--bootstrap-server", "")
        assert (empty.status, "KafkaAdminClient" in empty.err) == (1, True)
        assert "requires an argument" not in empty.err
    finally:
        host.end()
