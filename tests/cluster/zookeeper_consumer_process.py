"""A process with one `ZookeeperConsumer`, as a user would write it: prints what it is given, a line each.

Run as `python zookeeper_consumer_process.py '<json>'` with the keys zookeeper, group, streams (by topic) or
include, options, and pause_s (what it works on each message). Lines of JSON on stdout: {"owned": …} whenever
that changes, {"at": [topic, partition, offset], "value": …} for each message.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from millrace.deploy.processes import spawn
from tests.waiting import patience

PROJECT = Path(__file__).resolve().parents[2]


class ConsumerProcess:
    """The test's handle on it. `lines` grows as the process speaks."""

    def __init__(self, folder: Path, name: str, **plan: Any) -> None:
        self.log_path = folder / f"{name}.log"
        command = [sys.executable, __file__, json.dumps(plan)]
        self.process = spawn(
            command,
            log=self.log_path,
            stdout=subprocess.PIPE,
            environment={"PYTHONPATH": str(PROJECT)},
            die_with_parent=True,
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):
                self.lines.append(json.loads(line))

    @property
    def owned(self) -> set[tuple[str, int]]:
        """What it said last that it owns."""
        said = [line["owned"] for line in list(self.lines) if "owned" in line]
        return {(topic, partition) for topic, partition in said[-1]} if said else set()

    @property
    def messages(self) -> list[tuple[tuple[str, int, int], str]]:
        return [(tuple(line["at"]), line["value"]) for line in list(self.lines) if "at" in line]

    def kill(self) -> None:
        """SIGKILL; waits until everything it said has been read."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(patience(60))
        self._reader.join(patience(60))


def main(plan: dict[str, Any]) -> None:
    from millrace.broker.coordination.zookeeper_consumer import MessageStream, ZookeeperConsumer

    said: queue.Queue[dict[str, Any]] = queue.Queue()

    def work(stream: MessageStream) -> None:
        for message in stream:
            value = (message.value or b"").decode()
            said.put({"at": [message.topic, message.partition, message.offset], "value": value})
            if plan.get("pause_s"):
                time.sleep(plan["pause_s"])

    with ZookeeperConsumer(plan["zookeeper"], plan["group"], **plan.get("options", {})) as consumer:
        if "include" in plan:
            streams = consumer.create_message_streams_by_filter(include=plan["include"])
        else:
            by_topic = consumer.create_message_streams(plan["streams"])
            streams = [stream for each in by_topic.values() for stream in each]
        for stream in streams:
            threading.Thread(target=work, args=(stream,), daemon=True).start()
        owned: set[tuple[str, int]] | None = None
        while True:
            now = set(consumer.owned_partitions())
            if now != owned:
                owned = now
                said.put({"owned": sorted(owned)})
            try:
                print(json.dumps(said.get(timeout=0.05)), flush=True)
            except queue.Empty:
                continue


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
