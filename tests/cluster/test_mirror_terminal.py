"""`millrace mirror status`, once and with `--watch`, of a real mirror on a terminal of 80 columns and 24
rows."""

from __future__ import annotations

import asyncio
import re

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_calls import command, partitions
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import Pair, in_pairs
from tests.terminal import Terminal

CLOCK = re.compile(r"\d\d:\d\d:\d\d")
ROW = re.compile(r"src +(?P<topic>\S+) +(?P<parts>\d+)( +\S+){4} +(?P<state>(\d+ )?\w+( down)?)")
HEAD = ["SOURCE", "TOPIC", "PARTS", "BEHIND", "LAG", "REC/S", "B/S", "STATE"]


def rows(lines: list[str]) -> dict[str, tuple[int, str]]:
    """Topic, as it is shown → partitions and state: of the table, each row of which is as it should be."""
    heads = [number for number, line in enumerate(lines) if line.split() == HEAD]
    found = {}
    for line in lines[heads[0] + 1 :] if heads else ():
        if not line or CLOCK.fullmatch(line):
            break
        row = ROW.fullmatch(line)
        assert row is not None, lines
        found[row["topic"]] = (int(row["parts"]), row["state"])
    return found


@pytest.mark.long
@in_pairs("millrace-kafka", "kafka-millrace")
def test_the_status_of_a_mirror_fits_a_terminal_and_says_what_to_do(pair: Pair) -> None:
    long = pair.unique("orders.europe.invoices.corrected.v2.partitioned-by-customer")
    shown_long = re.compile(rf"{long[:4]}\S*…\S*{long[-4:]}")
    stopped, held = pair.unique("flights"), pair.unique("held")

    async def prepare() -> MirrorProcess:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            for topic in (long, held, stopped):
                await create_topic(source, topic, 3, 1)
            await create_topic(target, stopped, 3, 1, {"max.message.bytes": "1000"})
            mirror = pair.mirror([long, held, stopped], config_sync={"exclude": ["max.message.bytes"]})
            for topic in (long, stopped):
                await send(source, topic, 0, build_batch([Record(b"k", b"v")]))
            await send(source, stopped, 1, build_batch([Record(b"k", b"v" * 5_000)]))

            async def is_stopped() -> bool:
                found = {key: each["state"] for key, each in partitions(mirror).items()}
                others = {state for key, state in found.items() if key != (stopped, 1)}
                return len(found) == 9 and others == {"running"} and found[stopped, 1] == "stopped"

            await until(is_stopped, logs_of=[mirror])
        command(mirror, "pause", f"src/{held}")
        command(mirror, "throttle", "src", "50MB")

        async def is_held() -> bool:
            (source,) = mirror.status()["sources"]
            is_paused = partitions(mirror)[held, 0]["state"] == "paused"
            return is_paused and source["throttle_bytes_per_second"] == 50_000_000

        await until(is_held, logs_of=[mirror])
        return mirror

    mirror = asyncio.run(prepare())
    words = ["mirror", "status", "--config", str(mirror.config_path)]
    with Terminal(words, pair.folder / "status.log") as once:
        assert once.ended() == 0, once.log_path.read_text()
        check(once)
        expected = {stopped: (3, "1 stopped"), held: (3, "paused")}
        found = rows(once.lines)
        (long_row,) = found.keys() - expected.keys()
        assert shown_long.fullmatch(long_row)
        assert found == {**expected, long_row: (3, "running")}
        assert next(iter(found)) == stopped, "the worst first"
        text = "\n".join(once.lines)
        for told in (
            f"{mirror.settings['name']} → dst   1 stopped · 1 worker · ",
            f"paused: src/{held}",
            "throttled: src 50 MB/s",
            f"src/{stopped}:1 is stopped: too large, 1 offset from 0",
            f"\n  millrace mirror retry src/{stopped}:1\n  millrace mirror skip src/{stopped}:1",
        ):
            assert told in text, text

    with Terminal([*words, "--watch", "--interval", "0.2"], pair.folder / "watch.log") as watching:

        def shows(state: str) -> list[str]:
            return watching.look(lambda lines: rows(lines).get(stopped) == (3, state))

        assert f"  millrace mirror skip src/{stopped}:1" in shows("1 stopped")
        command(mirror, "skip", f"src/{stopped}:1")
        # Of the longer look before nothing is left.
        assert not any("stopped" in line or "millrace mirror" in line for line in shows("running"))
        check(watching)
        mirror.kill()
        away = f"no worker of the mirror answers at http://127.0.0.1:{mirror.port}"
        gone = watching.look(lambda lines: lines[0].startswith(away))
        assert CLOCK.fullmatch(gone[-1]) and not any("src" in line for line in gone)
        mirror.start()
        shows("running")
        assert watching.interrupt() == 130
        check(watching)
        assert watching.log_path.read_text() == ""


def check(terminal: Terminal) -> None:
    """All of it has a place on the screen, and no line goes on in the next row."""
    assert terminal.screen.wrapped == 0, terminal.screen.lines
    assert terminal.screen.scrolled == [], terminal.screen.lines
