"""A consumer's hand in ZooKeeper: registration, watches, owner znodes and offsets of the old model.

Only carries out; `rules.py` decides. Called by `connector.py`, on the
event loop that started the session. Every method may raise SessionError.

What must stay true:
- an owner znode is deleted only when it belongs to this session, and one that may have been created (its
  answer was lost with the connection) is remembered until it is known to be gone;
- an offset is written only over the version that this consumer has read or written, unless it holds the
  owner znode: one who has lost a partition without knowing cannot put the group back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import Node, NodeExists, NodeMissing, Session, VersionConflict
from millrace.broker.coordination.zookeeper_consumer import paths as consumer_paths
from millrace.broker.coordination.zookeeper_consumer.rules import GroupView, Pattern, Share, Subscription
from millrace.broker.errors import MillraceError
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.topic_partition import TopicPartition

log = logging.getLogger("millrace.consumer")

EXPIRY_MARGIN = 1.6
"""ZooKeeper expires sessions in steps of its tick, at most half of any timeout it grants: wait past that."""

_OFFSET_ATTEMPTS = 5


class ConsumerIdTaken(MillraceError):
    """Another live consumer of the group is registered under the same id."""


class StoredOffset(NamedTuple):
    """What an offset znode holds: `offset` is None and `version` -1 where there is none (yet)."""

    offset: int | None
    version: int


@dataclass(frozen=True, slots=True)
class Registry:
    """One reading: what the assignment needs, and where the brokers can be found (`host:port`)."""

    view: GroupView
    brokers: tuple[str, ...]


class ConsumerRegistry:
    """See the module's text. `on_change` is called whenever something that `read` has read is different."""

    def __init__(self, session: Session, group: str, consumer: str, on_change: Callable[[], None]) -> None:
        self._session = session
        self._group = group
        self._consumer = consumer
        self._on_change = on_change
        self._armed: set[tuple[str, str]] = set()
        self._maybe_held: dict[TopicPartition, None] = {}

    # --- watches ------------------------------------------------------------------------------------

    def forget_watches(self) -> None:
        """The connection was lost, and with it every watch."""
        self._armed.clear()

    async def _children(self, path: str) -> list[str]:
        """Names of the children, watched; none while the parent is missing (its creation is watched)."""
        while True:
            with self._arming("children", path) as watch:
                try:
                    return await self._session.children(path, watch)
                except NodeMissing:
                    if watch is not None:
                        self._armed.discard(("children", path))
            if not await self._exists(path):
                return []

    async def _get(self, path: str) -> Node | None:
        """The znode, watched; None while it is missing (its creation is watched)."""
        while True:
            with self._arming("data", path) as watch:
                try:
                    return await self._session.get(path, watch)
                except NodeMissing:
                    if watch is not None:
                        self._armed.discard(("data", path))
            if not await self._exists(path):
                return None

    async def _exists(self, path: str) -> bool:
        with self._arming("data", path) as watch:
            return await self._session.exists(path, watch)

    @contextmanager
    def _arming(self, kind: str, path: str) -> Iterator[Callable[[], None] | None]:
        """A watch for the read within; None where one is set still (they would pile up)."""
        key = (kind, path)
        if key in self._armed:
            yield None
            return
        self._armed.add(key)
        try:
            yield partial(self._fired, key)
        except BaseException:
            self._armed.discard(key)
            raise

    def _fired(self, key: tuple[str, str]) -> None:
        self._armed.discard(key)
        self._on_change()

    # --- reading ------------------------------------------------------------------------------------

    async def read(self, subscription: Subscription) -> Registry:
        """Members, topics and brokers as they are now; each change from now on calls `on_change`."""
        members, brokers, partitions = await asyncio.gather(
            self._read_members(), self._read_brokers(), self._read_partitions(subscription)
        )
        return Registry(GroupView(members, partitions), brokers)

    async def _read_members(self) -> dict[str, Subscription]:
        # A registration is written once, so its parent's children are all there is to watch.
        names = await self._children(consumer_paths.ids_path(self._group))
        nodes = await asyncio.gather(
            *(self._plain(consumer_paths.id_path(self._group, name)) for name in names)
        )
        members: dict[str, Subscription] = {}
        for name, node in zip(names, nodes, strict=True):
            if node is None or (name == self._consumer and node.owner != self._session.id):
                continue  # under our name but not ours: an earlier session's, or a namesake
            try:
                members[name] = consumer_paths.decode_registration(node.data)
            except ValueError as error:
                log.warning(
                    "group %s: the registration of consumer %s is left out of the assignment: %s",
                    self._group,
                    name,
                    error,
                )
        return members

    async def _read_brokers(self) -> tuple[str, ...]:
        ids = [int(name) for name in await self._children(paths.BROKER_IDS) if name.isdigit()]
        nodes = await asyncio.gather(*(self._get(paths.broker_path(broker_id)) for broker_id in sorted(ids)))
        addresses = []
        for broker_id, node in zip(sorted(ids), nodes, strict=True):
            if node is None:
                continue
            try:
                broker = paths.decode_broker(broker_id, node.data)
            except ValueError as error:
                log.warning("the registration of broker %d cannot be used: %s", broker_id, error)
                continue
            addresses.append(str(Address(broker.host, broker.port)))
        return tuple(addresses)

    async def _read_partitions(self, subscription: Subscription) -> dict[str, tuple[int, ...]]:
        topics: Collection[str] = subscription.streams
        if subscription.pattern is not Pattern.STATIC:
            names = await self._children(paths.TOPICS)
            topics = [name for name in names if subscription.count_for(name, exclude_internal=False)]
        nodes = await asyncio.gather(*(self._get(paths.topic_path(topic)) for topic in topics))
        partitions: dict[str, tuple[int, ...]] = {}
        for topic, node in zip(topics, nodes, strict=True):
            if node is None:
                continue
            try:
                partitions[topic] = tuple(sorted(paths.decode_topic(node.data).partitions))
            except ValueError as error:
                log.warning("the znode of topic %s cannot be understood: %s", topic, error)
        return partitions

    async def _plain(self, path: str) -> Node | None:
        try:
            return await self._session.get(path)
        except NodeMissing:
            return None

    # --- registration -------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make the group's lasting folders."""
        await asyncio.gather(
            *(
                self._session.ensure(f"{consumer_paths.CONSUMERS}/{self._group}/{folder}")
                for folder in ("ids", "owners", "offsets")
            )
        )

    async def register(self, subscription: Subscription, now_ms: int) -> None:
        """Raises ConsumerIdTaken when another session keeps the id for longer than it can outlive its end."""
        path = consumer_paths.id_path(self._group, self._consumer)
        data = consumer_paths.encode_registration(subscription, now_ms)
        now = asyncio.get_running_loop().time
        deadline = now() + self._session.session_timeout_ms * EXPIRY_MARGIN / 1000
        await self.prepare()
        while True:
            try:
                await self._session.create(path, data, ephemeral=True)
                return
            except NodeExists:
                gone = asyncio.Event()
            try:
                holder = await self._session.get(path, gone.set)
            except NodeMissing:
                continue
            if holder.owner == self._session.id:
                await self._session.set(path, data)
                return
            try:
                async with asyncio.timeout_at(deadline):
                    await gone.wait()
            except TimeoutError:
                raise ConsumerIdTaken(
                    f"consumer id {self._consumer} is in use by another live consumer of group "
                    f"{self._group}; leave consumer_id out, or give each consumer one of its own"
                ) from None

    async def unregister(self) -> None:
        """Leave the group, if the registration is ours."""
        await self._delete_ours(consumer_paths.id_path(self._group, self._consumer))

    # --- owners -------------------------------------------------------------------------------------

    async def claim(self, share: Share) -> list[TopicPartition]:
        """Create the owner znodes; the partitions that another session holds are returned."""
        await asyncio.gather(
            *(
                self._session.ensure(consumer_paths.owners_path(self._group, topic))
                for topic in sorted({topic for topic, _ in share})
            )
        )
        self._maybe_held.update(dict.fromkeys(share))
        results = await asyncio.gather(
            *(self._claim_one(key, str(thread).encode()) for key, thread in share.items()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [key for key, is_ours in zip(share, results, strict=True) if not is_ours]

    async def _claim_one(self, key: TopicPartition, thread: bytes) -> bool:
        path = consumer_paths.owner_path(self._group, *key)
        while True:
            try:
                await self._session.create(path, thread, ephemeral=True)
                return True
            except NodeExists:
                node = await self._plain(path)
            if node is None:
                continue
            if node.owner != self._session.id:
                self._maybe_held.pop(key, None)
                return False
            # Ours, from a request whose answer was lost with the connection.
            await self._session.set(path, thread)
            return True

    async def release_all(self) -> None:
        """Delete every owner znode that this session has, or may have, created."""
        keys = list(self._maybe_held)
        results = await asyncio.gather(
            *(self._delete_ours(consumer_paths.owner_path(self._group, *key)) for key in keys),
            return_exceptions=True,
        )
        problem: BaseException | None = None
        for key, result in zip(keys, results, strict=True):
            if isinstance(result, BaseException):
                problem = result
            else:
                self._maybe_held.pop(key, None)
        if problem is not None:
            raise problem

    async def owns(self, key: TopicPartition) -> bool:
        node = await self._plain(consumer_paths.owner_path(self._group, *key))
        return node is not None and node.owner == self._session.id

    async def until_free(self, keys: Iterable[TopicPartition], timeout_ms: float) -> None:
        """Wait until none of these partitions has an owner, at most `timeout_ms`."""

        async def wait_for(key: TopicPartition) -> None:
            gone = asyncio.Event()
            try:
                await self._session.get(consumer_paths.owner_path(self._group, *key), gone.set)
                await gone.wait()
            except NodeMissing:
                return

        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.gather(*(wait_for(key) for key in keys))
        except TimeoutError:
            return

    async def _delete_ours(self, path: str) -> None:
        try:
            node = await self._session.get(path)
            if node.owner == self._session.id:
                await self._session.delete(path)
        except NodeMissing:
            return

    # --- offsets ------------------------------------------------------------------------------------

    async def read_offsets(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, StoredOffset]:
        nodes = await asyncio.gather(
            *(self._plain(consumer_paths.offset_path(self._group, *key)) for key in keys)
        )
        return {key: self._stored(key, node) for key, node in zip(keys, nodes, strict=True)}

    def _stored(self, key: TopicPartition, node: Node | None) -> StoredOffset:
        if node is None:
            return StoredOffset(None, -1)
        try:
            return StoredOffset(consumer_paths.decode_offset(node.data), node.version)
        except ValueError as error:
            log.warning(
                "group %s: the offset of %s-%d counts as missing: %s", self._group, key[0], key[1], error
            )
            return StoredOffset(None, node.version)

    async def write_offset(self, key: TopicPartition, offset: int, version: int) -> int | None:
        """Write an offset over the version last known (-1: none was there); the new version.

        Where someone else has written since, it is written all the same as long as this session holds the
        owner znode (a tool has set it; Kafka's consumers write over that too). None: the partition is
        another's now, and nothing was written.
        """
        path = consumer_paths.offset_path(self._group, *key)
        data = consumer_paths.encode_offset(offset)
        for _ in range(_OFFSET_ATTEMPTS):
            try:
                if version < 0:
                    await self._session.create(path, data)
                    return 0
                await self._session.set(path, data, version)
                return version + 1
            except NodeMissing:
                await self._session.ensure(consumer_paths.offsets_path(self._group, key[0]))
            except (NodeExists, VersionConflict):
                pass
            # The version first, the owner after: whoever owns it later changes the version.
            node = await self._plain(path)
            version = -1 if node is None else node.version
            if not await self.owns(key):
                return None
        raise VersionConflict(f"{path} keeps changing under its owner")
