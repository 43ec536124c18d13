"""The broker process: what is started in which order, what runs meanwhile, and how it ends.

`run` is what the command line calls. Start: take the port, open the logs, join the cluster, serve. Stop (on
SIGTERM or SIGINT): hand back the office and the id, answer no more, flush, write the clean-shutdown marker.
`Broker` owns every task; a task that dies takes the process with it rather than leaving half a broker.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

import structlog
import uvloop

from millrace.broker.config import Address, BrokerConfig, parse_address
from millrace.broker.coordination.broker_registry import (
    deregister,
    prepare_cluster,
    register,
    renew_leaderships,
)
from millrace.broker.coordination.cluster_watcher import ClusterChanges, ClusterWatcher
from millrace.broker.coordination.controller_client import ControllerClient
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, topic_path
from millrace.broker.coordination.producer_ids import ProducerIds
from millrace.broker.coordination.session import Session, SessionError, SessionState
from millrace.broker.errors import FatalError, MillraceError
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.records import load_compiler, warm_kernels
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.context import BrokerServices, Clock, SystemClock
from millrace.broker.server.data_identity import check_identity
from millrace.broker.server.descriptors import FEW_DESCRIPTORS, raise_descriptor_limit
from millrace.broker.server.dispatch import Dispatcher, api_name
from millrace.broker.server.gauges import gauges
from millrace.broker.server.listener import Listener, bind
from millrace.broker.server.offsets_log import GroupLoader, ReplicatedOffsetsLog
from millrace.broker.server.registry import handlers, spoken_apis
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.logs import configure
from millrace.broker.telemetry.memory import release_compiler_pages
from millrace.broker.telemetry.metrics import BrokerCollector, BrokerMetrics, MetricsServer

log = structlog.get_logger("millrace.broker")

REGISTRATION_RETRY_SECONDS = 0.5


class Broker:
    """One broker of a cluster. `address` is what it listens on, known after `start`."""

    def __init__(self, config: BrokerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._settings = config.settings
        self._clock = clock or SystemClock()
        self._metrics = BrokerMetrics()
        self._cache = MetadataCache()
        self._topics_to_apply: dict[str, None] = {}
        self._topic_being_applied: str | None = None
        self._topics_to_forget: set[str] = set()
        self._apply_wake = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._failure: BaseException | None = None
        self._reported_offline: set[tuple[str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cleanup: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self.address = config.listen

    # -- starting ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises FatalError with a line for the user when the broker cannot start."""
        try:
            self._take_port()
            await self._open_logs()
            await self._connect()
            await self._join_cluster()
            await self._serve()
        except BaseException:
            await self.stop()
            raise
        log.info(
            "broker started",
            id=self._config.id,
            listen=str(self.address),
            cluster_id=self._cache.cluster_id,
            partitions=self._replicas.partition_count,
        )

    def _take_port(self) -> None:
        self._socket = bind(self._config.listen)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        self._cleanup.append(("listener", self._close_socket))

    async def _close_socket(self) -> None:
        self._socket.close()

    async def _open_logs(self) -> None:
        # Importing the compiler and loading the kernels each touch their own part of it: given back between,
        # the two are never in memory together, nor with what recovery needs.
        load_compiler()
        release_compiler_pages()
        warm_kernels()
        release_compiler_pages()
        self._log_defaults = LogConfig.from_broker_config(self._settings.texts())
        self._logs = LogManager(list(self._config.data), self._log_defaults)
        await asyncio.to_thread(self._logs.start, self._clock.now_ms())
        self._cleanup.append(("logs", self._close_logs))
        self._report_storage()
        self._replicas = ReplicaManager(
            self._config.id,
            self._logs,
            self._log_defaults,
            clock_ms=self._clock.now_ms,
            is_known=lambda topic, number: self._cache.partition(topic, number) is not None,
            metrics=self._metrics,
            visibility=self._settings.visibility,
            validation="full" if self._settings.record_validation == "full" else "header",
        )

    async def _close_logs(self) -> None:
        self._replicas.close()
        await asyncio.to_thread(self._logs.close, self._clock.now_ms())
        self._report_storage()

    def _report_storage(self) -> None:
        """Pass on what the logs had to repair, and which partitions have gone offline since."""
        for note in self._logs.notes:
            log.warning("storage", note=note)
        self._logs.notes.clear()
        for key, reason in self._logs.offline.items():
            if key not in self._reported_offline:
                self._reported_offline.add(key)
                log.error("a partition is offline", topic=key[0], partition=key[1], reason=reason)

    async def _connect(self) -> None:
        self._session = Session(
            self._config.zookeeper,
            session_timeout_ms=self._settings.zookeeper_session_timeout_ms,
            connection_timeout_ms=self._settings.zookeeper_connection_timeout_ms,
        )
        await self._session.start()
        self._cleanup.append(("session", self._session.stop))
        self._cache.cluster_id = await prepare_cluster(self._session)
        check_identity(self._config.data, self._config.id, self._cache.cluster_id)

    async def _join_cluster(self) -> None:
        self._controller = ControllerRunner(self._session, self._cache, self._config.id, self._clock.now_ms)
        offsets_log = ReplicatedOffsetsLog(
            self._replicas, self._cache, self._settings.offsets_topic_num_partitions
        )
        group_config = GroupConfig.from_settings(self._settings)
        self._groups = GroupCoordinator(group_config, offsets_log, clock_ms=self._clock.now_ms)
        self._cleanup.append(("groups", self._groups.close))
        loader = GroupLoader(self._groups)
        self._replicas.listeners.gained.append(loader.gained)
        self._replicas.listeners.lost.append(loader.lost)
        await register(self._session, self._registration(), self._clock.now_ms())
        self._cleanup.append(("registration", self._deregister))
        self._session.on_state(self._on_session_state)
        self._watcher = ClusterWatcher(self._session, self._cache, self._on_cluster_changes)
        self._watch(await self._watcher.start())
        self._cleanup.append(("watcher", self._watcher.stop))
        await renew_leaderships(self._session, self._cache, self._config.id)
        await self._apply_topics()
        await self._remove_strays()
        self._watch(self._controller.start())
        self._cleanup.append(("controller", self._controller.stop))
        # librdkafka that once hears of no controller does not ask again for minutes.
        await self._cache.changed(
            lambda: self._cache.controller_id in self._cache.brokers,
            self._settings.zookeeper_session_timeout_ms,
        )

    def _registration(self) -> BrokerRegistration:
        advertised = self._config.advertised or self.address
        host = advertised.host
        if host in ("0.0.0.0", "::"):
            host = socket.getfqdn()
        return BrokerRegistration(
            self._config.id, host, advertised.port or self.address.port, self._config.rack
        )

    async def _deregister(self) -> None:
        if self._session.state is SessionState.CONNECTED:
            await deregister(self._session, self._config.id)

    async def _serve(self) -> None:
        check_config = partial(LogConfig.from_topic_config, defaults=self._log_defaults)
        services = BrokerServices(
            config=self._config,
            clock=self._clock,
            metrics=self._metrics,
            metadata_cache=self._cache,
            replica_manager=self._replicas,
            controller=ControllerClient(self._session, self._cache, check_config, self._is_applied),
            producer_ids=ProducerIds(self._session, self._config.id),
            groups=self._groups,
            spoken=spoken_apis(),
        )
        dispatcher = Dispatcher(handlers(), services, self._metrics)
        self._listener = Listener(self._socket, dispatcher, self._metrics, self._settings)
        if self._settings.metrics_listen:
            await self._serve_metrics(parse_address(self._settings.metrics_listen))
        settings = self._settings
        self._spawn("apply", self._follow_topics())
        self._spawn("groups", self._groups.run())
        self._spawn("flush", self._every(settings.log_flush_scheduler_interval_ms, self._replicas.flush_due))
        self._spawn("retention", self._every(settings.log_retention_check_interval_ms, self._keep_house))
        self._spawn(
            "checkpoint", self._every(settings.log_flush_offset_checkpoint_interval_ms, self._checkpoint)
        )
        await self._listener.start()
        self._cleanup.append(("connections", self._listener.stop))
        # What has been made so far stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        release_compiler_pages()

    async def _serve_metrics(self, address: Address) -> None:
        read_gauges = gauges(self._replicas, self._listener, self._controller)
        server = MetricsServer(BrokerCollector(self._metrics, api_name, read_gauges))
        port = await server.start(address.host, address.port)
        self._cleanup.append(("metrics", server.stop))
        log.info("metrics served", address=f"http://{address.host}:{port}/metrics")

    # -- while it runs -------------------------------------------------------------------------------

    async def serve_until_stopped(self) -> None:
        """Returns when a stop was asked for. Raises what made a task of the broker fail."""
        await self._stop_requested.wait()
        if self._failure is not None:
            raise self._failure

    def request_stop(self) -> None:
        self._stop_requested.set()

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        self._watch(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        """A task whose failure ends the broker; parts that stop their own tasks pass them here."""
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        self._failure = task.exception()
        if not isinstance(self._failure, MillraceError):
            log.error("a task of the broker failed", task=task.get_name(), exc_info=self._failure)
        self._stop_requested.set()

    async def _every(self, interval_ms: int, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` again and again; a failure of one round is logged and the next one comes."""
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                await work()
            except (OSError, MillraceError) as error:
                log.error("housekeeping failed", error=str(error))

    async def _keep_house(self) -> None:
        await self._replicas.on_disk(
            self._logs.housekeeping, self._clock.now_ms(), self._replicas.high_watermark
        )
        self._report_storage()

    async def _checkpoint(self) -> None:
        await self._replicas.on_disk(self._logs.checkpoint)

    def _on_session_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            log.warning("the ZooKeeper session was lost; registering again as soon as there is a new one")
        elif state is SessionState.SUSPENDED:
            log.warning("the connection to ZooKeeper is interrupted")
        elif state is SessionState.CONNECTED:
            # Also after an interruption alone: the id may have been given away meanwhile.
            self._spawn("register", self._register_again())

    async def _register_again(self) -> None:
        while not self._stop_requested.is_set():
            try:
                await register(self._session, self._registration(), self._clock.now_ms())
                log.info("registered in ZooKeeper again", id=self._config.id)
                return
            except SessionError as error:
                log.debug("registering again was interrupted", error=str(error))
                if self._session.state is not SessionState.CONNECTED:
                    return
                await asyncio.sleep(REGISTRATION_RETRY_SECONDS)

    # -- the cluster's decisions ---------------------------------------------------------------------

    def _on_cluster_changes(self, changes: ClusterChanges) -> None:
        for topic in (*changes.removed_topics, *changes.topics):
            self._topics_to_apply[topic] = None
        self._topics_to_forget |= changes.removed_topics
        self._apply_wake.set()
        self._controller.wake()

    async def _follow_topics(self) -> None:
        while True:
            await self._apply_wake.wait()
            self._apply_wake.clear()
            await self._apply_topics()

    async def _apply_topics(self) -> None:
        """Bring the local replicas in line with the cluster, one topic after the other."""
        while self._topics_to_apply:
            topic = next(iter(self._topics_to_apply))
            del self._topics_to_apply[topic]
            self._topic_being_applied = topic
            await self._apply_topic(topic)
            self._topic_being_applied = None
            self._cache.announce()

    async def _apply_topic(self, topic: str) -> None:
        if topic in self._topics_to_forget:
            # Also when a topic of the same name is there by now: the groups' offsets are not its.
            self._topics_to_forget.discard(topic)
            await self._groups.forget_topics({topic})
        info = self._cache.topic(topic)
        if info is None:
            await self._replicas.remove_topic(topic)
            return
        states = {
            number: part.state
            for number, part in info.partitions.items()
            if part.state is not None and self._config.id in part.replicas
        }
        await self._replicas.apply_topic(topic, info.topic_id, states, info.config)

    def _is_applied(self, topic: str) -> bool:
        """Whether the local replicas of a topic are as the picture of the cluster shows them."""
        return topic not in self._topics_to_apply and topic != self._topic_being_applied

    async def _remove_strays(self) -> None:
        """Delete logs of topics that were deleted while this broker was down."""
        present = self._logs.logs()
        for topic in {topic for topic, _ in present} - set(self._cache.topics):
            # Not in the picture may also mean not understood: only what is truly gone is removed.
            if not await self._session.exists(topic_path(topic)):
                log.info("the logs of a deleted topic are removed", topic=topic)
                for key in [key for key in present if key[0] == topic]:
                    await self._replicas.on_disk(self._logs.delete, key)

    # -- stopping ------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Undo everything that `start` did, last things first; what fails is logged and the rest goes on."""
        self._stop_requested.set()
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        while self._cleanup:
            name, undo = self._cleanup.pop()
            try:
                await undo()
            except (OSError, MillraceError) as error:
                log.error("stopping a part failed", part=name, error=str(error))


async def _serve_until_signalled(config: BrokerConfig) -> None:
    broker = Broker(config)
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(broker.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, broker, starting)
    try:
        await starting
    except asyncio.CancelledError:
        return  # stopped before it was up
    try:
        await broker.serve_until_stopped()
    finally:
        log.info("broker stopping", id=config.id)
        await broker.stop()
    log.info("broker stopped", id=config.id)


def _on_signal(broker: Broker, starting: asyncio.Future[None]) -> None:
    if starting.done():
        broker.request_stop()
    else:
        starting.cancel()


def run(config: BrokerConfig) -> int:
    """Run a broker until it is told to stop; the process's exit status."""
    configure(config.settings.log_format)
    descriptor_count = raise_descriptor_limit()
    if 0 <= descriptor_count < FEW_DESCRIPTORS:
        log.warning(
            "few files may be open at once; raise the limit (ulimit -Hn) for many partitions or clients",
            limit=descriptor_count,
        )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signalled(config))
    except FatalError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return error.exit_status
    except MillraceError as error:
        print(f"millrace: broker {config.id} stopped: {error}", file=sys.stderr)
        return 1
    return 0
