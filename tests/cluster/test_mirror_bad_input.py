"""What is wrong with a mirror's file, or with what it says of real clusters: whole sentences, each with its
line, from `millrace mirror check` and from a start alike."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_topic
from tests import waiting
from tests.cluster.mirror_calls import check
from tests.cluster.mirror_process import MirrorProcess, until
from tests.pairs import End, Pair, in_pairs

PATTERNS = """\
name: mistaken
target: {cluster: agg, bootstrap: ["TARGET"]}
sources:
  - cluster: ewr
    bootstrap: ["SOURCE"]
    topics:
      include: [flights, "orders("]
      exclude:
        - kept
        - "*.tmp"
    groups:
      include: ["billing", "[a-"]
      exclude: ["(?P<name>"]
  - cluster: lhr
    bootstrap: ["SECOND"]
    topics: {include: ["a{99999999999999999999}"]}
"""
WRONG_PATTERNS = [
    "7: sources[0].topics.include[1]: got 'orders(', expected a regular expression (missing ), unterminated "
    "subpattern at position 6)",
    "10: sources[0].topics.exclude[1]: got '*.tmp', expected a regular expression (nothing to repeat at "
    "position 0; whatever a name begins with is .*)",
    "12: sources[0].groups.include[1]: got '[a-', expected a regular expression (unterminated character set "
    "at position 0)",
    "13: sources[0].groups.exclude[0]: got '(?P<name>', expected a regular expression (missing ), "
    "unterminated subpattern at position 0)",
    "16: sources[1].topics.include[0]: got 'a{99999999999999999999}', expected a regular expression (the "
    "repetition number is too large)",
]

RENAMES = """\
name: mistaken
target: {cluster: agg, bootstrap: ["TARGET"]}
sources:
  - {cluster: ewr, bootstrap: ["SOURCE"], topics: {include: [flights]}}
  - {cluster: lhr, bootstrap: ["SECOND"], topics: {include: [flights]}}
naming:
  rename:
    lhr/flights: arrivals
    lrh/flights: departures
    agg/flights: both
"""
WRONG_RENAMES = [
    "9: naming.rename.lrh/flights: got 'lrh', expected a source's cluster: one of ewr, lhr (did you mean "
    "lhr?)",
    "10: naming.rename.agg/flights: got 'agg', expected a source's cluster: one of ewr, lhr",
]


@pytest.mark.parametrize(
    ("text", "wanted"), [(PATTERNS, WRONG_PATTERNS), (RENAMES, WRONG_RENAMES)], ids=["patterns", "renames"]
)
def test_mistakes_are_told_by_every_command_before_anything_is_connected(
    text: str, wanted: Sequence[str], tmp_path: Path
) -> None:
    mirror = MirrorProcess(tmp_path, "", {})
    with ExitStack() as stack:
        clusters = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        for name, cluster in zip(("TARGET", "SOURCE", "SECOND"), clusters, strict=True):
            text = text.replace(name, f"127.0.0.1:{cluster.getsockname()[1]}")
        mirror.config_path.write_text(text)
        for words, name in (
            (["run"], "millrace mirror"),
            (["check"], "millrace mirror check"),
            (["translate", "--group", "billing"], "millrace mirror translate"),
        ):
            assert check(mirror, *words) == (
                2,
                "".join(f"{name}: mirror.yaml:{sentence}\n" for sentence in wanted),
            )
        for cluster in clusters:
            cluster.setblocking(False)
            with pytest.raises(BlockingIOError):
                cluster.accept()


def test_a_source_that_the_file_does_not_have_cannot_be_asked_about(tmp_path: Path) -> None:
    mirror = MirrorProcess(tmp_path, "127.0.0.1:1", {"ewr": "127.0.0.1:2", "lhr": "127.0.0.1:3"})
    assert check(mirror, "translate", "--group", "billing", "--source", "nyc") == (
        1,
        "millrace mirror translate: no source nyc in the config; its sources are ewr, lhr\n",
    )


class Told:
    """A mirror of two topics: `uneven`, of four partitions at one source and of two at the other, and `odd`,
    which the target has already, and which it would change."""

    def __init__(self, pair: Pair, other: End) -> None:
        self.pair, self.other = pair, other
        self.uneven, self.odd = pair.unique("uneven"), pair.unique("odd")
        # The limit stays the target's own, where otherwise it would become the source's.
        self.mirror = pair.mirror(
            [self.uneven, self.odd],
            also=[other],
            start=False,
            config_sync={"exclude": ["max.message.bytes"]},
        )

    async def make_topics(self) -> None:
        async with self.pair.source.cluster() as one, self.other.cluster() as two:
            await create_topic(one, self.uneven, 4, 1)
            await create_topic(two, self.uneven, 2, 1)
            await create_topic(one, self.odd, 2, 1)
        settings = {
            "max.message.bytes": "50000",
            "message.timestamp.type": "LogAppendTime",
            "compression.type": "zstd",
        }
        async with self.pair.target.cluster() as target:
            await create_topic(target, self.odd, 1, 1, settings)

    def _lines(self, source: int, where: str, *sentences: str) -> set[str]:
        number = self.mirror.lines_of("include")[source]
        place = f"mirror.yaml:{number}: sources[{source}].topics.include: {self.pair.target.name}/{where}: "
        return {f"{place}{sentence}" for sentence in sentences}

    def of_uneven(self) -> set[str]:
        """What will happen, and the rules that are asked for; of the source that has fewer."""
        names = f"{self.pair.source.name} to 0-3, {self.other.name} to 0-1"
        return self._lines(
            1,
            self.uneven,
            f"{self.uneven} gets 4 partitions, and its sources write different ones ({names}), so one key "
            "lies in another partition for each source. Choose: `partition_counts: widest` when that is "
            "wanted, or a `partition_offset` for a source so that they share none",
        )

    def of_width(self) -> set[str]:
        """Until the mirror has done so."""
        needs = f"has 1 partition, {self.pair.source.name}/{self.odd} needs 2: the mirror will add them"
        return self._lines(0, self.odd, needs)

    def of_more_width(self) -> set[str]:
        """Where the second source has partitions of its own."""
        needs = f"has 4 partitions, {self.other.name}/{self.uneven} needs 6: the mirror will add them"
        return self._lines(1, self.uneven, needs)

    def of_settings(self) -> set[str]:
        return self._lines(
            0,
            self.odd,
            "max.message.bytes 50000 is below the source's 1048588: larger batches are split, and a record "
            "that is too large alone stops its partition (gaps.too_large); raise it at the target",
            "compression.type zstd makes the target compress every batch again; with producer it keeps them "
            "as they are",
            "message.timestamp.type LogAppendTime: the target replaces every record's timestamp; with "
            "CreateTime it keeps them",
        )

    def checked(self) -> set[str]:
        """What `check` warns of; it has nothing worse to say. A target that never had a transaction makes
        their log first, and meanwhile cannot be looked at in full."""

        def has_looked_at_all() -> str | None:
            status, said = check(self.mirror)
            assert status == 0, said
            return None if "could not be looked at in full" in said else said

        said = waiting.until(has_looked_at_all, every_s=0.2)
        warnings = {line for line in said.splitlines() if not line.startswith("ok ")}
        assert all(line.startswith("warning  ") for line in warnings), said
        return {line.removeprefix("warning  ") for line in warnings}

    async def started(self) -> set[str]:
        """What a start warns of, but for partitions that it may have added before it looked."""
        began = len(self.mirror.log)
        self.mirror.start()
        seen: set[str] = set()

        async def has_looked() -> bool:
            whole = self.mirror.log[began:].split("\n")[:-1]
            seen.update(json.loads(line.partition("finding=")[2]) for line in whole if "  finding=" in line)
            return self.of_settings() <= seen  # the last that are told

        async def carries_all() -> bool:
            states = [each["state"] for each in self.mirror.status().get("partitions", [])]
            return states == ["running"] * 8

        await until(has_looked, logs_of=[self.mirror])
        await until(carries_all, logs_of=[self.mirror])
        assert self.mirror.terminate() == 0, self.mirror.log
        # Who makes the topics says it, too, or is as silent.
        is_said = "sources have different numbers of partitions" in self.mirror.log[began:]
        assert is_said == (self.of_uneven() <= seen), self.mirror.log
        return seen - self.of_width() - self.of_more_width()


@in_pairs("millrace-kafka", "kafka-millrace")
def test_what_the_clusters_make_of_it_is_told_by_check_and_at_start_until_a_rule_settles_it(
    pair: Pair, second_source: End
) -> None:
    told = Told(pair, second_source)
    asyncio.run(told.make_topics())
    assert told.checked() == told.of_uneven() | told.of_width() | told.of_settings()
    assert asyncio.run(told.started()) == told.of_uneven() | told.of_settings()
    # It has done what it said it would.
    assert asyncio.run(widths(pair, told.uneven, told.odd)) == [4, 2]
    assert told.checked() == told.of_uneven() | told.of_settings()

    told.mirror.settings["partition_counts"] = "widest"
    told.mirror.rewrite()
    assert told.checked() == told.of_settings()
    assert asyncio.run(told.started()) == told.of_settings()

    del told.mirror.settings["partition_counts"]
    told.mirror.settings["sources"][1]["partition_offset"] = 4
    told.mirror.rewrite()
    assert told.checked() == told.of_settings() | told.of_more_width()
    assert asyncio.run(told.started()) == told.of_settings()
    assert asyncio.run(widths(pair, told.uneven, told.odd)) == [6, 2]


async def widths(pair: Pair, *topics: str) -> list[int]:
    async with pair.target.cluster() as target:
        view = await target.metadata(list(topics), max_age_ms=0)
        return [len(view.topics[topic].partitions) for topic in topics]
