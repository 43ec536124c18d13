"""Wishes that hold for all workers of a mirror and over restarts; drain and reload."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from millrace.deploy.processes import spawn
from millrace.mirror.control.wishes import Wishes
from millrace.mirror.topics.own_topics import WISHES
from tests.cluster.mirror_calls import answered, call, command, partitions, runs, states
from tests.cluster.mirror_process import MirrorProcess, end_offset, send, until
from tests.pairs import End, Pair, in_pairs
from tests.record_deletion import delete_records
from tests.waiting import patience


class Watching:
    """`millrace mirror status --watch` of a worker, which need not run yet, until it is interrupted."""

    def __init__(self, mirror: MirrorProcess) -> None:
        words = ["mirror", "status", "--watch", "--interval", "0.2", "--json"]
        self._log = mirror.log_path.with_name("watched.jsonl")
        self._process = spawn(
            [sys.executable, "-m", "millrace.deploy.cli", *words, "--config", str(mirror.config_path)],
            log=self._log,
            die_with_parent=True,
        )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def shows(self, topic: str | None, state: str | None) -> None:
        """Until the latest look has the topic in this state; without a topic, until one meets no worker."""

        async def is_so() -> bool:
            assert self._process.poll() is None, self.log
            looks = self.log.splitlines()
            look = json.loads(looks[-1]) if looks and looks[-1].endswith("}") else {}
            found = [each["state"] for each in look.get("topics", ()) if each["topic"] == topic]
            return found == [state] if topic else "error" in look

        await until(is_so, lambda: self.log[-2000:])

    def interrupt(self) -> int:
        """As Ctrl-C does; the exit status."""
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(patience())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(patience())


def batch(count: int = 1, size: int = 10) -> bytearray:
    now_ms = int(time.time() * 1000)
    return build_batch([Record(b"k", b"v" * size, timestamp_ms=now_ms) for _ in range(count)])


async def arrives(target: Cluster, topic: str, count: int, *mirrors: MirrorProcess) -> None:
    """Until a consumer that reads committed sees `count` records."""

    async def seen() -> bool:
        if not await end_offset(target, topic, 0):
            return False
        return len([record async for record in read_topic_to_end(target, topic)]) == count

    await until(seen, logs_of=mirrors)


async def wishes_left(target: Cluster, mirror: MirrorProcess) -> Wishes:
    wishes = Wishes()
    async for record in read_topic_to_end(target, WISHES.of(mirror.settings["name"])):
        wishes.apply(record.key, record.value)
    return wishes


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_pause_holds_for_all_workers_and_over_restarts(pair: Pair) -> None:
    quiet, busy = pair.unique("quiet"), pair.unique("busy")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            for topic in (quiet, busy):
                await create_topic(source, topic, 1, 1)
            first = pair.mirror([quiet, busy])
            await runs(first, 2)
            assert command(first, "pause", f"src/{quiet}") == f"src/{quiet} is paused until it is resumed\n"
            for topic in (quiet, busy):
                await send(source, topic, 0, batch(3))
            await arrives(target, busy, 3, first)

            async def is_behind() -> bool:
                """Nothing is fetched, and the lag is seen to grow all the same."""
                found = partitions(first).get((quiet, 0), {})
                return found.get("state") == "paused" and found.get("lag_records") == 3

            await until(is_behind, lambda: str(partitions(first)))
            paused = f'millrace_mirror_paused_partitions{{partition="0",source="src",topic="{quiet}"}} 1.0'
            assert paused in first.get("/metrics")[1]
            first.kill()

            second = pair.mirror([quiet, busy], start=False, name=first.settings["name"])
            watching = Watching(second)
            try:
                await watching.shows(None, None)
                second.start()
                await send(source, busy, 0, batch(2))
                await arrives(target, busy, 5, second)
                await runs(second, 2)
                assert partitions(second)[quiet, 0]["state"] == "paused"
                assert await end_offset(target, quiet, 0) == 0
                assert f"paused: src/{quiet}" in command(second, "status")
                await watching.shows(quiet, "paused")

                command(second, "resume", f"src/{quiet}")
                await arrives(target, quiet, 3, second)
                await watching.shows(quiet, "running")
                assert watching.interrupt() == 130
                assert "Traceback" not in watching.log
            finally:
                watching.kill()
            assert (await wishes_left(target, second)).paused_scopes == {}
            unknown = command(second, "pause", "src/nothing-of-the-kind", expect=1)
            assert "source src has no topic 'nothing-of-the-kind' that this mirror carries" in unknown
            assert "no source 'nowhere' in this mirror; it has src" in command(
                second, "pause", "nowhere", expect=1
            )

    asyncio.run(story())


@pytest.mark.long
@in_pairs("millrace-kafka", "kafka-millrace")
def test_one_gap_is_let_pass_by_a_worker_that_does_not_carry_it(pair: Pair) -> None:
    topic = pair.unique("flights")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            await send(source, topic, 0, batch())
            owner = pair.mirror([topic])
            await arrives(target, topic, 1, owner)
            other = pair.mirror([topic], name=owner.settings["name"])

            async def both_know() -> bool:
                return all(len(call(each, "GET", "/mirror")[2]["workers"]) == 2 for each in (owner, other))

            await until(lambda: answered(both_know), logs_of=[owner, other])
            if partitions(other):
                owner, other = other, owner
            assert not partitions(other)

            command(other, "pause", "src")

            async def paused() -> bool:
                return states(owner) == {"paused"}

            await until(paused, logs_of=[owner])
            for _ in range(9):
                await send(source, topic, 0, batch())
            await delete_records(source, {(topic, 0): 7})
            command(other, "resume", "--all")

            async def stopped() -> bool:
                return states(owner) == {"stopped"}

            await until(stopped, logs_of=[owner])
            gap = partitions(owner)[topic, 0]["gap"]
            assert (gap["from"], gap["to"], gap["class"]) == (1, 7, "expired")

            # What a worker knows of the others may be a second old.
            async def shown() -> bool:
                return f"src/{topic}:0 is stopped: expired, 6 offsets from 1" in command(other, "status")

            await until(shown, lambda: command(other, "status"))
            assert f"millrace mirror skip src/{topic}:0" in command(other, "status")

            # Another gap than that is not meant; the worker that carries it says so, and nothing moves.
            wrong = {"source": "src", "topic": topic, "partition": 0, "from": 2, "class": "expired"}
            status, _, answer = call(owner, "POST", "/skip", wrong)
            assert (status, "stopped at another gap" in answer["error"]) == (409, True)
            assert call(other, "POST", "/skip", wrong)[0] == 200
            assert states(owner) == {"stopped"}

            said = command(other, "skip", f"src/{topic}:0")
            assert said == f"the expired gap of src/{topic}:0 at offset 1 is let pass\n"
            await arrives(target, topic, 4, owner)

            async def forgotten() -> bool:
                return not (await wishes_left(target, owner)).skipped_partitions

            await until(forgotten, logs_of=[owner])

            async def shown_no_more() -> bool:
                return "is stopped" not in command(other, "status")

            await until(shown_no_more, lambda: command(other, "status"))
            assert "is not stopped at a gap" in command(other, "skip", f"src/{topic}:0", expect=1)

    asyncio.run(story())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_throttle_slows_one_source_alone_and_can_be_lifted(pair: Pair, second_source: End) -> None:
    topic, free = pair.unique("bulk"), pair.unique("free")

    def of_source(mirror: MirrorProcess, name: str) -> Any:
        (found,) = (each for each in mirror.status()["sources"] if each["cluster"] == name)
        return found

    async def story() -> None:
        async with (
            pair.source.cluster() as source,
            second_source.cluster() as second,
            pair.target.cluster() as target,
        ):
            await create_topic(source, topic, 1, 1)
            await create_topic(second, free, 1, 1)
            fetch = {"partition_max_bytes": 65_536, "max_bytes": 65_536}
            mirror = pair.mirror([topic, free], also=[second_source], fetch=fetch)
            await runs(mirror, 2)
            said = command(mirror, "throttle", "src", "200kB")
            assert said == "src is read at 200000 bytes/s at most, all workers together\n"

            async def limited() -> bool:
                return bool(of_source(mirror, "src")["throttle_bytes_per_second"] == 200_000)

            await until(limited, logs_of=[mirror])
            assert of_source(mirror, second_source.name)["throttle_bytes_per_second"] is None

            def bytes_of(name: str) -> int:
                return sum(each["bytes"] for each in mirror.status()["topics"] if each["topic"] == name)

            # All of it lies there before the first of it is read: 3 MB, 15 s at this rate.
            command(mirror, "pause", "src")

            async def paused() -> bool:
                return "paused" in states(mirror)

            await until(paused, logs_of=[mirror])
            for _ in range(60):
                await send(source, topic, 0, batch(50, 1_000))
            before = bytes_of(topic)
            begun = time.monotonic()
            command(mirror, "resume", "src")
            await asyncio.sleep(2)  # what is measured is a time

            async def flows() -> bool:
                return bytes_of(topic) > before

            await until(flows, logs_of=[mirror])
            for _ in range(60):
                await send(second, free, 0, batch(50, 1_000))
            await arrives(target, free, 3_000, mirror)
            grown = bytes_of(topic) - before
            elapsed_s = time.monotonic() - begun
            # A bucket may hold a moment's worth, and a fetch is of 64 KiB.
            assert 0 < grown <= 200_000 * (elapsed_s + 1.5) + 131_072
            assert grown < 60 * 50 * 1_000, "the other source's came before this one's"
            assert "throttled: src 200 kB/s" in command(mirror, "status")
            assert (
                'millrace_mirror_throttle_bytes_per_second{source="src"} 200000' in mirror.get("/metrics")[1]
            )
            command(mirror, "throttle", "src", "--off")
            await arrives(target, topic, 3_000, mirror)

            async def lifted() -> bool:
                return of_source(mirror, "src")["throttle_bytes_per_second"] is None

            await until(lifted, logs_of=[mirror])

    asyncio.run(story())


@in_pairs("millrace-kafka", "kafka-millrace")
def test_a_reload_takes_new_topics_and_sources_and_refuses_the_rest_by_name(
    pair: Pair, second_source: End
) -> None:
    old, new, further = pair.unique("old"), pair.unique("new"), pair.unique("further")

    def rewrite(mirror: MirrorProcess, change: Any) -> None:
        change(mirror.settings)
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))

    async def story() -> None:
        async with (
            pair.source.cluster() as source,
            second_source.cluster() as second,
            pair.target.cluster() as target,
        ):
            for cluster, topic in ((source, old), (source, new), (second, further)):
                await create_topic(cluster, topic, 1, 1)
                await send(cluster, topic, 0, batch())
            mirror = pair.mirror([old])
            await arrives(target, old, 1, mirror)

            section = mirror.settings["sources"][0]
            rewrite(mirror, lambda settings: section["topics"]["include"].append(new))
            said = command(mirror, "reload")
            assert "reloaded: sources[src].topics.include" in said
            await arrives(target, new, 1, mirror)

            # Another name for the same cluster is what no start would take: records would be there twice.
            twin = {**section, "cluster": "twin"}
            rewrite(mirror, lambda settings: settings["sources"].append(twin))
            refused = command(mirror, "reload", expect=1)
            assert "nothing was changed" in refused and "twin: is the same cluster as src" in refused

            # A second source, by a signal.
            twin |= {"bootstrap": [second_source.bootstrap], "topics": {"include": [further]}}
            rewrite(mirror, lambda settings: settings["sources"].__setitem__(1, twin))
            assert mirror.process is not None
            mirror.process.send_signal(signal.SIGHUP)
            await arrives(target, further, 1, mirror)

            # It goes again, and its topic with it.
            rewrite(mirror, lambda settings: settings["sources"].pop())
            assert "reloaded: sources[twin]" in command(mirror, "reload", "--only")
            await send(second, further, 0, batch())

            async def gone() -> bool:
                return {topic for topic, _ in partitions(mirror)} == {old, new}

            await until(gone, logs_of=[mirror])

            # What needs a restart is refused, and what came with it is not half applied.
            rewrite(
                mirror,
                lambda settings: settings.update(
                    {"gaps": {"default": "skip"}, "group": {**settings["group"], "session_timeout_ms": 7_000}}
                ),
            )
            refused = command(mirror, "reload", expect=1)
            assert (
                "nothing was changed: group.session_timeout_ms cannot be changed without a restart" in refused
            )
            rewrite(mirror, lambda settings: settings["group"].update({"session_timeout_ms": 6_000}))
            assert "reloaded: gaps.default" in command(mirror, "reload")
            rewrite(mirror, lambda settings: settings.update({"gaps": {"default": "maybe"}}))
            wrong = command(mirror, "reload", expect=2)
            assert "mirror.yaml" in wrong and "gaps.default" in wrong
            status, _, answer = call(mirror, "POST", "/reload", {})
            assert status == 422 and "gaps.default" in answer["error"]
            await send(source, old, 0, batch())
            await arrives(target, old, 2, mirror)

    asyncio.run(story())


@in_pairs("millrace-kafka", "kafka-millrace")
def test_a_drained_worker_gives_all_up_and_a_silent_one_is_named(pair: Pair) -> None:
    topic = pair.unique("flights")
    # The silent one has its seat until it was asked about, by a command that has to start first.
    group = {"session_timeout_ms": 30_000, "rebalance_timeout_ms": 10_000}

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 4, 1)
            first = pair.mirror([topic], group=group)
            second = pair.mirror([topic], name=first.settings["name"], group=group)

            async def shared() -> bool:
                return len(partitions(first)) == len(partitions(second)) == 2 and states(first, second) == {
                    "running"
                }

            await until(shared, logs_of=[first, second])

            # What a worker knows of the others may be a second old.
            async def shown_by_both() -> bool:
                shown = command(first, "status")
                document = json.loads(command(second, "status", "--json"))
                return (
                    "2 workers" in shown
                    and "running" in shown.splitlines()[0]
                    and [worker["error"] for worker in document["workers"]] == [None, None]
                    and document["topics"][0]["partitions"] == 4
                )

            await until(shown_by_both, lambda: command(first, "status"))

            said = command(first, "drain")
            assert "drained: 2 partitions given up; the process can be ended" in said
            assert first.get("/healthz") == (200, "ok\n")
            assert first.get("/readyz")[0] == 503

            async def moved() -> bool:
                return len(partitions(second)) == 4 and states(second) == {"running"}

            await until(moved, logs_of=[first, second])
            for number in range(4):
                await send(source, topic, number, batch())

            async def all_there() -> bool:
                ends = [await end_offset(target, topic, number) for number in range(4)]
                return min(ends) >= 1

            await until(all_there, logs_of=[first, second])
            assert first.terminate() == 0, first.log

            third = pair.mirror([topic], name=first.settings["name"], group=group)
            await until(lambda: answered(both_in(second, third)), logs_of=[second, third])
            assert second.process is not None
            second.process.send_signal(signal.SIGSTOP)
            try:

                async def noticed() -> bool:
                    workers = call(third, "GET", "/mirror")[2]["workers"]
                    return any(worker["error"] is not None for worker in workers)

                await until(noticed, logs_of=[third])
                shown = status_of(third)
                assert f"http://127.0.0.1:{second.port} does not answer: no answer within 2 s" in shown
                assert "1 of 2 workers did not answer" in shown
            finally:
                second.process.send_signal(signal.SIGCONT)

    asyncio.run(story())


def both_in(*mirrors: MirrorProcess) -> Any:
    async def known() -> bool:
        return all(len(call(each, "GET", "/mirror")[2]["workers"]) == len(mirrors) for each in mirrors)

    return known


def status_of(mirror: MirrorProcess) -> str:
    """A status that is not the whole: table on standard output, the sentence and status 2 beside it."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "millrace.deploy.cli",
            "mirror",
            "status",
            "--config",
            str(mirror.config_path),
        ],
        capture_output=True,
        text=True,
        timeout=patience(90),
        check=False,
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    return done.stdout + done.stderr
