"""The demo from start to end; `run` reads as its list of steps.

Called by `millrace demo`. Everything it starts is a child that dies with it (processes.py), lies in one
temporary folder, and is stopped on success, failure and Ctrl-C alike. With `--keep` the sandbox is detached
and stays, found again by `millrace local --file`.

Exit status: 0 proven, 1 loss or duplicate, 2 something unknown, 3 the demo itself failed, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from millrace.broker.errors import FatalError, MillraceError
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.deploy import processes
from millrace.deploy.demo import display, injection, mirrors
from millrace.deploy.demo.events import Events, EventSource
from millrace.deploy.demo.injection import Deeds, Target, Verification
from millrace.deploy.demo.layout import AGGREGATE, MIRROR, demo_sandbox
from millrace.deploy.demo.replay import ReplayPlan, SentTimes
from millrace.deploy.demo.tail import TailReader
from millrace.deploy.demo.workspace import Interrupted, Workspace, prepare_report, signals_raise
from millrace.deploy.java import find_java
from millrace.deploy.local.sandbox import Sandbox

PARTITIONS = 4
# Events of another year must stay, however old they look.
TOPIC_CONFIGS = {"retention.ms": "-1"}

FAILED_STATUS = 3
INTERRUPTED_STATUS = 130
POLL_S = 0.25
CAUGHT_UP_TIMEOUT_S = 120.0
KILL_AT_FRACTION = 0.4
REPLAY_START_MARGIN_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `millrace demo` was asked for."""

    source: EventSource
    lose_count: int = 0
    duplicate_count: int = 0
    seed: int = 1
    kill: bool = False
    keep: bool = False
    report: Path = Path("demo-report")
    replay_seconds: float = 15.0


def run(options: DemoOptions) -> int:
    """Runs the demo; the exit status."""
    try:
        with signals_raise(), Workspace(options.keep) as folder:
            return Demo(options, folder).run()
    except (Interrupted, KeyboardInterrupt):
        print("millrace: interrupted; everything that the demo started is stopped", file=sys.stderr)
        return INTERRUPTED_STATUS
    except MillraceError as error:
        print(f"millrace: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED_STATUS
    except Exception:
        # Any other end would be status 1, which says that a record is lost.
        traceback.print_exc()
        return FAILED_STATUS


class Demo:
    """One run. `folder` takes data, logs, plans and the audit's state."""

    def __init__(self, options: DemoOptions, folder: Path):
        self._options = options
        self._folder = folder
        self._display = display.Display()
        self._replays: dict[str, subprocess.Popen[bytes]] = {}
        self._published: dict[str, int] = {}

    def run(self) -> int:
        options, show = self._options, self._display
        prepare_report(options.report)
        find_java()  # a missing one is said now, not after the replay
        events = options.source.load()
        targets = injection.choose_targets(events, options.lose_count, options.duplicate_count, options.seed)
        show.say(
            f"{events.count:,} events of {len(events.feeds)} producers in the datacenters "
            f"{', '.join(events.datacenters)}; topic {events.topic}"
        )
        sandbox = self._sandbox(events, targets)
        kept = False
        try:
            show.step("starting ZooKeeper and the brokers")
            sandbox.up(only_tiers=(0, 1))
            self._create_topic(sandbox, events)
            show.step("starting the mirrors")
            sandbox.up(only_tiers=(2,))
            latency = self._replay_and_mirror(sandbox, events)
            show.say(display.latency_line(latency))
            show.step("auditing with PySpark")
            status, summary = self._audit(sandbox, events)
            status = self._conclude(status, summary, events, targets)
            kept = options.keep
            if kept:
                self._tell_addresses(sandbox)
            return status
        finally:
            self._stop_replays()
            if not kept:
                sandbox.down()

    # The sandbox.

    def _sandbox(self, events: Events, targets: list[Target]) -> Sandbox:
        spec = demo_sandbox(events.datacenters, self._folder)
        (self._folder / "sandbox.yaml").write_text(
            yaml.safe_dump(json.loads(spec.model_dump_json()), sort_keys=False), encoding="utf-8"
        )
        if not targets:
            return Sandbox(spec, self._folder, detached=self._options.keep)
        path = self._folder / "targets.json"
        injection.write_targets(targets, path)

        def sabotaged(config: Path, process: str) -> list[str]:
            deeds = self._folder / f"deeds-{process}.json"
            command = [sys.executable, "-m", "millrace.deploy.demo.sabotage"]
            return [*command, str(config), str(path), str(deeds)]

        return Sandbox(spec, self._folder, detached=self._options.keep, mirror_command=sabotaged)

    def _create_topic(self, sandbox: Sandbox, events: Events) -> None:
        sources = {name: sandbox.bootstrap(name) for name in events.datacenters}
        mirrors.create_topics(sources, events.topic, PARTITIONS, TOPIC_CONFIGS)

    def _tell_addresses(self, sandbox: Sandbox) -> None:
        self._display.say("everything is left running:")
        for row in sandbox.addresses():
            self._display.say(f"  {row['service']:<22}{row['address']}")
        self._display.say(
            f"stop it with: millrace local down --delete --file {self._folder / 'sandbox.yaml'}"
        )

    # Replaying.

    def _replay_and_mirror(self, sandbox: Sandbox, events: Events) -> display.Latency | None:
        """Replays every feed and returns when the aggregate has all of it."""
        tail = TailReader(sandbox.bootstrap(AGGREGATE), events.topic)
        tail.start()
        try:
            self._display.step("replaying")
            self._start_replays(sandbox, events)
            self._watch_replays(sandbox, events)
            self._wait_until_mirrored(sandbox, events)
        finally:
            tail.stop()
        if tail.problem is not None:
            raise FatalError(f"reading the aggregate failed: {tail.problem}")
        return tail.latency(SentTimes.read(self._sent_times(name)) for name in events.datacenters)

    def _start_replays(self, sandbox: Sandbox, events: Events) -> None:
        begin_at = time.time() + REPLAY_START_MARGIN_S
        for name in events.datacenters:
            plan = self._folder / f"replay-{name}.json"
            ReplayPlan(
                source=self._options.source,
                datacenter=name,
                bootstrap=sandbox.bootstrap(name),
                window_ms=events.window_ms,
                begin_at=begin_at,
                seconds=self._options.replay_seconds,
                sent_times=str(self._sent_times(name)),
            ).write(plan)
            command = [sys.executable, "-m", "millrace.deploy.demo.replay", str(plan)]
            child = processes.spawn(
                command, log=self._replay_log(name), stdout=subprocess.PIPE, die_with_parent=True
            )
            if child.stdout is None:
                raise RuntimeError("a pipe was asked for")
            os.set_blocking(child.stdout.fileno(), False)
            self._replays[name] = child

    def _watch_replays(self, sandbox: Sandbox, events: Events) -> None:
        """Shows progress until every replay has ended; kills and restarts in the middle when asked to."""
        kill_pending = self._options.kill
        while self._replays:
            time.sleep(POLL_S)
            self._read_progress()
            self._check_services(sandbox)
            standing = mirrors.standing(sandbox.control_addresses())
            _refuse_gaps(standing)
            self._show(events, standing)
            if kill_pending and sum(self._published.values()) >= KILL_AT_FRACTION * events.count:
                self._kill_and_restart(sandbox)
                kill_pending = False
        if kill_pending:
            raise FatalError("the replay ended before anything could be killed: use a longer --seconds")

    def _wait_until_mirrored(self, sandbox: Sandbox, events: Events) -> None:
        sources = {name: sandbox.bootstrap(name) for name in events.datacenters}
        ends = mirrors.source_ends(sources, [events.topic, AUDIT_TOPIC])
        deadline = time.monotonic() + CAUGHT_UP_TIMEOUT_S
        while True:
            standing = mirrors.standing(sandbox.control_addresses())
            _refuse_gaps(standing)
            arrived = standing.has_reached(ends)
            self._show(events, standing, last=arrived)
            if arrived:
                return
            if time.monotonic() > deadline:
                raise FatalError(
                    f"the mirrors did not catch up within {CAUGHT_UP_TIMEOUT_S:.0f} s "
                    f"({standing.lag:,} records behind): see the logs in {self._folder / 'logs'}"
                )
            self._check_services(sandbox)
            time.sleep(POLL_S)

    def _kill_and_restart(self, sandbox: Sandbox) -> None:
        mirror, broker = f"mirror-{MIRROR}-1", f"broker-{AGGREGATE}"
        self._display.step(f"SIGKILL to {mirror} and {broker}")
        sandbox.kill(mirror)
        sandbox.kill(broker)
        sandbox.start(broker)
        sandbox.start(mirror)
        self._display.step(f"{broker} and {mirror} run again")

    def _read_progress(self) -> None:
        for name, child in list(self._replays.items()):
            if child.stdout is None:
                raise RuntimeError("a replay's output is piped")
            # Looked at before the pipe, so that what was written last is not missed.
            status = child.poll()
            for line in (child.stdout.read() or b"").splitlines():
                with contextlib.suppress(ValueError):
                    self._published[name] = json.loads(line)["published"]
            if status is None:
                continue
            child.stdout.close()
            del self._replays[name]
            if status != 0:
                log = self._replay_log(name)
                words = processes.last_lines(log, 1)
                raise FatalError(f"the replay of {name} ended with status {status}: {words} (log: {log})")

    def _check_services(self, sandbox: Sandbox) -> None:
        for name in sandbox.ended():
            raise FatalError(f"{name} ended: {sandbox.last_words(name)}")

    def _stop_replays(self) -> None:
        for child in self._replays.values():
            child.kill()
            child.wait()

    def _show(self, events: Events, standing: mirrors.Standing, *, last: bool = False) -> None:
        self._display.progress(
            display.Progress(
                published=sum(self._published.values()),
                total=events.count,
                mirrored=standing.mirrored(events.topic),
                lag=standing.lag if standing.all_answered else None,
            ),
            last=last,
        )

    def _sent_times(self, datacenter: str) -> Path:
        return self._folder / f"sent-{datacenter}.npz"

    def _replay_log(self, datacenter: str) -> Path:
        return self._folder / "logs" / f"replay-{datacenter}.log"

    # The audit and the verdict.

    def _audit(self, sandbox: Sandbox, events: Events) -> tuple[int, dict[str, Any]]:
        """Runs the audit in a process of its own; its exit status and summary.json."""
        config = self._folder / "audit.yaml"
        tiers = dict.fromkeys(events.datacenters, "source") | {AGGREGATE: "aggregate"}
        content = {
            "clusters": {
                name: {"bootstrap": [sandbox.bootstrap(name)], "tier": tier} for name, tier in tiers.items()
            },
            "topics": [events.topic],
            "window": f"{events.window_ms}ms",
            "grace": "0s",
            "state": str(self._folder / "audit-state"),
            "report": str(self._options.report.absolute()),
        }
        config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        log = self._folder / "logs" / "audit.log"
        command = [sys.executable, "-m", "millrace.deploy.cli", "audit", "run", "--config", str(config)]
        child = processes.spawn(command, log=log, die_with_parent=True)
        try:
            status = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if status not in (0, 1, 2):
            raise FatalError(f"the audit failed: {processes.last_lines(log, 1)} (log: {log})")
        summary = json.loads((self._options.report / "summary.json").read_text(encoding="utf-8"))
        return status, summary

    def _conclude(
        self, status: int, summary: Mapping[str, Any], events: Events, targets: list[Target]
    ) -> int:
        show = self._display
        show.say("")
        for line in display.result_table(summary, events.datacenters, AGGREGATE):
            show.say(line)
        show.say("")
        for line in display.findings(summary):
            show.say(line)
        if targets:
            verification = self._verify(summary)
            show.say(verification.sentence())
            if not verification.holds:
                status = FAILED_STATUS
        show.say(f"{summary['verdict']}   {summary.get('sentence', '')}".rstrip())
        show.step(f"report: {self._options.report / 'index.html'}")
        return status

    def _verify(self, summary: Mapping[str, Any]) -> Verification:
        contents = [
            json.loads(path.read_text(encoding="utf-8")) for path in sorted(self._folder.glob("deeds-*.json"))
        ]
        deeds = Deeds.merge(contents)
        injected = self._options.report / "injected.json"
        injected.write_text(json.dumps(deeds.as_json(), indent=2) + "\n", encoding="utf-8")
        return Verification(
            deeds=deeds,
            named=injection.named_by_audit(summary),
            planned_lost=self._options.lose_count,
            planned_duplicated=self._options.duplicate_count,
        )


def _refuse_gaps(standing: mirrors.Standing) -> None:
    if standing.problems:
        raise FatalError(f"the mirror stopped at a gap: {standing.problems[0]}")
