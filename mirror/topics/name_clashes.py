"""Topics that would meet in one topic of the target, and must not: at most one of them is carried.

Called by `route_guard` with every look at a source, before anything of a topic is carried. Partitions keep
their numbers, so two topics of a source that get one name would lie mixed in the same partitions, and nothing
could tell their records apart again. Topics of several sources that get one name merge: that is what an
aggregate is for. But not where the name is to say which source it is of: by `{cluster}.{topic}` topic `b.c`
of `a` and topic `c` of `a.b` are both `a.b.c`. `check` says the same of a config before it is used.

Invariant: the topic that is carried already stays, whatever comes later; where none is, none is carried until
somebody has said which. What other workers of the mirror carry counts: it is what the mirror has told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from millrace.mirror.topics.route_records import RouteKey
from millrace.mirror.topics.routes import Naming, Route

log = structlog.get_logger("millrace.mirror.topics.name_clashes")

SHOWN_TOPICS = 5


def yielding(names: Mapping[str, str], since: Mapping[str, int]) -> dict[str, str | None]:
    """The topics that are not to be carried, each with the one that keeps the name; None: none does.

    `names` says what each topic of a source is called on the target. `since` orders those that are carried
    under that name already by their age: should there be several, the oldest stays.
    """
    sharing: dict[str, list[str]] = {}
    for topic, name in names.items():
        sharing.setdefault(name, []).append(topic)
    given_up: dict[str, str | None] = {}
    for topics in sharing.values():
        if len(topics) > 1:
            carried = sorted((since[topic], topic) for topic in topics if topic in since)
            stays = carried[0][1] if carried else None
            given_up |= {topic: stays for topic in topics if topic != stays}
    return given_up


def taken_elsewhere(
    naming: Naming,
    sources: Collection[str],
    source: str,
    topics: Iterable[str],
    told: Mapping[RouteKey, Route],
) -> dict[str, str]:
    """The topics of a source whose names are those of other `sources`' topics, which the mirror has `told` to
    be carried: each with that other, as `a/b.c`. Of two that are carried the older stays."""
    rank: dict[RouteKey, tuple[int, RouteKey]] = {
        key: (route.since_ms, key)
        for key, route in told.items()
        if len(key) == 2
        and not route.is_proposed
        and key[0] in sources
        and naming.names_cluster(*key)
        and naming.target_topic(*key) == route.target_topic
    }
    oldest: dict[str, RouteKey] = {}
    for key in sorted(rank, key=rank.__getitem__, reverse=True):
        if key[0] != source:
            oldest[naming.target_topic(*key)] = key
    taken: dict[str, str] = {}
    for topic in topics:
        own, other = (source, topic), oldest.get(naming.target_topic(source, topic))
        if other is not None and naming.names_cluster(*own) and (own not in rank or rank[other] < rank[own]):
            taken[topic] = "/".join(other)
    return taken


def clash_sentence(topics: Iterable[str], name: str) -> str:
    """Why none of several topics is carried; also what `check` says."""
    listed = sorted(topics)
    more = f" and {len(listed) - SHOWN_TOPICS} more" if len(listed) > SHOWN_TOPICS else ""
    return (
        f"topics {', '.join(listed[:SHOWN_TOPICS])}{more} would all become {name}; give them different names"
    )


class NameClashes:
    """What is refused for its name, by source and topic, with the sentence that says why."""

    def __init__(self) -> None:
        self.refused: dict[tuple[str, str], str] = {}

    def admit(
        self,
        source: str,
        names: Mapping[str, str],
        since: Mapping[str, int],
        place: str,
        taken: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Those of a source's topics that may be carried, by `yielding`, and not `taken_elsewhere`; what is
        refused, or is so no longer, is logged once. `place`: where the config gives names."""
        given_up = {**yielding(names, since), **(taken or {})}
        for topic in names:
            if topic in given_up:
                self._refuse(source, topic, self._sentence(topic, given_up[topic], names, place))
            elif self.refused.pop((source, topic), None) is not None:
                log.info("topic no longer refused", source=source, topic=topic)
        for key in [key for key in self.refused if key[0] == source and key[1] not in names]:
            del self.refused[key]
        return [topic for topic in names if topic not in given_up]

    def forget(self, source: str) -> None:
        """The source is no longer one of the mirror's."""
        for key in [key for key in self.refused if key[0] == source]:
            del self.refused[key]

    def _sentence(self, topic: str, stays: str | None, names: Mapping[str, str], place: str) -> str:
        if stays is None:
            sharing: Sequence[str] = [each for each, name in names.items() if name == names[topic]]
            return f"{place}: {clash_sentence(sharing, names[topic])}"
        return (
            f"{place}: it would become {names[topic]}, and {stays} is carried under that name; give it "
            "another name, or exclude it"
        )

    def _refuse(self, source: str, topic: str, sentence: str) -> None:
        if self.refused.get((source, topic)) != sentence:
            log.error("topic refused", source=source, topic=topic, reason=sentence)
        self.refused[source, topic] = sentence
