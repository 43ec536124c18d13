"""The answer to a request that failed as a whole, or whose version is not spoken: the code where it is read.

Many responses have no error code of their own, only one for each item of the request. An empty answer of such
a response says that nothing went wrong, and clients take it so: a consumer whose OffsetCommit is answered
without a partition has committed. As Apache Kafka's `getErrorResponse`, this repeats every item that the
request names and puts the code into each. Where the request names none (all topics' metadata), or nothing is
known of the API's items, there is no answer to give, and the connection must close.

Called by `dispatch.py`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import build_entity, response_type


class Items(NamedTuple):
    """Where a response repeats what its request names.

    `given` is the response's array, `asked` the request's. `names` are the fields that tell items apart:
    under the same name in both, or as response=request. Of plain values, the response's one field. Names that
    a version does not have are passed over.
    """

    given: str
    asked: str
    names: tuple[str, ...]
    within: Items | None = None


def _topics(given: str = "topics", asked: str = "topics", *, within: Items) -> Items:
    return Items(given, asked, ("name", "topic", "topic_id"), within)


_PARTITIONS = Items("partitions", "partitions", ("partition_index", "partition"))
_INDEXES = Items("partitions", "partition_indexes", ("partition_index",))
_RESOURCES = ("resource_type", "resource_name")

_ITEMS: Mapping[int, tuple[Items, ...]] = {
    Api.PRODUCE: (
        _topics("responses", "topic_data", within=Items("partition_responses", "partition_data", ("index",))),
    ),
    Api.FETCH: (
        _topics("responses", within=Items("partitions", "partitions", ("partition_index=partition",))),
    ),
    Api.LIST_OFFSETS: (_topics(within=_PARTITIONS),),
    Api.METADATA: (Items("topics", "topics", ("name", "topic_id")),),
    Api.OFFSET_COMMIT: (_topics(within=_PARTITIONS),),
    Api.OFFSET_FETCH: (_topics(within=_INDEXES), Items("groups", "groups", ("group_id",))),
    Api.FIND_COORDINATOR: (Items("coordinators", "coordinator_keys", ("key",)),),
    Api.DESCRIBE_GROUPS: (Items("groups", "groups", ("group_id",)),),
    Api.CREATE_TOPICS: (Items("topics", "topics", ("name",)),),
    Api.DELETE_TOPICS: (
        Items("responses", "topic_names", ("name",)),
        Items("responses", "topics", ("name", "topic_id")),
    ),
    Api.DELETE_RECORDS: (_topics(within=_PARTITIONS),),
    Api.OFFSET_FOR_LEADER_EPOCH: (_topics(within=_PARTITIONS),),
    Api.ADD_PARTITIONS_TO_TXN: (
        _topics(
            "results_by_topic_v3_and_below",
            "v3_and_below_topics",
            within=Items("results_by_partition", "partitions", ("partition_index",)),
        ),
    ),
    Api.WRITE_TXN_MARKERS: (Items("markers", "markers", ("producer_id",), _topics(within=_INDEXES)),),
    Api.TXN_OFFSET_COMMIT: (_topics(within=_PARTITIONS),),
    Api.CREATE_ACLS: (Items("results", "creations", ()),),
    Api.DELETE_ACLS: (Items("filter_results", "filters", ()),),
    Api.DESCRIBE_CONFIGS: (Items("results", "resources", _RESOURCES),),
    Api.ALTER_CONFIGS: (Items("responses", "resources", _RESOURCES),),
    Api.INCREMENTAL_ALTER_CONFIGS: (Items("responses", "resources", _RESOURCES),),
    Api.CREATE_PARTITIONS: (Items("results", "topics", ("name",)),),
    Api.DELETE_GROUPS: (Items("results", "groups_names", ("group_id",)),),
    Api.ELECT_LEADERS: (
        _topics(
            "replica_election_results",
            "topic_partitions",
            within=Items("partition_result", "partitions", ("partition_id",)),
        ),
    ),
    Api.ALTER_CLIENT_QUOTAS: (
        Items("entries", "entries", (), Items("entity", "entity", ("entity_type", "entity_name"))),
    ),
    Api.DESCRIBE_PRODUCERS: (_topics(within=_INDEXES),),
    Api.DESCRIBE_TRANSACTIONS: (Items("transaction_states", "transactional_ids", ("transactional_id",)),),
    Api.DESCRIBE_TOPIC_PARTITIONS: (Items("topics", "topics", ("name",)),),
}

_NOTHING_KNOWN: Mapping[str, int] = dict.fromkeys(
    (
        "base_offset",
        "committed_offset",
        "end_offset",
        "high_watermark",
        "last_stable_offset",
        "leader_epoch",
        "log_start_offset",
        "low_watermark",
        "node_id",
        "offset",
        "port",
        "timestamp",
    ),
    -1,
)
"""What an item says beside its code; as with names, what a version does not have is passed over."""


def error_answer(api_key: int, version: int, code: int, read_request: Callable[[], Any]) -> Any | None:
    """The response of this version that says `code`; None where it has no place for it.

    `read_request` gives the request's entity, and is called only where its items are needed. Raises what that
    raises, KioIndexError for a version that kio does not know.
    """
    kind = response_type(api_key, version)
    fields = {field.name for field in dataclasses.fields(kind)}
    if "error_code" in fields:
        return build_entity(kind, {"error_code": code})
    known = [items for items in _ITEMS.get(api_key, ()) if items.given in fields]
    if not known:
        return None
    request = read_request()
    for items in known:
        response = build_entity(kind, {items.given: _repeated(items, request, code)})
        if code in _codes_in(response):
            return response
    return None


def _repeated(items: Items, request: Any, code: int) -> list[dict[str, Any]]:
    """The request's items as the response's. A request that has no such array names nothing."""
    said = {**_NOTHING_KNOWN, "error_code": code, "partition_error_code": code}
    repeated = []
    for asked in getattr(request, items.asked, None) or ():
        if dataclasses.is_dataclass(asked):
            given = dict(_named(items.names, asked))
        else:
            given = {items.names[0]: asked}
        if items.within is not None:
            given[items.within.given] = _repeated(items.within, asked, code)
        repeated.append(said | given)
    return repeated


def _named(names: tuple[str, ...], asked: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        given, _, other = name.partition("=")
        if hasattr(asked, other or given):
            yield given, getattr(asked, other or given)


def _codes_in(value: Any) -> set[int]:
    """Every error code in a response, at any depth."""
    if isinstance(value, ErrorCode):
        return {int(value)}
    if isinstance(value, tuple):
        return {code for item in value for code in _codes_in(item)}
    if dataclasses.is_dataclass(value):
        return _codes_in(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
    return set()
