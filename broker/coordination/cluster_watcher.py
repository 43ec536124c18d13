"""Keeps the metadata cache true to ZooKeeper by watches, and tells who must act on a change.

One task reads what has been marked as possibly changed; a watch only marks. After a reconnect everything
is marked: watches do not survive the connection. Marks are levels, not events: two changes between two
reads are one read, and a lost event cannot be missed for longer than the connection lasts.

A broker that starts writes the states of its partitions right after it has read them, and each of these
writes comes back as a mark: thousands, of which only another's write could make news. So states rest from its
first write (`rest_states`, not before: what it then leaves alone, no version fences) until the broker serves
(`read_states`) or `STATES_REST_S` have passed: it is as if their watches were so much slower, and what a
state decides is fenced by its version and its epochs, not by the time at which it is heard of. Everything
else is read at once; nothing that rests is forgotten.

A topic is shown together with its settings or not at all, and only with its own: by others (those of the
topic that had its name before, or the defaults) a log would be opened, and what it holds deleted. Settings
belong to the topic that was there before they were read and is there afterwards. Where they cannot be read
the topic is shown all the same, with a mark in their place (`log_config.UNREADABLE`): its replicas are here,
and whoever restarts, serves or mends it must see it. Those that were known before stay until they can be.

That a topic has gone is told in the moment in which it is no longer shown, and not with the round: what is
known of it by its name would be taken for what is known of the next of that name, and wiped out with it.

Called by `server/broker.py`, which passes the listener that applies changes to the local replicas and
wakes the controller, and the one that forgets what groups have committed in a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.metadata_cache import Election, MetadataCache
from millrace.broker.coordination.session import Node, NodeMissing, Session, SessionError, SessionState
from millrace.broker.telemetry import garbage

log = structlog.get_logger("millrace.broker")


@dataclass(slots=True)
class ClusterChanges:
    """What one round of reading found different. Topic names appear once whatever changed in them."""

    topics: set[str] = field(default_factory=set)
    removed_topics: set[str] = field(default_factory=set)
    brokers: bool = False
    broker_configs: bool = False
    controller: bool = False


Mark = tuple[str, ...]
"""("brokers",), ("topics",), ("topic", name), ("state", name, partition), ("config", name), ..."""

STATES_REST_S = 2.0
"""At most; a start that takes longer is held up by something else, and news of states may matter to it."""

READ_AT_ONCE = 64
"""Znodes: to ask for one wakes the client's thread, which takes the interpreter from the loop for 0.3 ms."""

OBJECTS_OF_ZNODE = 10
"""About; what is known of it, and its watch, that the garbage collector looks at."""

ELECTION_PATHS = {"preferred": paths.PREFERRED_ELECTION, "unclean": paths.UNCLEAN_ELECTION}
"""Where an election of each kind is asked for."""


class ClusterWatcher:
    """Reads the cluster into `cache` and calls `listener` after every round that changed something;
    `topics_gone` hears the names of deleted topics at once, before another of their name is shown."""

    def __init__(
        self,
        session: Session,
        cache: MetadataCache,
        listener: Callable[[ClusterChanges], None],
        topics_gone: Callable[[Collection[str]], None] = lambda _names: None,
    ) -> None:
        self._session = session
        self._cache = cache
        self._listener = listener
        self._topics_gone = topics_gone
        self._marks: dict[Mark, None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._changes = ClusterChanges()
        self._states_rest: asyncio.TimerHandle | None = None
        self._readers: dict[str, Callable[..., Awaitable[None]]] = {
            "brokers": self._read_brokers,
            "broker": self._read_broker,
            "offline": self._read_offline,
            "offline of": self._read_offline_of,
            "broker configs": self._read_broker_configs,
            "broker config": self._read_broker_config,
            "elections": self._read_elections,
            "topics": self._read_topics,
            "topic": self._read_topic,
            "state": self._read_state,
            "config": self._read_config,
            "controller": self._read_controller,
            "deleting": self._read_deleting,
        }

    async def start(self) -> asyncio.Task[None]:
        """Read the whole cluster once, then follow it, in the task that is returned: it ends only by `stop`,
        or by a failure that its owner must not overlook."""
        self._session.on_state(self._on_state)
        self._mark_everything()
        await self._read_marked()
        self._task = asyncio.create_task(self._follow(), name="cluster-watcher")
        return self._task

    def rest_states(self) -> None:
        """States that are marked from now on wait for `read_states`."""
        self._states_rest = asyncio.get_running_loop().call_later(STATES_REST_S, self.read_states)

    def read_states(self) -> None:
        """States rest no longer: the broker has started."""
        if self._states_rest is not None:
            self._states_rest.cancel()
            self._states_rest = None
            self._wake.set()

    async def stop(self) -> None:
        if self._states_rest is not None:
            self._states_rest.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._mark_everything()

    def _mark_everything(self) -> None:
        for kind in ("brokers", "offline", "controller", "topics", "deleting", "broker configs"):
            self._mark((kind,))
        for broker_id in self._cache.brokers:
            self._mark(("broker", str(broker_id)))
        for broker_id in self._cache.offline:
            self._mark(("offline of", str(broker_id)))
        for name in self._cache.broker_configs:
            self._mark(("broker config", name))
        for kind in ELECTION_PATHS:
            self._mark(("elections", kind))
        for name, info in self._cache.topics.items():
            self._mark(("topic", name))
            self._mark(("config", name))
            for number in info.partitions:
                self._mark(("state", name, str(number)))

    def _mark(self, mark: Mark) -> None:
        self._marks[mark] = None
        if not self._rests(mark):
            self._wake.set()

    def _rests(self, mark: Mark) -> bool:
        return self._states_rest is not None and mark[0] == "state"

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._read_marked()
            except SessionError as error:
                # The reconnect marks everything again; a short pause spares the log meanwhile.
                log.debug("reading the cluster was interrupted", error=str(error))
                await asyncio.sleep(0.1)
                if self._session.state is SessionState.CONNECTED:
                    self._wake.set()

    async def _read_marked(self) -> None:
        """Read until nothing is marked but what rests: reading a topic marks its partitions, and so on. Only
        then is anything told. Who hears that it leads has then heard of all that was there before: of a round
        that was interrupted it might be told to coordinate transactions whose topics it does not know, and
        take them for deleted."""
        while marks := list(islice((mark for mark in self._marks if not self._rests(mark)), READ_AT_ONCE)):
            for mark in marks:
                del self._marks[mark]
            results = await asyncio.gather(
                *(self._readers[mark[0]](*mark[1:]) for mark in marks), return_exceptions=True
            )
            for mark, result in zip(marks, results, strict=True):
                if isinstance(result, SessionError):
                    self._marks[mark] = None
                elif isinstance(result, ValueError):
                    log.error("a znode could not be understood", what="/".join(mark), error=str(result))
                elif isinstance(result, BaseException):
                    raise result
            garbage.keep(OBJECTS_OF_ZNODE * len(marks))
            interrupted = next((result for result in results if isinstance(result, SessionError)), None)
            if interrupted is not None:
                raise interrupted
        self._tell()

    def _tell(self) -> None:
        changes, self._changes = self._changes, ClusterChanges()
        changes.topics -= changes.removed_topics - set(self._cache.topics)
        self._listener(changes)
        self._cache.announce()

    async def _read_brokers(self) -> None:
        names = await self._session.children(paths.BROKER_IDS, partial(self._mark, ("brokers",)))
        present = {int(name) for name in names if name.isdigit()}
        for broker_id in set(self._cache.brokers) - present:
            self._changes.brokers |= self._cache.remove_broker(broker_id)
        for broker_id in present - set(self._cache.brokers):
            self._mark(("broker", str(broker_id)))

    async def _read_broker(self, broker_id: str) -> None:
        # The watch also fires when the znode goes: a broker that is back at once, elsewhere, is seen.
        try:
            node = await self._session.get(
                paths.broker_path(int(broker_id)), partial(self._mark, ("broker", broker_id))
            )
        except NodeMissing:
            self._changes.brokers |= self._cache.remove_broker(int(broker_id))
            # It may have come back since the names were read.
            self._mark(("brokers",))
            return
        found = paths.decode_broker(int(broker_id), node.data)
        self._changes.brokers |= self._cache.set_broker(replace(found, epoch=node.created_zxid))

    async def _read_offline(self) -> None:
        names = await self._session.children(paths.OFFLINE_REPLICAS, partial(self._mark, ("offline",)))
        present = {int(name) for name in names if name.isdigit()}
        for broker_id in set(self._cache.offline) - present:
            del self._cache.offline[broker_id]
            self._changes.brokers = True
        for broker_id in present - set(self._cache.offline):
            self._mark(("offline of", str(broker_id)))

    async def _read_offline_of(self, broker_id: str) -> None:
        try:
            node = await self._session.get(
                paths.offline_path(int(broker_id)), partial(self._mark, ("offline of", broker_id))
            )
        except NodeMissing:
            self._cache.offline.pop(int(broker_id), None)
            self._mark(("offline",))
        else:
            self._cache.offline[int(broker_id)] = paths.decode_offline(node.data)
        self._changes.brokers = True

    async def _read_broker_configs(self) -> None:
        names = await self._session.children(paths.BROKER_CONFIGS, partial(self._mark, ("broker configs",)))
        for name in set(names) - set(self._cache.broker_configs):
            self._mark(("broker config", name))

    async def _read_broker_config(self, name: str) -> None:
        try:
            node = await self._session.get(
                paths.broker_config_path(name), partial(self._mark, ("broker config", name))
            )
        except NodeMissing:
            self._cache.broker_configs.pop(name, None)
            self._mark(("broker configs",))
        else:
            self._cache.broker_configs[name] = paths.decode_broker_config(name, node.data)
        self._changes.broker_configs = True

    async def _read_elections(self, kind: str) -> None:
        node = await self._get_or_watch(ELECTION_PATHS[kind], ("elections", kind))
        if node is None:
            self._cache.elections.pop(kind, None)
        else:
            self._cache.elections[kind] = Election(paths.decode_partitions(node.data), node.version)

    async def _read_topics(self) -> None:
        names = set(await self._session.children(paths.TOPICS, partial(self._mark, ("topics",))))
        self._drop(set(self._cache.topics) - names)
        for name in names - set(self._cache.topics):
            self._mark(("topic", name))

    def _drop(self, names: Collection[str]) -> None:
        gone = [name for name in names if name in self._cache.topics]
        for name in gone:
            self._cache.remove_topic(name)
        if gone:
            self._changes.removed_topics.update(gone)
            self._topics_gone(gone)

    async def _read_topic(self, name: str) -> None:
        try:
            node = await self._session.get(paths.topic_path(name), partial(self._mark, ("topic", name)))
        except NodeMissing:
            self._drop([name])
            return
        assignment = paths.decode_topic(node.data)
        old = self._cache.topic(name)
        if old is not None and old.topic_id != assignment.topic_id:
            self._drop([name])
            old = None
        config = None
        if old is None:
            config = await self._settings_of(name, node)
            if config is None:
                return  # the topic's watch brings what has become of it
        self._cache.set_assignment(name, assignment, node.version)
        garbage.keep(OBJECTS_OF_ZNODE * len(assignment.partitions))
        if config is not None:
            self._cache.set_config(name, config)
        self._changes.topics.add(name)
        for number in assignment.partitions:
            if old is None or number not in old.partitions:
                self._mark(("state", name, str(number)))

    async def _settings_of(self, name: str, topic: Node) -> dict[str, str] | None:
        """Those of the topic that was read as `topic`; None where it has gone meanwhile."""
        node = await self._get_or_watch(paths.topic_config_path(name), ("config", name))
        if node is None or node.created_zxid > topic.created_zxid:
            # Made after the topic, or not there any more: perhaps not with this topic, but with another.
            try:
                again = await self._session.get(paths.topic_path(name))
            except NodeMissing:
                return None
            if again.created_zxid != topic.created_zxid:
                return None
        return {} if node is None else paths.decode_topic_config(name, node.data)

    async def _read_state(self, name: str, number: str) -> None:
        path, mark = paths.state_path(name, int(number)), ("state", name, number)
        node = await self._get_or_watch(path, mark)
        if node is None:
            self._cache.set_unreadable(name, int(number), False)
            return
        try:
            state = paths.decode_state(node.data)
        except ValueError:
            self._cache.set_unreadable(name, int(number), True)
            raise
        if self._cache.set_state(name, int(number), state, node.version):
            self._changes.topics.add(name)

    async def _read_config(self, name: str) -> None:
        node = await self._get_or_watch(paths.topic_config_path(name), ("config", name))
        config = {} if node is None else paths.decode_config(node.data)
        shown = self._cache.topic(name)
        if shown is None or dict(shown.config) == config:
            return  # as after each reconnection; a topic that was made anew has a mark of its own
        try:
            topic = paths.decode_topic((await self._session.get(paths.topic_path(name))).data)
        except NodeMissing:
            return
        info = self._cache.topic(name)
        if info is not None and info.topic_id == topic.topic_id and dict(info.config) != config:
            self._cache.set_config(name, config)
            self._changes.topics.add(name)

    async def _read_controller(self) -> None:
        node = await self._get_or_watch(paths.CONTROLLER, ("controller",))
        controller_id = -1 if node is None else paths.decode_controller(node.data)
        if controller_id != self._cache.controller_id or controller_id == -1:
            self._cache.controller_id = controller_id
            self._changes.controller = True

    async def _read_deleting(self) -> None:
        names = await self._session.children(paths.DELETE_TOPICS, partial(self._mark, ("deleting",)))
        self._cache.deleting = frozenset(names)

    async def _get_or_watch(self, path: str, mark: Mark) -> Node | None:
        """The znode, or None with a watch for its coming into being."""
        while True:
            try:
                return await self._session.get(path, partial(self._mark, mark))
            except NodeMissing:
                if not await self._session.exists(path, partial(self._mark, mark)):
                    return None
