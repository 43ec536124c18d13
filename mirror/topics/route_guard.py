"""The guard at the way into a mirror: which topics of a source may be carried without going round.

Called by `worker` after every discovery (`admit`), before target topics are made and partitions shared out.
It reads what other mirrors tell on the source clusters (`route_records`), refuses topics whose records would
come back, and tells others of the routes that it admits.

A route is proposed, others' routes are read after that, and only then is it claimed and told as carried
(`routes.decide`): of two mirrors that begin against each other at the same moment exactly one goes on, also
when the other dies on the way, and whichever of a mirror's workers take part (`proposals`). A refused topic
is looked at again with every discovery, so it goes on by itself once the other side has stopped.

What is carried is what the leader of the workers' group shares out, by its config. So it is the leader that
takes back the word of a topic that is not selected any more: where a reload has reached another worker only,
the mirror still carries it, and whoever began against it meanwhile would send its records round. And while
another one leads, a worker proposes nothing: it would tell again what the leader has just taken back, and
nobody carries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError, UnknownTopicOrPartition
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics.name_clashes import NameClashes, taken_elsewhere
from millrace.mirror.topics.own_topics import POSITIONS, ROUTES
from millrace.mirror.topics.proposals import DEAD_AFTER_MS, LEASE_MS, Leases, ProposalWatch
from millrace.mirror.topics.route_records import (
    RouteKey,
    encode_key,
    encode_proposal_key,
    encode_value,
    known_origins,
    read_routes,
    routes_of_positions,
)
from millrace.mirror.topics.routes import Answer, KnownRoutes, Loop, Route, TopicSelector, decide
from millrace.mirror.topics.second_names import SecondNames

log = structlog.get_logger("millrace.mirror.topics.route_guard")

READ_AGAIN_AFTER_MS = 30_000
# Topics in one batch of what is told: some 250 bytes a record, and a batch has a limit at the target.
TOLD_AT_ONCE = 500
# Another worker's discovery may be this far ahead.
GONE_AFTER_MS = 60_000


def loop_sentence(loop: Loop, names: Mapping[str, str]) -> str:
    """What goes round, by whom, and what to do: the same at start, in `check` and in the log."""
    if not loop.way and loop.origin is None:
        target = names.get(loop.route.target_cluster_id, loop.route.target_cluster_id)
        return (
            f"records of {loop.route.source_topic} would be carried into the cluster that they come from "
            f"({loop.describe(names)}): source and target {target} are one cluster; correct the addresses"
        )
    last = loop.way[-1]
    where = names.get(last.target_cluster_id, last.target_cluster_id)
    return (
        f"records of {loop.route.source_topic} would go round: {loop.describe(names)}; exclude the topic "
        f"here or in mirror {last.mirror}. If that mirror has ended for good, delete its topics "
        f"{ROUTES.of(last.mirror)} and {POSITIONS.of(last.mirror)} on {where}"
    )


def copy_sentence(source: str, topic: str, target: str, original: str) -> str:
    """Why a topic is not carried of which nobody tells who writes it; also what `check` says."""
    return (
        f"{source}/{topic} has the name of a copy of {target}/{original}, and no mirror tells who writes it: "
        f"its records would come home under a longer name, and go round; exclude it, or name it in "
        "naming.rename if it is none"
    )


async def routes_seen_on(cluster: Cluster, view: ClusterMetadata) -> dict[str, dict[RouteKey, Route]]:
    """The routes of every mirror that writes to a cluster, by the mirror's name. What the cluster does not
    let read is left out with a line in the log. Raises when the cluster does not answer."""
    seen: dict[str, dict[RouteKey, Route]] = {}
    if not view.cluster_id:
        return seen
    for topic in sorted(view.topics, reverse=True):  # routes before positions, which tell less
        try:
            if topic.startswith(ROUTES.prefix):
                mirror = topic.removeprefix(ROUTES.prefix)
                records = [(each.key, each.value) async for each in read_topic_to_end(cluster, topic)]
                seen[mirror] = read_routes(records, mirror=mirror, cluster_id=view.cluster_id)
            elif topic.startswith(POSITIONS.prefix):
                mirror = topic.removeprefix(POSITIONS.prefix)
                if mirror not in seen:
                    positions = Positions()
                    async for record in read_topic_to_end(cluster, topic):
                        positions.apply(record.key, record.value)
                    seen[mirror] = routes_of_positions(positions, mirror=mirror, cluster_id=view.cluster_id)
        except UnknownTopicOrPartition:
            continue
        except KafkaError as error:
            if error.retriable:
                raise
            log.warning("cannot read what another mirror carries", topic=topic, error=str(error))
    return seen


async def told_routes(target: Cluster, mirror: str, target_id: str) -> dict[RouteKey, Route]:
    """What a mirror, any worker of it, has told so far. Raises when its target does not answer."""
    try:
        read = [each async for each in read_topic_to_end(target, ROUTES.of(mirror))]
    except UnknownTopicOrPartition:
        return {}
    return read_routes([(each.key, each.value) for each in read], mirror=mirror, cluster_id=target_id)


@dataclass
class _SourceRoutes:
    """What was last read of one source, and what was decided."""

    topics_there: frozenset[str] = frozenset()
    read_at_ms: int | None = None
    others: KnownRoutes = field(default_factory=KnownRoutes)
    watch: ProposalWatch = field(default_factory=ProposalWatch)
    admitted: dict[str, Route] = field(default_factory=dict)


class RouteGuard:
    """See the module's text."""

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        system: SystemRecords,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        leads: Callable[[], bool | None] = lambda: True,
    ) -> None:
        """`leads`: whether this worker leads the group; None while that is not known."""
        self.config = config
        self._leads = leads
        self.refused: dict[RouteKey, str] = {}
        self.copies: dict[RouteKey, str] = {}  # refused for the name alone
        self.clashes = NameClashes()
        self.second_names = SecondNames()
        self._target = target
        self._system = system
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        self._leases = Leases()
        self._told_watch = ProposalWatch()
        self._unchanged: Collection[Route] = ()
        self._told: dict[RouteKey, Route] | None = None
        self._told_at_ms = 0
        self._sources: dict[str, _SourceRoutes] = {}
        self._unseen_since_ms: dict[RouteKey, int] = {}
        self._at_odds_since_ms: dict[RouteKey, int] = {}
        self._names: dict[str, str] = {}
        self._telling = asyncio.Lock()

    def is_admitted(self, source: str, topic: str) -> bool:
        known = self._sources.get(source)
        return known is not None and topic in known.admitted

    def refusals(self) -> dict[RouteKey, str]:
        """Every selected topic that is not carried, and why."""
        return self.refused | self.copies | self.clashes.refused | self.second_names.refused

    def forget(self, source: str) -> None:
        """The source is no longer one of the mirror's; should it come back, all of it is decided anew."""
        self._sources.pop(source, None)
        for key in [key for key in self.refused if key[0] == source]:
            del self.refused[key]
        for key in [key for key in self.copies if key[0] == source]:
            del self.copies[key]
        self.clashes.forget(source)
        self.second_names.forget(source)

    async def admit(self, cluster: Cluster, view: ClusterMetadata, topics: Sequence[str]) -> None:
        """Decides about the selected topics of a source: afterwards `is_admitted` and `refused` say.

        Raises when source or target do not answer; what was decided before then stays.
        """
        target_id = (await self._target.metadata([])).cluster_id
        known = self._sources.setdefault(cluster.name, _SourceRoutes())
        if not view.cluster_id or not target_id:
            # A cluster without an id (before Kafka 0.10) cannot be told from another.
            known.admitted = {
                topic: known.admitted.get(topic) or self._route(cluster.name, "", topic, "", self._now_ms())
                for topic in self._named_apart(cluster.name, topics, known.admitted)
            }
            return
        self._names |= {view.cluster_id: cluster.name, target_id: self._target.name}
        self.second_names.looked(cluster.name, view.cluster_id)
        looked_at_ms = self._monotonic_ms()
        told = await self._told_so_far(target_id, cluster.name, topics, known)
        names = [source.cluster for source in self.config.sources]
        if self.second_names.refuses(cluster.name, topics, names, told):
            known.admitted = {}
            return
        carried = _carried(told, cluster.name)
        selected = topics
        topics = self._named_apart(cluster.name, selected, carried, told)
        now_ms = self._now_ms()
        is_old = known.read_at_ms is None or looked_at_ms - known.read_at_ms >= READ_AGAIN_AFTER_MS
        is_refused = any(source == cluster.name for source, _ in self.refused)
        if self._has_joins(cluster.name, topics, known, told):
            await self._read_others(cluster, await cluster.metadata(max_age_ms=0), known)
        elif is_old or is_refused or _telling_topics(view) != known.topics_there:
            await self._read_others(cluster, view, known)
        standing = self._standing(told, cluster.name)
        new = [topic for topic in topics if topic not in standing]
        copies = await self._copies(cluster.name, view.cluster_id, new, known.others)
        topics = [topic for topic in topics if topic not in copies]
        wanted: dict[str, Route] = {}
        for topic in topics:
            before = standing.get(topic) or self._leases.own((cluster.name, topic), told)
            since_ms = before.since_ms if before is not None else now_ms
            wanted[topic] = self._route(cluster.name, view.cluster_id, topic, target_id, since_ms)
        if proposals := self._proposals(cluster.name, wanted, known.others, told):
            before_told = {key[:2] for key in told}
            await self._propose(proposals, known, told)
            # Proposed first, read after: see the module's text.
            await self._read_others(cluster, await cluster.metadata(max_age_ms=0), known)
            # Another worker may have begun to carry meanwhile.
            looked_at_ms = self._monotonic_ms()
            told = await self._told_so_far(target_id, cluster.name, topics, known)
            if self._has_joins(cluster.name, wanted, known, told):
                await self._read_others(cluster, await cluster.metadata(max_age_ms=0), known)
            # Or on a topic of the source that this one has not seen yet, and that has the name of one here.
            further = {
                key[1]: None
                for key, route in told.items()
                if key[0] == cluster.name and key[:2] not in before_told and not route.is_withdrawn
            }
            selected = [*selected, *(topic for topic in further if topic not in selected)]
            apart = self._named_apart(cluster.name, selected, _carried(told, cluster.name), told)
            wanted = {topic: route for topic, route in wanted.items() if topic in apart}
        known.admitted = await self._settle(cluster.name, selected, wanted, known, told, looked_at_ms)

    async def _copies(
        self, source: str, source_id: str, topics: Iterable[str], others: KnownRoutes
    ) -> Collection[str]:
        """The topics that have the name of a copy of one that the target has, where nobody tells who writes
        them: another mirror's routes may not be read here, or it tells none (MirrorMaker 2)."""
        naming, target = self.config.naming_rule, self._target.name
        found = {
            topic: original
            for topic in topics
            if (original := naming.original(source, topic, target)) is not None
            and not others.into(source_id, topic)
        }
        there: Collection[str] = ()
        if found:
            there = (await self._target.metadata(sorted(set(found.values())))).topics
        copies = {
            (source, topic): copy_sentence(source, topic, target, original)
            for topic, original in found.items()
            if original in there
        }
        for key, sentence in copies.items():
            if key not in self.copies:
                log.error("topic refused", source=source, topic=key[1], reason=sentence)
        self.copies = {key: each for key, each in self.copies.items() if key[0] != source} | copies
        return {key[1] for key in copies}

    def _has_joins(
        self, source: str, topics: Iterable[str], known: _SourceRoutes, told: Mapping[RouteKey, Route]
    ) -> bool:
        """Whether another worker's word, which may be old, is to be joined: after a fresh look at what others
        tell, later than the one at what this mirror does."""
        standing = self._standing(told, source)
        return any(topic in standing and topic not in known.admitted for topic in topics)

    def _named_apart(
        self,
        source: str,
        topics: Sequence[str],
        carried: Mapping[str, Route],
        told: Mapping[RouteKey, Route] | None = None,
    ) -> list[str]:
        """The topics without those that would lie mixed with another (`name_clashes`)."""
        naming = self.config.naming_rule
        names = {topic: naming.target_topic(source, topic) for topic in topics}
        since = {
            topic: route.since_ms
            for topic, route in carried.items()
            if names.get(topic) == route.target_topic
        }
        sources = [each.cluster for each in self.config.sources]
        taken = taken_elsewhere(naming, sources, source, topics, told or {})
        return self.clashes.admit(source, names, since, self.config.place("naming"), taken)

    def _standing(self, told: Mapping[RouteKey, Route], source: str) -> dict[str, Route]:
        """What the mirror has told of a source's topics that it carries to where they are wanted now: after a
        change of names the same topic is a new route, and the older one's word says nothing of it."""
        name = self.config.naming_rule.target_topic
        carried = _carried(told, source).items()
        return {topic: route for topic, route in carried if route.target_topic == name(source, topic)}

    def _route(self, source: str, source_id: str, topic: str, target_id: str, since_ms: int) -> Route:
        name = self.config.naming_rule.target_topic(source, topic)
        return Route(source_id, topic, target_id, name, self.config.name, since_ms)

    def _proposals(
        self, source: str, wanted: Mapping[str, Route], others: KnownRoutes, told: Mapping[RouteKey, Route]
    ) -> dict[RouteKey, Route]:
        """The routes that are not carried yet and that nothing speaks against: those that this process
        has not proposed, and those that it has to propose anew. None where another worker leads."""
        if self._leads() is False:
            return {}
        proposals: dict[RouteKey, Route] = {}
        now_ms = self._monotonic_ms()
        standing = self._standing(told, source)
        for topic, route in wanted.items():
            key = (source, topic)
            own = self._leases.own(key, told)
            if topic in standing or (own is not None and not self._leases.is_due(key, now_ms)):
                continue
            answer, _ = decide(route, own, others)
            if answer is Answer.GO_ON or (own is not None and answer is Answer.WAIT):
                proposals[key] = replace(route, via=known_origins(route, others))
        return proposals

    async def _propose(
        self, routes: Mapping[RouteKey, Route], known: _SourceRoutes, told: dict[RouteKey, Route]
    ) -> None:
        known.read_at_ms = None  # what was read before is too old for them, also if the next reading fails
        news: dict[RouteKey, Route | None] = {}
        at_ms = dict.fromkeys(routes, self._now_ms())
        for key in routes:
            if (own := self._leases.own(key, told)) is not None:
                news[*key, own.proposer] = replace(own, is_withdrawn=True)
                # For older versions another number than before, whatever the clock does.
                at_ms[key] = max(at_ms[key], own.proposed_at_ms + 1)
        name = self._leases.began(routes, self._monotonic_ms())
        for key, route in routes.items():
            news[*key, name] = replace(
                route, is_proposed=True, is_claimed=False, proposed_at_ms=at_ms[key], proposer=name
            )
        await self._tell(news, told)

    async def _settle(
        self,
        source: str,
        selected: Sequence[str],
        wanted: Mapping[str, Route],
        known: _SourceRoutes,
        told: dict[RouteKey, Route],
        looked_at_ms: int,
    ) -> dict[str, Route]:
        """The routes to carry; they are told, and what gives way is no longer. Of a topic that is selected
        and not wanted (`name_clashes`) nothing is taken back: another worker may carry that one.
        `looked_at_ms`: before what is told was read, which was before others were."""
        others, carried = known.others, self._standing(told, source)
        admitted: dict[str, Route] = {}
        news = self._cleared(source, selected, told)
        claims: dict[RouteKey, Route] = {}
        for topic, route in wanted.items():
            key: RouteKey = (source, topic)
            standing = carried.get(topic)
            own = self._leases.own(key, told)
            before = standing or own
            answer, loop = decide(route, before, others)
            if own is not None and (standing is not None or answer is Answer.GIVE_WAY):
                news[*key, own.proposer] = replace(own, is_withdrawn=True)
            is_joining = standing is not None and topic not in known.admitted
            if loop is not None and (standing is None or is_joining or answer is Answer.GIVE_WAY):
                self._refuse(source, topic, loop)
            is_at_odds = is_joining and answer is Answer.GIVE_WAY
            if not is_at_odds:
                self._at_odds_since_ms.pop(key, None)
            if standing is not None and answer is Answer.GIVE_WAY and self._may_take_back(key, is_at_odds):
                known.admitted.pop(topic, None)  # before anybody hears that it is free
                news[key] = None
            if before is None or answer is not Answer.GO_ON:
                continue
            if standing is None:
                # When it took too long others may have passed it over.
                if self._leases.is_held(key, self._monotonic_ms()):
                    claims[key] = route
                continue
            if is_joining and loop is not None:
                continue  # that other mirror gives way, and may not have done so yet
            self._no_longer_refused(key)
            if is_joining and self._monotonic_ms() - looked_at_ms >= LEASE_MS:
                continue  # joined in the next turn
            admitted[topic] = replace(route, via=known_origins(route, others.carried))
            if standing != admitted[topic]:
                news[key] = admitted[topic]
        for key in [key for key in self.refused if key[0] == source and key[1] not in wanted]:
            del self.refused[key]
        for key, claim in (await self._claim(claims, known, told)).items():
            self._no_longer_refused(key)
            route = replace(claims[key], via=known_origins(claims[key], others.carried))
            admitted[key[1]] = news[key] = route
            # In one batch with the news: the claim stands until its route is told.
            news[*key, claim.proposer] = replace(claim, is_withdrawn=True)
        if news:
            await self._tell(news, told)
        now_ms = self._monotonic_ms()
        for key in claims:
            if not self._leases.is_held(key, now_ms):
                # Telling it took long, and who else has told what meanwhile is not known: joined as if it
                # were another worker's word.
                admitted.pop(key[1], None)
        for key in news:
            if len(key) > 2 and self._leases.is_own(key):
                self._leases.ended(key[:2])
        return admitted

    async def _claim(
        self, routes: Mapping[RouteKey, Route], known: _SourceRoutes, told: dict[RouteKey, Route]
    ) -> dict[RouteKey, Route]:
        """Claims what this process has proposed, and gives the claims that came in time. Others that were
        too late for are proposed again, to be looked at in the next turn."""
        claims: dict[RouteKey, Route] = {}
        for key in routes:
            if (own := self._leases.own(key, told)) is not None:
                claims[key] = replace(own, is_claimed=True)
        if claims:
            await self._tell({(*key, claim.proposer): claim for key, claim in claims.items()}, told)
        now_ms = self._monotonic_ms()
        late = {key: claim for key, claim in claims.items() if not self._leases.is_held(key, now_ms)}
        if late:
            await self._propose(late, known, told)
        return {key: claim for key, claim in claims.items() if key not in late}

    def _cleared(
        self, source: str, selected: Collection[str], told: Mapping[RouteKey, Route]
    ) -> dict[RouteKey, Route | None]:
        """What is told and not wanted any more, and what is left of proposals that count no longer. A claim
        counts as long as its route may be told; only where that is told already nobody needs it."""
        news: dict[RouteKey, Route | None] = {}
        selected = frozenset(selected)
        carried = {(name, topic) for name in {key[0] for key in told} for topic in self._standing(told, name)}
        for key, route in told.items():
            of = key[:2]
            is_unwanted = self._is_dropped(of, source, selected)
            is_dropped = is_unwanted and self._leads() is True
            if len(key) == 2:
                if is_dropped:
                    news[key] = None
            elif self._leases.is_own(key):
                if is_unwanted and not route.is_withdrawn:
                    news[key] = replace(route, is_withdrawn=True)
            elif route in self._unchanged and (of[0] == source or is_dropped):
                is_dead = route.is_withdrawn or (bool(route.proposer) and not route.is_claimed)
                if is_dead or of in carried or is_dropped:
                    news[key] = None
        return news

    def _is_dropped(self, key: RouteKey, source: str, selected: Collection[str]) -> bool:
        """Whether what was told is not wanted any more. A topic that this worker does not see may be one that
        another has found just now, and carries: it is dropped when it stays away."""
        config = self.config.source(key[0])
        if config is None:
            return True
        if key[0] != source or key[1] in selected:
            self._unseen_since_ms.pop(key, None)
            return False
        if not TopicSelector(config.topics.include, config.topics.exclude).selects(key[1]):
            return True
        now_ms = self._monotonic_ms()
        return now_ms - self._unseen_since_ms.setdefault(key, now_ms) >= GONE_AFTER_MS

    def _may_take_back(self, key: RouteKey, is_at_odds: bool) -> bool:
        """Whether what is told as carried gives way now. Who does not carry it leaves that to who does, and
        does it when nobody has for long."""
        if not is_at_odds:
            return True
        now_ms = self._monotonic_ms()
        return now_ms - self._at_odds_since_ms.setdefault(key, now_ms) >= DEAD_AFTER_MS

    def _no_longer_refused(self, key: RouteKey) -> None:
        if self.refused.pop(key, None) is not None:
            log.info("topic no longer refused", source=key[0], topic=key[1])

    def _refuse(self, source: str, topic: str, loop: Loop) -> None:
        sentence = loop_sentence(loop, self._names)
        if self.refused.get((source, topic)) != sentence:
            log.error("topic refused", source=source, topic=topic, reason=sentence)
        self.refused[source, topic] = sentence

    async def _read_others(self, cluster: Cluster, view: ClusterMetadata, known: _SourceRoutes) -> None:
        there = _telling_topics(view)
        asked_at_ms = self._monotonic_ms()
        seen = await routes_seen_on(cluster, view) if there else {}
        routes = [route for routes in seen.values() for route in routes.values()]
        known.others = KnownRoutes(known.watch.living(routes, asked_at_ms, self._monotonic_ms()))
        known.topics_there = there
        known.read_at_ms = asked_at_ms

    # --- what is told ----------------------------------------------------------------------------

    async def _told_so_far(
        self, target_id: str, source: str, topics: Sequence[str], known: _SourceRoutes
    ) -> dict[RouteKey, Route]:
        """What this mirror, any worker of it, has told. Read anew while something is open: another worker may
        have settled it, and its word must not be taken back; nor is it joined on what it was."""
        async with self._telling:
            told, now_ms = self._told, self._monotonic_ms()
            if (
                told is None
                or now_ms - self._told_at_ms >= READ_AGAIN_AFTER_MS
                or any((source, topic) not in told or topic not in known.admitted for topic in topics)
            ):
                self._told_at_ms = now_ms
                self._told = told = await told_routes(self._target, self.config.name, target_id)
                self._unchanged = self._told_watch.unchanged(told.values(), now_ms, self._monotonic_ms())
            return told

    async def _tell(self, news: Mapping[RouteKey, Route | None], told: dict[RouteKey, Route]) -> None:
        """Writes them, None for what is to be there no longer, and notes them as told. What is said of one
        topic goes out in one batch."""
        by_topic: dict[RouteKey, list[RouteKey]] = {}
        for key in news:
            by_topic.setdefault(key[:2], []).append(key)
        # Never beside a reading: what that has found would be from before, and kept.
        async with self._telling:
            for start in range(0, len(by_topic), TOLD_AT_ONCE):
                keys = [key for each in list(by_topic.values())[start : start + TOLD_AT_ONCE] for key in each]
                await self._write({key: news[key] for key in keys}, told)

    async def _write(self, news: Mapping[RouteKey, Route | None], told: dict[RouteKey, Route]) -> None:
        records = [
            (
                encode_key(*key) if len(key) == 2 else encode_proposal_key(*key),
                None if route is None else encode_value(route),
            )
            for key, route in news.items()
        ]
        remembered, self._told = self._told, None  # unless it is written: who fails has to read it anew
        await self._system.write(ROUTES.of(self.config.name), records, configs=ROUTES.configs)
        self._told = remembered
        # Another source's turn may have read anew since `told` was given out.
        for noted in (told, self._told):
            if noted is None:
                continue
            for key, route in news.items():
                if route is None:
                    noted.pop(key, None)
                else:
                    noted[key] = route


def _carried(told: Mapping[RouteKey, Route], source: str) -> dict[str, Route]:
    """What the mirror has told of a source's topics that it carries."""
    return {
        key[1]: route
        for key, route in told.items()
        if len(key) == 2 and key[0] == source and not route.is_proposed
    }


def _telling_topics(view: ClusterMetadata) -> frozenset[str]:
    """The topics of a cluster in which mirrors tell what they write there."""
    return frozenset(topic for topic in view.topics if topic.startswith((ROUTES.prefix, POSITIONS.prefix)))
