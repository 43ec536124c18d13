"""The broker process: what is started in which order, what runs meanwhile, and how it ends.

`run` is what the command line calls. Start: take the port, open the logs, join the cluster, serve. Stop (on
SIGTERM or SIGINT): let other brokers take over (a second signal skips that), answer no more, hand back the
office and the id, flush, write the clean-shutdown marker.
A task that dies takes the process with it rather than leaving half a broker (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from uuid import UUID

import structlog
import uvloop

from millrace.broker.client.broker_connections import BrokerConnections
from millrace.broker.config import BrokerConfig, BrokerSettings
from millrace.broker.coordination.broker_registry import (
    deregister,
    leave_in_sync_sets,
    prepare_cluster,
    register,
    wait_for_id,
)
from millrace.broker.coordination.client_quotas import ClientQuotaStore
from millrace.broker.coordination.cluster_watcher import ClusterChanges, ClusterWatcher
from millrace.broker.coordination.controlled_shutdown import hand_over
from millrace.broker.coordination.controller_client import ControllerClient
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.elections import Elections
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.partition_states import PartitionStates
from millrace.broker.coordination.paths import BrokerRegistration
from millrace.broker.coordination.producer_ids import ProducerIds
from millrace.broker.coordination.reassignments import Reassignments
from millrace.broker.coordination.session import Session, SessionError, SessionState
from millrace.broker.coordination.topic_configs import read_topic_settings, recovery_config
from millrace.broker.errors import DataFolderNotWritable, FatalError, MillraceError, ZooKeeperUnreachable
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.in_sync_sets import CHECKS_PER_LAG
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.context import BrokerServices, Clock, SystemClock
from millrace.broker.server.data_identity import check_identity
from millrace.broker.server.descriptors import FEW_DESCRIPTORS, raise_descriptor_limit
from millrace.broker.server.dispatch import Dispatcher, api_name
from millrace.broker.server.dynamic_settings import DynamicSettings
from millrace.broker.server.fetch_sessions import FetchSessionCache
from millrace.broker.server.gauges import gauges
from millrace.broker.server.internal_topics import CoordinatorLoader, InternalTopicLog
from millrace.broker.server.listener import Listener, bind
from millrace.broker.server.local_replicas import LocalReplicas
from millrace.broker.server.memory_limits import AnswerBacklog
from millrace.broker.server.part_settings import cleaner_config, controller_settings, fetch_limits
from millrace.broker.server.quotas import QUOTA_KEYS, ClientQuotas, Window
from millrace.broker.server.registry import handlers, spoken_apis
from millrace.broker.server.start_report import StartReport
from millrace.broker.server.supervisor import Supervisor
from millrace.broker.server.transaction_parts import build_transactions
from millrace.broker.server.warm_start import load_loops
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry import garbage
from millrace.broker.telemetry.logs import configure
from millrace.broker.telemetry.metrics import BrokerCollector, BrokerMetrics, MetricsServer

log = structlog.get_logger("millrace.broker")

REGISTRATION_RETRY_SECONDS = 0.5
OFFLINE_REPORT_INTERVAL_MS = 1_000
ROOM_CHECK_INTERVAL_MS = 1_000


class Broker:
    """One broker of a cluster. `address` is what it listens on, known after `start`."""

    def __init__(self, config: BrokerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._settings = config.settings
        self._clock = clock or SystemClock()
        self._metrics = BrokerMetrics()
        self._cache = MetadataCache()
        self._dynamic = DynamicSettings(config.settings, config.id, self._cache)
        self._supervisor = Supervisor()
        self._is_serving = False
        self._reported_offline: set[TopicPartition] = set()
        self._compaction = ThreadPoolExecutor(1, "compaction")
        self._cleanup: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self._report = StartReport(config.zookeeper)
        self.address = config.listen

    # -- starting ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises FatalError with a line for the user when the broker cannot start."""
        self._report.begin()
        try:
            self._take_port()
            loading = asyncio.create_task(load_loops(with_compaction=self._settings.log_cleaner_enable))
            self._loading = loading
            try:
                await self._take_folders()
                await self._connect()
                await self._open_logs()
                await self._join_cluster()
            finally:
                await asyncio.wait([loading])
            await self._serve()
        except SessionError as lost:
            await self.stop()
            raise ZooKeeperUnreachable(
                f"ZooKeeper at {self._config.zookeeper} was lost while the broker started ({lost}); "
                "start the broker again when ZooKeeper answers"
            ) from None
        except BaseException:
            await self.stop()
            raise
        finally:
            self._report.end()
        self._is_serving = True
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

    async def _take_folders(self) -> None:
        self._log_defaults = LogConfig.from_broker_config(self._settings.texts())
        self._logs = LogManager(
            list(self._config.data), self._log_defaults, cleaner=cleaner_config(self._settings)
        )
        if not self._settings.log_cleaner_enable:
            log.warning("log.cleaner.enable is false: compacted topics, those of groups too, only grow")
        await asyncio.to_thread(self._logs.take)
        self._cleanup.append(("logs", self._close_logs))

    async def _open_logs(self) -> None:
        # Recovery may cut a log: it must be this broker's own, and looked at by its topic's settings.
        check_identity(self._logs.healthy_folders, self._config.id, self._cache.cluster_id)
        topics = await asyncio.to_thread(self._logs.topics)
        known = await read_topic_settings(self._session, topics)

        def config_of(topic: str, topic_id: UUID | None) -> LogConfig | None:
            return recovery_config(known, topic, topic_id, self._log_defaults)

        await asyncio.to_thread(self._logs.open, self._clock.now_ms(), config_of)
        for folder, reason in self._logs.failed_folders.items():
            log.error("a data folder is offline", folder=str(folder), reason=reason)
        self._report_storage()
        self._replicas = ReplicaManager(
            self._config.id,
            self._logs,
            self._log_defaults,
            clock_ms=self._clock.now_ms,
            steady_ms=self._clock.steady_ms,
            is_known=lambda topic, number: self._cache.partition(topic, number) is not None,
            metrics=self._metrics,
            visibility=self._settings.visibility,
            validation="full" if self._settings.record_validation == "full" else "header",
            max_lag_ms=self._settings.replica_lag_time_max_ms,
        )
        self._cleanup.append(("disk threads", self._close_disk_threads))

    async def _close_disk_threads(self) -> None:
        self._replicas.close()

    async def _close_logs(self) -> None:
        self._logs.stop_chores()
        self._compaction.shutdown(wait=False)  # closing the logs waits for what still runs
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
        self._report.session = self._session
        await self._session.start()
        self._cleanup.append(("session", self._session.stop))
        self._cache.cluster_id = await prepare_cluster(self._session)

    async def _join_cluster(self) -> None:
        self._controller = ControllerRunner(
            self._session,
            self._cache,
            self._config.id,
            self._clock.now_ms,
            controller_settings(self._settings),
            self._on_states_written,
        )
        offsets_log = InternalTopicLog(
            OFFSETS_TOPIC,
            self._replicas,
            self._cache,
            self._settings.offsets_topic_num_partitions,
            loads_from_too_few=True,  # members read on, also while no commit can be taken
        )
        group_config = GroupConfig.from_settings(self._settings)
        self._groups = GroupCoordinator(
            group_config,
            offsets_log,
            clock_ms=self._clock.now_ms,
            steady_ms=self._clock.steady_ms,
            metrics=self._metrics,
            commit_timeout_ms=self._settings.offsets_commit_timeout_ms,
            compute=asyncio.to_thread,
        )
        self._cleanup.append(("groups", self._groups.close))
        loader = CoordinatorLoader(OFFSETS_TOPIC, "groups", self._groups.load, self._groups.unload)
        self._replicas.listeners.gained.append(loader.gained)
        self._replicas.listeners.lost.append(loader.lost)
        self._cleanup.append(("group loader", loader.close))
        self._peers = BrokerConnections(self._address_of, f"broker-{self._config.id}")
        self._cleanup.append(("peers", self._close_peers))
        states = PartitionStates(self._session, self._cache, self._cache.announce)
        self._replicas.join(states.write, self._peers, fetch_limits(self._settings), self._supervisor.watch)
        self._cleanup.append(("replication", self._replicas.leave))
        self._replicas.listeners.offline.append(self._on_replicas_offline)
        self._producer_ids = ProducerIds(self._session, self._config.id)
        self._transactions = build_transactions(
            self._config.id,
            self._settings,
            replica_manager=self._replicas,
            cache=self._cache,
            groups=self._groups,
            peers=self._peers,
            take_producer_id=self._producer_ids.take,
            clock_ms=self._clock.now_ms,
            compute=asyncio.to_thread,
        )
        self._cleanup.append(("transactions", self._transactions.close))
        self._local = LocalReplicas(
            self._config.id,
            self._session,
            self._cache,
            self._replicas,
            self._logs,
        )
        self._dynamic.follow(self._keep_logs_by)
        self._dynamic.follow(self._decide_by)
        # Before the id is free, a broker of this id lives: nothing that it has may be touched.
        await wait_for_id(self._session, self._config.id)
        self._watcher = ClusterWatcher(
            self._session, self._cache, self._on_cluster_changes, self._groups.forget_topics
        )
        self._supervisor.watch(await self._watcher.start())
        self._cleanup.append(("watcher", self._watcher.stop))
        if not self._loading.done():
            # What follows leads partitions, and reads what their logs say of groups and transactions.
            await asyncio.wait([self._loading])
            await wait_for_id(self._session, self._config.id)  # compiling may have taken long
        self._loading.result()
        self._watcher.rest_states()
        await leave_in_sync_sets(self._session, self._cache, self._config.id, was_clean=self._logs.was_clean)
        self._logs.settle_unclean_end()
        await self._local.apply()
        await self._local.set_strays_aside()
        self._report_storage()
        await self._local.report_offline()
        await register(self._session, self._registration(), self._clock.now_ms())
        self._cleanup.append(("registration", self._deregister))
        self._session.on_state(self._on_session_state)
        self._supervisor.watch(self._controller.start())
        self._cleanup.append(("controller", self._controller.stop))
        # librdkafka that once hears of no controller does not ask again for minutes; and who serves is no
        # offline replica, which its own picture says until it shows its registration.
        await self._cache.changed(
            lambda: {self._cache.controller_id, self._config.id} <= self._cache.brokers.keys(),
            self._settings.zookeeper_session_timeout_ms,
        )

    def _registration(self) -> BrokerRegistration:
        advertised = self._config.advertised or self.address
        host = socket.getfqdn() if advertised.is_everywhere else advertised.host
        return BrokerRegistration(
            self._config.id, host, advertised.port or self.address.port, self._config.rack
        )

    def _address_of(self, broker_id: int) -> Address | None:
        known = self._cache.brokers.get(broker_id)
        return None if known is None else Address(known.host, known.port)

    async def _close_peers(self) -> None:
        self._peers.close()

    async def _deregister(self) -> None:
        if self._session.state is SessionState.CONNECTED:
            await deregister(self._session, self._config.id)

    async def _serve(self) -> None:
        check_config = partial(LogConfig.given_by_administrator, defaults=self._log_defaults)
        quotas = ClientQuotas(
            self._settings.quota_producer_default,
            self._settings.quota_consumer_default,
            Window(self._settings.quota_window_num, self._settings.quota_window_size_seconds * 1000),
        )
        quota_store = ClientQuotaStore(self._session, QUOTA_KEYS, quotas.apply)
        self._supervisor.watch(await quota_store.start())
        self._cleanup.append(("quotas", quota_store.stop))
        backlog = AnswerBacklog(
            self._settings.queued_max_response_bytes,
            self._settings.fetch_max_bytes,
            self._settings.connection_send_queue_bytes,
        )
        services = BrokerServices(
            config=self._config.model_copy(update={"listen": self.address}),
            clock=self._clock,
            metrics=self._metrics,
            metadata_cache=self._cache,
            replica_manager=self._replicas,
            controller=ControllerClient(self._session, self._cache, check_config, self._local.is_applied),
            reassignments=Reassignments(
                self._session,
                self._cache,
                unclean_by_default=lambda: self._dynamic.current.unclean_leader_election_enable,
            ),
            elections=Elections(self._session, self._cache),
            producer_ids=self._producer_ids,
            groups=self._groups,
            transactions=self._transactions.coordinator,
            transaction_gate=self._transactions.gate,
            transactional_appends=self._transactions.appends,
            marker_writer=self._transactions.marker_writer,
            quotas=quotas,
            quota_store=quota_store,
            fetch_sessions=FetchSessionCache(self._settings.max_incremental_fetch_session_cache_slots),
            backlog=backlog,
            spoken=spoken_apis(),
        )
        dispatcher = Dispatcher(handlers(), services, self._metrics)
        self._listener = Listener(self._socket, dispatcher, self._metrics, self._settings, backlog)
        self._dynamic.follow(self._listener.set_limits)
        if self._settings.metrics_listen:
            await self._serve_metrics(Address.parse_listener(self._settings.metrics_listen), services)
        self._start_chores()
        await self._listener.start()
        self._cleanup.append(("connections", self._listener.stop))
        garbage.settle()
        self._watcher.read_states()

    def _start_chores(self) -> None:
        """What is done again and again while the broker serves."""
        settings = self._settings
        spawn, every = self._supervisor.spawn, self._supervisor.every
        spawn("apply", self._local.follow())
        spawn("groups", self._groups.run())
        spawn("transactions", self._transactions.coordinator.run())
        every(OFFLINE_REPORT_INTERVAL_MS, "offline", self._local.report_offline)
        every(ROOM_CHECK_INTERVAL_MS, "room", self._look_at_room)
        every(settings.log_flush_scheduler_interval_ms, "flush", self._replicas.flush_due)
        check_interval_ms = max(settings.replica_lag_time_max_ms // CHECKS_PER_LAG, 1)
        every(check_interval_ms, "in-sync sets", self._replicas.check_in_sync_sets)
        every(
            settings.replica_high_watermark_checkpoint_interval_ms,
            "high watermarks",
            self._replicas.checkpoint_high_watermarks,
        )
        every(settings.log_retention_check_interval_ms, "retention", self._keep_house)
        if settings.log_cleaner_enable:
            every(lambda: self._dynamic.current.log_cleaner_backoff_ms, "compaction", self._compact)
        every(settings.log_flush_offset_checkpoint_interval_ms, "checkpoint", self._checkpoint)

    async def _serve_metrics(self, address: Address, services: BrokerServices) -> None:
        read_gauges = gauges(services, self._listener, self._controller)
        server = MetricsServer(BrokerCollector(self._metrics, api_name, read_gauges))
        port = await server.start(address)
        self._cleanup.append(("metrics", server.stop))
        log.info("metrics served", address=f"http://{address._replace(port=port)}/metrics")

    # -- while it runs -------------------------------------------------------------------------------

    async def serve_until_stopped(self) -> None:
        """Returns when a stop was asked for. Raises what made a task of the broker fail."""
        await self._supervisor.until_stopped()

    def request_stop(self) -> None:
        """Asked twice, it leaves at once."""
        self._supervisor.request_stop()

    async def _keep_house(self) -> None:
        await self._replicas.on_disk(
            self._logs.housekeeping, self._clock.now_ms(), self._replicas.high_watermark
        )
        self._transactions.gate.expire(self._clock.now_ms())
        self._report_storage()
        garbage.look_at_all()

    async def _look_at_room(self) -> None:
        for change in await self._replicas.on_disk(self._logs.look_at_room, self._clock.steady_ms()):
            if change.is_refusing:
                log.error(
                    "a data folder has no room and refuses writes, which clients try again: remove what is "
                    "not needed from its disk, enlarge it, or lower retention.bytes or retention.ms of "
                    "large topics",
                    folder=str(change.folder),
                    free_bytes=change.free_bytes,
                    reason=change.reason,
                )
            else:
                log.info(
                    "a data folder has room again and takes writes",
                    folder=str(change.folder),
                    free_bytes=change.free_bytes,
                    refused=change.refusals,
                )

    async def _compact(self) -> None:
        """On a thread of its own: it may take minutes, and flushes and cold reads must not wait for it."""
        await asyncio.get_running_loop().run_in_executor(
            self._compaction,
            self._logs.cleaning.compact_due,
            self._clock.now_ms(),
            self._replicas.stable_offset,
        )
        for (topic, number), result in self._logs.cleaning.compactions:
            log.debug("a log was compacted", topic=topic, partition=number, **dataclasses.asdict(result))
        self._logs.cleaning.compactions.clear()
        self._report_storage()

    def _on_replicas_offline(self) -> None:
        """Nothing can be served without a data folder: the broker ends, so that others take over."""
        if not self._logs.healthy_folders and self._supervisor.failure is None:
            reasons = "; ".join(self._logs.failed_folders.values())
            self._supervisor.fail(DataFolderNotWritable(f"every data folder is offline: {reasons}"))

    async def _checkpoint(self) -> None:
        await self._replicas.on_disk(self._logs.checkpoint)

    def _on_session_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            log.warning("the ZooKeeper session was lost; registering again as soon as there is a new one")
        elif state is SessionState.SUSPENDED:
            log.warning("the connection to ZooKeeper is interrupted")
        elif state is SessionState.CONNECTED:
            # Also after an interruption alone: the id may have been given away meanwhile.
            self._supervisor.spawn("register", self._register_again())

    async def _register_again(self) -> None:
        while not self._supervisor.is_stopping:
            try:
                await self._local.report_offline(anew=True)
                await register(self._session, self._registration(), self._clock.now_ms())
                log.info("registered in ZooKeeper again", id=self._config.id)
                return
            except SessionError as error:
                log.debug("registering again was interrupted", error=str(error))
                if self._session.state is not SessionState.CONNECTED:
                    return
                await asyncio.sleep(REGISTRATION_RETRY_SECONDS)

    # -- the cluster's decisions ---------------------------------------------------------------------

    def _keep_logs_by(self, settings: BrokerSettings) -> None:
        self._logs.cleaning.set_config(cleaner_config(settings))
        self._local.set_log_defaults(self._dynamic.log_defaults())

    def _decide_by(self, settings: BrokerSettings) -> None:
        self._controller.set_unclean_by_default(settings.unclean_leader_election_enable)
        self._transactions.gate.enabled = settings.transaction_partition_verification_enable

    def _on_cluster_changes(self, changes: ClusterChanges) -> None:
        if changes.broker_configs:
            self._dynamic.refresh()
        self._local.changed(changes)
        self._controller.wake()

    def _on_states_written(self, topics: set[str]) -> None:
        self._local.changed(ClusterChanges(topics=topics))

    # -- stopping ------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Undo everything that `start` did, last things first; what fails is logged and the rest goes on."""
        self._supervisor.begin_stop()
        if self._is_serving and self._supervisor.failure is None:
            await self._hand_over()
        await self._supervisor.end_tasks()
        while self._cleanup:
            name, undo = self._cleanup.pop()
            try:
                await undo()
            except (OSError, MillraceError) as error:
                log.error("stopping a part failed", part=name, error=str(error))

    async def _hand_over(self) -> None:
        """Controlled shutdown: serve on until others have taken over, or the time is up."""
        settings = self._settings
        at_most_ms = settings.controlled_shutdown_max_retries * settings.controlled_shutdown_retry_backoff_ms
        if not settings.controlled_shutdown_enable or at_most_ms <= 0:
            return
        leaving = asyncio.ensure_future(
            hand_over(
                self._session,
                self._cache,
                self._registration(),
                at_most_ms=at_most_ms,
                now_ms=self._clock.now_ms(),
            )
        )
        hurried = asyncio.ensure_future(self._supervisor.until_hurried())
        await asyncio.wait((leaving, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        leaving.cancel()
        await asyncio.gather(leaving, hurried, return_exceptions=True)


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
