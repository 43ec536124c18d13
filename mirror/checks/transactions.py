"""Whether a target can deliver exactly once: what it speaks, which ids it allows, where it keeps them.

Called by `check` where the config says `delivery: exactly_once`. Every finding says that `at_least_once` does
without. Nothing is written: an id is tried by ending a transaction that cannot exist.

A worker uses two ids for each of its lanes, `millrace.<mirror>.<slot>.<lane>` and the same with `.b`; lanes
beyond the configured ones are made where partitions hold up their neighbours, and every further worker has
the next slot. So rights are best given by prefix; that is looked for by trying far more ids than one worker
begins with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from millrace.broker.client.admin import ConfigValue, describe_broker_configs, describe_topics_configs
from millrace.broker.client.authorized import transactional_id_refusal
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.errors import CoordinatorNotAvailable, KafkaError, UnsupportedVersion
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.operations import Operation
from millrace.broker.protocol.system_topics import TRANSACTIONS_TOPIC
from millrace.broker.wording import count_of, some
from millrace.mirror.checks.findings import Finding, Severity, no_transactions, too_few_brokers
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.exactly_once import MAX_LANES_FACTOR, transactional_ids

APIS = {
    Api.INIT_PRODUCER_ID: (2, 4),
    Api.ADD_PARTITIONS_TO_TXN: (1, 3),
    Api.ADD_OFFSETS_TO_TXN: (1, 3),
    Api.TXN_OFFSET_COMMIT: (3, 3),
    Api.END_TXN: (1, 3),
}
STATE_REPLICAS = "transaction.state.log.replication.factor"
STATE_MIN_IN_SYNC = "transaction.state.log.min.isr"
MIN_IN_SYNC = "min.insync.replicas"
KAFKAS_WORDS = "The coordinator is not available"

# All lanes of the first slots are tried, and the first lane of some further ones.
WHOLE_SLOTS = 2
FURTHER_SLOTS = (2, 3, 7, 15, 31, 63)
AT_ONCE = 32


async def of_transactions(config: MirrorConfig, cluster: Cluster, view: ClusterMetadata) -> list[Finding]:
    """`view` is all of the target's metadata. Raises what a cluster that is away raises."""
    try:
        for api, (least, most) in APIS.items():
            await cluster.api_version(api, least, most)
        refused, unavailable = await _refused_ids(config, cluster)
    except UnsupportedVersion as error:
        return [no_transactions(config, str(error))]
    findings = list(_rights(config, cluster.name, refused))
    if unavailable is not None:
        return [*findings, await _why_unavailable(config, cluster, view, unavailable)]
    return findings + await _state_log(config, cluster, view)


# --- rights ---------------------------------------------------------------------------------------


def needed_ids(config: MirrorConfig) -> list[str]:
    """The ids without which the mirror's first worker cannot begin."""
    return [name for lane in range(config.lanes) for name in transactional_ids(config.name, 0, lane)]


def possible_ids(config: MirrorConfig) -> list[str]:
    """Those that come with partitions that hold up their lane, and with further workers."""
    lanes = range(MAX_LANES_FACTOR * config.lanes)
    tried = [(slot, lane) for slot in range(WHOLE_SLOTS) for lane in lanes]
    tried += [(slot, 0) for slot in FURTHER_SLOTS]
    needed = set(needed_ids(config))
    return [
        name
        for slot, lane in tried
        for name in transactional_ids(config.name, slot, lane)
        if name not in needed
    ]


async def _refused_ids(
    config: MirrorConfig, cluster: Cluster
) -> tuple[dict[str, Operation], CoordinatorNotAvailable | None]:
    """Id → the operation that is missing; and why no coordinator answers, where none does: nothing more is
    asked then, as each question would take as long."""
    refused: dict[str, Operation] = {}
    left = [*needed_ids(config), *possible_ids(config)]
    turn = asyncio.Semaphore(AT_ONCE)

    async def ask(name: str) -> Operation | None:
        async with turn:
            operation = await transactional_id_refusal(cluster, name)
        if operation is not None:
            refused[name] = operation
        return operation

    try:
        # One by one until a coordinator is known to answer.
        while left and await ask(left.pop(0)) is Operation.DESCRIBE:
            continue
        await asyncio.gather(*map(ask, left))
    except CoordinatorNotAvailable as error:
        return refused, error
    return refused, None


def _rights(config: MirrorConfig, target: str, refused: dict[str, Operation]) -> Iterable[Finding]:
    needed, possible = needed_ids(config), possible_ids(config)
    for operation in sorted(set(refused.values())):
        lacking = [name for name in needed if refused.get(name) is operation]
        further = [name for name in possible if refused.get(name) is operation]
        if lacking:
            severity = Severity.ERROR
            without = "exactly once is not possible; `delivery: at_least_once` does without"
        else:
            severity = Severity.WARNING
            without = "further workers, or lanes for partitions that hold up others, cannot begin"
        names = some(lacking or further)
        message = (
            f"not permitted: {operation} on TransactionalId {names} ({without}); grant it on the prefix "
            f"millrace.{config.name}. (`--resource-pattern-type prefixed`) to the principal that the mirror "
            "uses there"
        )
        yield Finding(severity, target, message, config.place("delivery"))


# --- where transactions are kept ------------------------------------------------------------------


async def _why_unavailable(
    config: MirrorConfig, cluster: Cluster, view: ClusterMetadata, error: CoordinatorNotAvailable
) -> Finding:
    factor = (await _settings(cluster, view, [STATE_REPLICAS])).get(STATE_REPLICAS)
    is_missing = TRANSACTIONS_TOPIC not in view.topics and _names_no_other_reason(error)
    if is_missing and factor is not None and factor > len(view.brokers):
        return too_few_brokers(config, STATE_REPLICAS, factor, len(view.brokers))
    message = (
        f"its transaction coordinator is not available now, so nothing is carried until it is: {error}; "
        "`delivery: at_least_once` does without"
    )
    return Finding(Severity.WARNING, cluster.name, message, config.place("delivery"), is_passing=True)


def _names_no_other_reason(error: CoordinatorNotAvailable) -> bool:
    """Apache Kafka gives none at all; ours does, and there a number of replicas that is only a default gives
    way to the number of brokers."""
    said = str(error)
    return not said or KAFKAS_WORDS in said or "replication factor" in said


async def _state_log(config: MirrorConfig, cluster: Cluster, view: ClusterMetadata) -> list[Finding]:
    """Whether the topic of transactions can ever take a record: a coordinator answers, and refuses every
    transaction, where fewer replicas exist than must be in sync."""
    topic = view.topics.get(TRANSACTIONS_TOPIC)
    if topic is None or not topic.partitions:
        # Not made yet, or not to be seen: then the brokers' settings are all that is known.
        wanted = await _settings(cluster, view, [STATE_REPLICAS, STATE_MIN_IN_SYNC])
        factor, least = wanted.get(STATE_REPLICAS), wanted.get(STATE_MIN_IN_SYNC)
        if factor is None or least is None or least <= factor:
            return []
        finding = _too_few_in_sync(config, STATE_MIN_IN_SYNC, least, factor)
        return [Finding(Severity.WARNING, finding.where, finding.message, finding.place)]
    replicas = min(len(each.replicas) for each in topic.partitions.values())
    described = (await describe_topics_configs(cluster, [TRANSACTIONS_TOPIC], [MIN_IN_SYNC])).get(
        TRANSACTIONS_TOPIC
    )
    least = _number(described.get(MIN_IN_SYNC)) if isinstance(described, dict) else None
    if least is not None and least > replicas:
        return [_too_few_in_sync(config, f"{MIN_IN_SYNC} of {TRANSACTIONS_TOPIC}", least, replicas)]
    return []


def _too_few_in_sync(config: MirrorConfig, setting: str, least: int, replicas: int) -> Finding:
    return no_transactions(
        config,
        f"{setting} is {least}, and the topic that transactions are kept in has "
        f"{count_of(replicas, 'replica')}, so it takes no record",
        cure="give it more replicas or lower the setting",
    )


async def _settings(cluster: Cluster, view: ClusterMetadata, keys: Sequence[str]) -> dict[str, int]:
    """Those of a broker that it tells."""
    try:
        found = await describe_broker_configs(cluster, min(view.brokers), keys)
    except KafkaError:
        return {}
    return {key: int(value) for key, value in found.items() if value is not None and value.isdecimal()}


def _number(value: ConfigValue | None) -> int | None:
    text = "" if value is None else value.value or ""
    return int(text) if text.isdecimal() else None
