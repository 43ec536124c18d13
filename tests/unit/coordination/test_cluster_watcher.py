"""What the watcher shows of a topic and its settings, whatever happens between two of its reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any
from uuid import UUID, uuid4

import pytest

from millrace.broker.coordination import cluster_watcher, paths
from millrace.broker.coordination.cluster_watcher import ClusterChanges, ClusterWatcher
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import Node, NodeMissing, SessionError, SessionState
from millrace.broker.errors import InvalidConfig
from millrace.broker.replication.partition import PartitionState
from millrace.broker.storage.log_config import UNREADABLE, LogConfig
from tests.waiting import until_async

TOPIC, SETTINGS = paths.topic_path("t"), paths.topic_config_path("t")
OLD, NEW = uuid4(), uuid4()
OF_OLD, OF_NEW = {"cleanup.policy": "compact"}, {"retention.ms": "-1"}

Shown = tuple[UUID, Mapping[str, str]]


class Tree:
    """A session over znodes with one-shot watches. `before_read` is called with every path just before the
    server reads it; what watches an `unheard` path is told of nothing until it is taken out again."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.before_read: Callable[[str], None] = lambda _path: None
        self.unheard: set[str] = set()
        self._zxid = 0
        self._watches: dict[str, list[Callable[[], None]]] = {}

    state = SessionState.CONNECTED

    def on_state(self, _listener: object) -> None:
        return

    def commit(self, **written: bytes | None) -> None:
        """One transaction: `topic` and `settings` are made, written, or (None) deleted."""
        self._zxid += 1
        for name, data in written.items():
            path = {"topic": TOPIC, "settings": SETTINGS}[name]
            old = self.nodes.pop(path, None)
            if data is not None and old is not None:
                self.nodes[path] = Node(data, old.version + 1, 0, old.created_zxid)
            elif data is not None:
                self.nodes[path] = Node(data, 0, 0, self._zxid)
            if path not in self.unheard:
                self.tell(path)
                if old is None or data is None:
                    self.tell(path.rpartition("/")[0])

    def make(self, topic_id: UUID, settings: Mapping[str, str] | None) -> None:
        """The topic, in the place of the one that has its name."""
        if TOPIC in self.nodes:
            self.commit(topic=None, settings=None)
        told = {} if settings is None else {"settings": paths.encode_config(settings)}
        self.commit(topic=paths.encode_topic(TopicAssignment(topic_id, {0: (1,)})), **told)

    def tell(self, path: str) -> None:
        for watch in self._watches.pop(path, []):
            watch()

    async def _asked(self, path: str, watch: Callable[[], None] | None) -> None:
        await asyncio.sleep(0)
        self.before_read(path)
        if watch is not None:
            self._watches.setdefault(path, []).append(watch)

    async def get(self, path: str, watch: Callable[[], None] | None = None) -> Node:
        await self._asked(path, watch)
        if path not in self.nodes:
            raise NodeMissing(path)
        return self.nodes[path]

    async def exists(self, path: str, watch: Callable[[], None] | None = None) -> bool:
        await self._asked(path, watch)
        return path in self.nodes

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        await self._asked(path, watch)
        return [name.removeprefix(f"{path}/") for name in self.nodes if name.rpartition("/")[0] == path]


class Watched:
    """A watcher over `tree`, and everything that its cache has shown of topic "t" at any of its reads."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.cache = MetadataCache()
        self.shown: list[Shown] = []
        session: Any = self.tree
        self.gone: list[tuple[str, bool]] = []  # with whether one of that name is shown
        self.watcher = ClusterWatcher(session, self.cache, self.told, self.told_gone)
        self.known: list[tuple[set[int], set[str]]] = []  # brokers and topics, whenever something was told

    def told(self, _changes: ClusterChanges) -> None:
        self.look()
        self.known.append((set(self.cache.brokers), set(self.cache.topics)))

    def told_gone(self, names: Collection[str]) -> None:
        self.gone.extend((name, self.cache.topic(name) is not None) for name in names)

    def look(self) -> None:
        info = self.cache.topic("t")
        if info is not None and (info.topic_id, info.config) not in self.shown:
            self.shown.append((info.topic_id, dict(info.config)))

    def at(self, path: str, act: Callable[[], None]) -> None:
        """Just before the next read of this path; the cache is looked at before each."""

        def before(read: str) -> None:
            self.look()
            if read == path:
                self.tree.before_read = lambda _path: self.look()
                act()

        self.tree.before_read = before

    async def idle(self) -> None:
        """Long enough for any rounds of reading here, where nothing waits for a server."""
        for _ in range(100):
            await asyncio.sleep(0)
        self.look()


def story(told: Callable[[Watched], Any]) -> Watched:
    watched = Watched()

    async def run() -> None:
        await told(watched)
        await watched.idle()
        await watched.watcher.stop()

    asyncio.run(run())
    return watched


def test_a_new_topic_is_never_shown_without_its_settings() -> None:
    shown: list[str] = []

    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        watched.at(SETTINGS, lambda: shown.extend(watched.cache.topics))
        await watched.watcher.start()

    watched = story(told)
    assert shown == [], "the topic was there before its settings were read"
    assert watched.shown == [(OLD, OF_OLD)]


def test_a_topic_that_is_made_anew_before_its_settings_are_read_gets_its_own() -> None:
    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        watched.at(SETTINGS, lambda: watched.tree.make(NEW, OF_NEW))
        await watched.watcher.start()

    assert story(told).shown == [(NEW, OF_NEW)]


def test_a_topic_that_is_deleted_before_its_settings_are_read_is_not_shown() -> None:
    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        watched.at(SETTINGS, lambda: watched.tree.commit(topic=None, settings=None))
        await watched.watcher.start()

    assert story(told).shown == []


def test_a_topic_that_is_deleted_keeps_its_settings_to_its_end() -> None:
    """The watch of its settings is heard first, and what is read then says that there are none."""

    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        await watched.watcher.start()
        await watched.idle()
        watched.tree.unheard.add(TOPIC)
        watched.tree.commit(topic=None, settings=None)
        await watched.idle()
        watched.tree.tell(TOPIC)
        await watched.idle()
        assert watched.cache.topic("t") is None

    assert story(told).shown == [(OLD, OF_OLD)]


def test_a_topic_that_was_made_anew_never_shows_settings_under_the_old_ones_id() -> None:
    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        await watched.watcher.start()
        await watched.idle()
        watched.tree.unheard.add(TOPIC)
        watched.tree.make(NEW, OF_NEW)
        await watched.idle()
        watched.tree.tell(TOPIC)

    assert story(told).shown == [(OLD, OF_OLD), (NEW, OF_NEW)]


def test_settings_that_are_altered_are_shown_also_those_that_were_made_later() -> None:
    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, None)
        await watched.watcher.start()
        await watched.idle()
        watched.tree.commit(settings=paths.encode_config(OF_OLD))
        await watched.idle()
        watched.tree.commit(settings=paths.encode_config(OF_NEW))

    assert story(told).shown == [(OLD, {}), (OLD, OF_OLD), (OLD, OF_NEW)]


def test_settings_younger_than_their_topic_are_shown_at_a_start() -> None:
    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, None)
        watched.tree.commit(settings=paths.encode_config(OF_OLD))
        await watched.watcher.start()

    assert story(told).shown == [(OLD, OF_OLD)]


def test_a_topic_whose_settings_cannot_be_read_is_shown_with_a_mark_until_they_can() -> None:
    """Unseen, it would be left in its in-sync sets by a broker that has lost what it had, and nobody could
    mend or delete it."""

    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        watched.tree.commit(settings=b"{not json")
        await watched.watcher.start()
        await watched.idle()
        info = watched.cache.topic("t")
        assert info is not None and list(info.partitions) == [0]
        watched.tree.commit(settings=paths.encode_config(OF_NEW))

    (_, marked), mended = story(told).shown
    assert list(marked) == [UNREADABLE] and SETTINGS in marked[UNREADABLE]
    with pytest.raises(InvalidConfig, match="cannot be read"):
        LogConfig.from_topic_config(marked)
    assert mended == (OLD, OF_NEW)


def test_settings_that_are_spoilt_later_leave_those_that_were_known() -> None:
    async def told(watched: Watched) -> None:
        watched.tree.make(OLD, OF_OLD)
        await watched.watcher.start()
        await watched.idle()
        watched.tree.commit(settings=b"{not json")
        await watched.idle()
        assert watched.cache.topic("t") is not None

    assert story(told).shown == [(OLD, OF_OLD)]


def test_of_a_round_that_was_interrupted_nothing_is_told() -> None:
    """Who hears half of it may begin to coordinate transactions of topics that it takes for deleted."""
    lost = 2

    async def told(watched: Watched) -> None:
        nonlocal lost
        await watched.watcher.start()

        def before(path: str) -> None:
            nonlocal lost
            if path == TOPIC and lost:
                lost -= 1
                raise SessionError("the connection is lost")

        tree = watched.tree
        tree.before_read = before
        registration = paths.encode_broker(BrokerRegistration(1, "h", 1, None), 0)
        tree.nodes[paths.broker_path(1)] = Node(registration, 0, 0, 1)
        tree.make(NEW, OF_NEW)
        tree.tell(paths.BROKER_IDS)
        await until_async(lambda: "t" in watched.cache.topics)

    watched = story(told)
    assert lost == 0
    assert watched.known[0] == (set(), set())
    assert {(frozenset(brokers), frozenset(topics)) for brokers, topics in watched.known[1:]} == {
        (frozenset({1}), frozenset({"t"}))
    }


@pytest.mark.safety
@pytest.mark.parametrize("is_seen_between", [False, True])
def test_a_topic_has_gone_before_another_of_its_name_is_shown(is_seen_between: bool) -> None:
    """Whoever forgets by a name what groups committed would forget commits that were made in the new one."""

    async def told(watched: Watched) -> None:
        tree = watched.tree
        tree.make(OLD, OF_OLD)
        await watched.watcher.start()
        await watched.idle()
        if is_seen_between:
            tree.commit(topic=None, settings=None)
            await watched.idle()
            assert watched.cache.topic("t") is None
        tree.make(NEW, OF_NEW)

    watched = story(told)
    assert [topic_id for topic_id, _ in watched.shown] == [OLD, NEW]
    assert watched.gone == [("t", False)]


def test_a_state_that_cannot_be_read_is_marked_until_it_can_be_or_is_gone() -> None:
    """It must not pass for one that is not there yet: the controller would make it."""
    path = paths.state_path("t", 0)

    async def told(watched: Watched) -> None:
        async def becomes(data: bytes | None, version: int = 0) -> bool:
            watched.tree.nodes.pop(path, None)
            if data is not None:
                watched.tree.nodes[path] = Node(data, version, 0, 1)
            watched.tree.tell(path)
            await watched.idle()
            partition = watched.cache.partition("t", 0)
            assert partition is not None
            return partition.is_unreadable

        watched.tree.make(OLD, OF_OLD)
        watched.tree.nodes[path] = Node(b"garbage{", 3, 0, 1)
        await watched.watcher.start()
        partition = watched.cache.partition("t", 0)
        assert partition is not None and partition.is_unreadable and partition.state is None
        assert not await becomes(paths.encode_state(PartitionState(1, 2, (1,), 1)), 4)
        assert await becomes(b"{}", 5)
        assert not await becomes(None)

    story(told)


def test_no_more_znodes_are_asked_for_at_once_than_the_loop_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many, those that were marked first are read first, and nothing is told before all are read.
    What they leave to the garbage collector is looked at as they come."""
    monkeypatch.setattr(cluster_watcher, "READ_AT_ONCE", 3)
    kept: list[int] = []
    monkeypatch.setattr(cluster_watcher.garbage, "keep", kept.append)

    async def scenario() -> None:
        watched, under_way, most = Watched(), set[str](), 0
        tree = watched.tree
        partitions = dict.fromkeys(range(10), (1,))
        tree.commit(topic=paths.encode_topic(TopicAssignment(NEW, partitions)))
        for number in partitions:
            data = paths.encode_state(PartitionState(1, 0, (1,), 1))
            tree.nodes[paths.state_path("t", number)] = Node(data, 0, 0, 2)
        get = tree.get

        async def counted(path: str, watch: Callable[[], None] | None = None) -> Node:
            nonlocal most
            under_way.add(path)
            most = max(most, len(under_way))
            try:
                return await get(path, watch)
            finally:
                under_way.remove(path)

        monkeypatch.setattr(tree, "get", counted)
        task = await watched.watcher.start()
        try:
            assert most == 3
            each = cluster_watcher.OBJECTS_OF_ZNODE
            assert max(kept) == len(partitions) * each and kept.count(3 * each) >= len(partitions) // 3
            assert len(watched.known) == 1
            info = watched.cache.topic("t")
            assert info is not None
            assert [number for number, each in info.partitions.items() if each.leader == 1] == [*range(10)]
        finally:
            await watched.watcher.stop()
        assert task.done()

    asyncio.run(scenario())
