"""Every error of the project, in one tree.

    MillraceError
    ├── ProtocolError            a peer broke the protocol: its connection is closed and counted
    ├── KafkaError               an expected refusal that has a Kafka error code; one subclass a code
    │   ├── CorruptMessage (2)   … ├── OffsetOutOfRange (1) … (134 classes, below)
    │   └── ...
    ├── Unanswered               a request failed, and its answer has no place to say so
    ├── UnreadableRecord         a record of a topic of the product's own is of no layout known here
    ├── ClusterUnreachable       a client could not reach any broker of a named cluster
    │   └── AccessRefused        client and server do not accept each other: login, certificate
    └── FatalError               the environment makes it impossible to go on; has an exit status
        ├── ConfigError          a file or option has a wrong value
        ├── PortTaken            ├── ZooKeeperUnreachable    ├── DataFolderNotWritable
        ├── DataFolderLocked     ├── JavaMissing             ├── BrokerIdTaken
        └── DiskFull

Raised everywhere; turned into an error code at dispatch (`KafkaError`), a closed connection
(`ProtocolError`) or one line on stderr and an exit status (`FatalError`, `ClusterUnreachable`).

Invariants: `str(error)` is one line fit for a person; a Kafka code has exactly one class and a class
exactly one code, so that `error_for_code(error.code)` gives the same class back.
"""

from __future__ import annotations

from typing import ClassVar


class MillraceError(Exception):
    """Root of the tree: whatever is raised on purpose by this project."""

    def lines(self) -> list[str]:
        """What a person is shown, a line for each mistake."""
        return [str(self)]


class ProtocolError(MillraceError):
    """A peer sent bytes that the protocol does not allow; the connection cannot go on.

    `kind` is what metrics count and rate limits tell apart: "size", "header", "body", "version" or "acks=0".
    """

    kind = "body"


ACKS_0 = "acks=0"
"""Kind of the ProtocolError that is no broken protocol: a producer that wants no answers has failed."""


class Unanswered(MillraceError):
    """A request failed and there is no answer that would say so: its connection closes, for an answer without
    an error would be taken for success. Its cause is what failed."""


class UnreadableRecord(MillraceError):
    """A record of a topic that the product keeps for itself (offsets, transactions, a mirror's positions, its
    map and wishes) is damaged, or of a layout that is not known here. Who reads the topic decides what comes
    of it: it is passed over, told, or the reading stops."""


class ClusterUnreachable(MillraceError):
    """No broker of a cluster answered; `cluster` is the name the user gave it."""

    exit_status: ClassVar[int] = 20

    def __init__(self, cluster: str, message: str = "no broker answers; check that it runs"):
        super().__init__(f"cluster {cluster}: {message}")
        self.cluster = cluster


class AccessRefused(ClusterUnreachable):
    """Client and server do not accept each other: a login or a certificate is refused. Asking again at once
    cures nothing; the message says what to change."""


class FatalError(MillraceError):
    """The process cannot go on. The message says what to do; `exit_status` tells scripts which it was."""

    exit_status: ClassVar[int] = 1


class ConfigError(FatalError):
    """A setting is wrong: `path` is where it stands (`broker.yaml: settings.log.segment.bytes`).

    `further` are the other mistakes that were found with it; its own line says how many there are."""

    exit_status: ClassVar[int] = 2

    def __init__(self, path: str, value: object, expected: str, further: tuple[ConfigError, ...] = ()):
        more = f" (and {len(further)} more)" if further else ""
        super().__init__(f"{path}: got {value!r}, expected {expected}{more}")
        self.path = path
        self.value = value
        self.expected = expected
        self.further = further

    def each(self) -> list[ConfigError]:
        """Every mistake that was found, one line each; this one is the first."""
        return [ConfigError(self.path, self.value, self.expected), *self.further]

    def lines(self) -> list[str]:
        return [str(each) for each in self.each()]


class PortTaken(FatalError):
    """Another process listens on the address."""

    exit_status: ClassVar[int] = 10


class ZooKeeperUnreachable(FatalError):
    """No ZooKeeper server answered, or the session is gone for good."""

    exit_status: ClassVar[int] = 11


class DataFolderNotWritable(FatalError):
    """A data folder cannot be created, read or written."""

    exit_status: ClassVar[int] = 12


class JavaMissing(FatalError):
    """Java 17 or newer was not found."""

    exit_status: ClassVar[int] = 13


class BrokerIdTaken(FatalError):
    """A living broker is registered under the same id."""

    exit_status: ClassVar[int] = 14


class DataFolderLocked(FatalError):
    """Another process holds the data folder."""

    exit_status: ClassVar[int] = 15


class DiskFull(FatalError):
    """No room is left where the process must write."""

    exit_status: ClassVar[int] = 16


class KafkaError(MillraceError):
    """An expected failure with a code of the Kafka protocol.

    `code` goes on the wire, `name` is the protocol's own symbol (for logs and metrics), and
    `retriable` says whether a client may send the same request again.
    """

    code: ClassVar[int]
    name: ClassVar[str]
    retriable: ClassVar[bool]
    record_errors: tuple[tuple[int, str], ...] = ()
    """Of a refused batch: the records at fault, by their place in it, each with a sentence (KIP-467). Empty
    where the batch as a whole is at fault."""

    def __init__(self, message: str = ""):
        super().__init__(message or self.name.replace("_", " ").lower())


class UnknownErrorCode(KafkaError):
    """A peer answered with a code that is newer than the table below."""

    code = -1
    name = "UNKNOWN_ERROR_CODE"
    retriable = False

    def __init__(self, wire_code: int, message: str = ""):
        super().__init__(message or f"unknown error code {wire_code}")


# One class for each code of the protocol (Apache Kafka 4.1). A table, kept two lines a row.
# fmt: off
class UnknownServerError(KafkaError):
    code, name, retriable = -1, "UNKNOWN_SERVER_ERROR", False
class OffsetOutOfRange(KafkaError):
    code, name, retriable = 1, "OFFSET_OUT_OF_RANGE", False
class CorruptMessage(KafkaError):
    code, name, retriable = 2, "CORRUPT_MESSAGE", True
class UnknownTopicOrPartition(KafkaError):
    code, name, retriable = 3, "UNKNOWN_TOPIC_OR_PARTITION", True
class InvalidFetchSize(KafkaError):
    code, name, retriable = 4, "INVALID_FETCH_SIZE", False
class LeaderNotAvailable(KafkaError):
    code, name, retriable = 5, "LEADER_NOT_AVAILABLE", True
class NotLeaderOrFollower(KafkaError):
    code, name, retriable = 6, "NOT_LEADER_OR_FOLLOWER", True
class RequestTimedOut(KafkaError):
    code, name, retriable = 7, "REQUEST_TIMED_OUT", True
class BrokerNotAvailable(KafkaError):
    code, name, retriable = 8, "BROKER_NOT_AVAILABLE", False
class ReplicaNotAvailable(KafkaError):
    code, name, retriable = 9, "REPLICA_NOT_AVAILABLE", True
class RecordTooLarge(KafkaError):
    code, name, retriable = 10, "MESSAGE_TOO_LARGE", False
class StaleControllerEpoch(KafkaError):
    code, name, retriable = 11, "STALE_CONTROLLER_EPOCH", False
class OffsetMetadataTooLarge(KafkaError):
    code, name, retriable = 12, "OFFSET_METADATA_TOO_LARGE", False
class NetworkException(KafkaError):
    code, name, retriable = 13, "NETWORK_EXCEPTION", True
class CoordinatorLoadInProgress(KafkaError):
    code, name, retriable = 14, "COORDINATOR_LOAD_IN_PROGRESS", True
class CoordinatorNotAvailable(KafkaError):
    code, name, retriable = 15, "COORDINATOR_NOT_AVAILABLE", True
class NotCoordinator(KafkaError):
    code, name, retriable = 16, "NOT_COORDINATOR", True
class InvalidTopic(KafkaError):
    code, name, retriable = 17, "INVALID_TOPIC_EXCEPTION", False
class RecordListTooLarge(KafkaError):
    code, name, retriable = 18, "RECORD_LIST_TOO_LARGE", False
class NotEnoughReplicas(KafkaError):
    code, name, retriable = 19, "NOT_ENOUGH_REPLICAS", True
class NotEnoughReplicasAfterAppend(KafkaError):
    code, name, retriable = 20, "NOT_ENOUGH_REPLICAS_AFTER_APPEND", True
class InvalidRequiredAcks(KafkaError):
    code, name, retriable = 21, "INVALID_REQUIRED_ACKS", False
class IllegalGeneration(KafkaError):
    code, name, retriable = 22, "ILLEGAL_GENERATION", False
class InconsistentGroupProtocol(KafkaError):
    code, name, retriable = 23, "INCONSISTENT_GROUP_PROTOCOL", False
class InvalidGroupId(KafkaError):
    code, name, retriable = 24, "INVALID_GROUP_ID", False
class UnknownMemberId(KafkaError):
    code, name, retriable = 25, "UNKNOWN_MEMBER_ID", False
class InvalidSessionTimeout(KafkaError):
    code, name, retriable = 26, "INVALID_SESSION_TIMEOUT", False
class RebalanceInProgress(KafkaError):
    code, name, retriable = 27, "REBALANCE_IN_PROGRESS", False
class InvalidCommitOffsetSize(KafkaError):
    code, name, retriable = 28, "INVALID_COMMIT_OFFSET_SIZE", False
class TopicAuthorizationFailed(KafkaError):
    code, name, retriable = 29, "TOPIC_AUTHORIZATION_FAILED", False
class GroupAuthorizationFailed(KafkaError):
    code, name, retriable = 30, "GROUP_AUTHORIZATION_FAILED", False
class ClusterAuthorizationFailed(KafkaError):
    code, name, retriable = 31, "CLUSTER_AUTHORIZATION_FAILED", False
class InvalidTimestamp(KafkaError):
    code, name, retriable = 32, "INVALID_TIMESTAMP", False
class UnsupportedSaslMechanism(KafkaError):
    code, name, retriable = 33, "UNSUPPORTED_SASL_MECHANISM", False
class IllegalSaslState(KafkaError):
    code, name, retriable = 34, "ILLEGAL_SASL_STATE", False
class UnsupportedVersion(KafkaError):
    code, name, retriable = 35, "UNSUPPORTED_VERSION", False
class TopicAlreadyExists(KafkaError):
    code, name, retriable = 36, "TOPIC_ALREADY_EXISTS", False
class InvalidPartitions(KafkaError):
    code, name, retriable = 37, "INVALID_PARTITIONS", False
class InvalidReplicationFactor(KafkaError):
    code, name, retriable = 38, "INVALID_REPLICATION_FACTOR", False
class InvalidReplicaAssignment(KafkaError):
    code, name, retriable = 39, "INVALID_REPLICA_ASSIGNMENT", False
class InvalidConfig(KafkaError):
    code, name, retriable = 40, "INVALID_CONFIG", False
class NotController(KafkaError):
    code, name, retriable = 41, "NOT_CONTROLLER", True
class InvalidRequest(KafkaError):
    code, name, retriable = 42, "INVALID_REQUEST", False
class UnsupportedForMessageFormat(KafkaError):
    code, name, retriable = 43, "UNSUPPORTED_FOR_MESSAGE_FORMAT", False
class PolicyViolation(KafkaError):
    code, name, retriable = 44, "POLICY_VIOLATION", False
class OutOfOrderSequence(KafkaError):
    code, name, retriable = 45, "OUT_OF_ORDER_SEQUENCE_NUMBER", False
class DuplicateSequence(KafkaError):
    code, name, retriable = 46, "DUPLICATE_SEQUENCE_NUMBER", False
class InvalidProducerEpoch(KafkaError):
    code, name, retriable = 47, "INVALID_PRODUCER_EPOCH", False
class InvalidTxnState(KafkaError):
    code, name, retriable = 48, "INVALID_TXN_STATE", False
class InvalidProducerIdMapping(KafkaError):
    code, name, retriable = 49, "INVALID_PRODUCER_ID_MAPPING", False
class InvalidTransactionTimeout(KafkaError):
    code, name, retriable = 50, "INVALID_TRANSACTION_TIMEOUT", False
class ConcurrentTransactions(KafkaError):
    code, name, retriable = 51, "CONCURRENT_TRANSACTIONS", True
class TransactionCoordinatorFenced(KafkaError):
    code, name, retriable = 52, "TRANSACTION_COORDINATOR_FENCED", False
class TransactionalIdAuthorizationFailed(KafkaError):
    code, name, retriable = 53, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", False
class SecurityDisabled(KafkaError):
    code, name, retriable = 54, "SECURITY_DISABLED", False
class OperationNotAttempted(KafkaError):
    code, name, retriable = 55, "OPERATION_NOT_ATTEMPTED", False
class KafkaStorageError(KafkaError):
    code, name, retriable = 56, "KAFKA_STORAGE_ERROR", True
class LogDirNotFound(KafkaError):
    code, name, retriable = 57, "LOG_DIR_NOT_FOUND", False
class SaslAuthenticationFailed(KafkaError):
    code, name, retriable = 58, "SASL_AUTHENTICATION_FAILED", False
class UnknownProducerId(KafkaError):
    code, name, retriable = 59, "UNKNOWN_PRODUCER_ID", False
class ReassignmentInProgress(KafkaError):
    code, name, retriable = 60, "REASSIGNMENT_IN_PROGRESS", False
class DelegationTokenAuthDisabled(KafkaError):
    code, name, retriable = 61, "DELEGATION_TOKEN_AUTH_DISABLED", False
class DelegationTokenNotFound(KafkaError):
    code, name, retriable = 62, "DELEGATION_TOKEN_NOT_FOUND", False
class DelegationTokenOwnerMismatch(KafkaError):
    code, name, retriable = 63, "DELEGATION_TOKEN_OWNER_MISMATCH", False
class DelegationTokenRequestNotAllowed(KafkaError):
    code, name, retriable = 64, "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED", False
class DelegationTokenAuthorizationFailed(KafkaError):
    code, name, retriable = 65, "DELEGATION_TOKEN_AUTHORIZATION_FAILED", False
class DelegationTokenExpired(KafkaError):
    code, name, retriable = 66, "DELEGATION_TOKEN_EXPIRED", False
class InvalidPrincipalType(KafkaError):
    code, name, retriable = 67, "INVALID_PRINCIPAL_TYPE", False
class NonEmptyGroup(KafkaError):
    code, name, retriable = 68, "NON_EMPTY_GROUP", False
class GroupIdNotFound(KafkaError):
    code, name, retriable = 69, "GROUP_ID_NOT_FOUND", False
class FetchSessionIdNotFound(KafkaError):
    code, name, retriable = 70, "FETCH_SESSION_ID_NOT_FOUND", True
class InvalidFetchSessionEpoch(KafkaError):
    code, name, retriable = 71, "INVALID_FETCH_SESSION_EPOCH", True
class ListenerNotFound(KafkaError):
    code, name, retriable = 72, "LISTENER_NOT_FOUND", True
class TopicDeletionDisabled(KafkaError):
    code, name, retriable = 73, "TOPIC_DELETION_DISABLED", False
class FencedLeaderEpoch(KafkaError):
    code, name, retriable = 74, "FENCED_LEADER_EPOCH", True
class UnknownLeaderEpoch(KafkaError):
    code, name, retriable = 75, "UNKNOWN_LEADER_EPOCH", True
class UnsupportedCompressionType(KafkaError):
    code, name, retriable = 76, "UNSUPPORTED_COMPRESSION_TYPE", False
class StaleBrokerEpoch(KafkaError):
    code, name, retriable = 77, "STALE_BROKER_EPOCH", False
class OffsetNotAvailable(KafkaError):
    code, name, retriable = 78, "OFFSET_NOT_AVAILABLE", True
class MemberIdRequired(KafkaError):
    code, name, retriable = 79, "MEMBER_ID_REQUIRED", False
class PreferredLeaderNotAvailable(KafkaError):
    code, name, retriable = 80, "PREFERRED_LEADER_NOT_AVAILABLE", True
class GroupMaxSizeReached(KafkaError):
    code, name, retriable = 81, "GROUP_MAX_SIZE_REACHED", False
class FencedInstanceId(KafkaError):
    code, name, retriable = 82, "FENCED_INSTANCE_ID", False
class EligibleLeadersNotAvailable(KafkaError):
    code, name, retriable = 83, "ELIGIBLE_LEADERS_NOT_AVAILABLE", True
class ElectionNotNeeded(KafkaError):
    code, name, retriable = 84, "ELECTION_NOT_NEEDED", True
class NoReassignmentInProgress(KafkaError):
    code, name, retriable = 85, "NO_REASSIGNMENT_IN_PROGRESS", False
class GroupSubscribedToTopic(KafkaError):
    code, name, retriable = 86, "GROUP_SUBSCRIBED_TO_TOPIC", False
class InvalidRecord(KafkaError):
    code, name, retriable = 87, "INVALID_RECORD", False
class UnstableOffsetCommit(KafkaError):
    code, name, retriable = 88, "UNSTABLE_OFFSET_COMMIT", True
class ThrottlingQuotaExceeded(KafkaError):
    code, name, retriable = 89, "THROTTLING_QUOTA_EXCEEDED", True
class ProducerFenced(KafkaError):
    code, name, retriable = 90, "PRODUCER_FENCED", False
class ResourceNotFound(KafkaError):
    code, name, retriable = 91, "RESOURCE_NOT_FOUND", False
class DuplicateResource(KafkaError):
    code, name, retriable = 92, "DUPLICATE_RESOURCE", False
class UnacceptableCredential(KafkaError):
    code, name, retriable = 93, "UNACCEPTABLE_CREDENTIAL", False
class InconsistentVoterSet(KafkaError):
    code, name, retriable = 94, "INCONSISTENT_VOTER_SET", False
class InvalidUpdateVersion(KafkaError):
    code, name, retriable = 95, "INVALID_UPDATE_VERSION", False
class FeatureUpdateFailed(KafkaError):
    code, name, retriable = 96, "FEATURE_UPDATE_FAILED", False
class PrincipalDeserializationFailure(KafkaError):
    code, name, retriable = 97, "PRINCIPAL_DESERIALIZATION_FAILURE", False
class SnapshotNotFound(KafkaError):
    code, name, retriable = 98, "SNAPSHOT_NOT_FOUND", False
class PositionOutOfRange(KafkaError):
    code, name, retriable = 99, "POSITION_OUT_OF_RANGE", False
class UnknownTopicId(KafkaError):
    code, name, retriable = 100, "UNKNOWN_TOPIC_ID", True
class DuplicateBrokerRegistration(KafkaError):
    code, name, retriable = 101, "DUPLICATE_BROKER_REGISTRATION", False
class BrokerIdNotRegistered(KafkaError):
    code, name, retriable = 102, "BROKER_ID_NOT_REGISTERED", False
class InconsistentTopicId(KafkaError):
    code, name, retriable = 103, "INCONSISTENT_TOPIC_ID", True
class InconsistentClusterId(KafkaError):
    code, name, retriable = 104, "INCONSISTENT_CLUSTER_ID", False
class TransactionalIdNotFound(KafkaError):
    code, name, retriable = 105, "TRANSACTIONAL_ID_NOT_FOUND", False
class FetchSessionTopicIdError(KafkaError):
    code, name, retriable = 106, "FETCH_SESSION_TOPIC_ID_ERROR", True
class IneligibleReplica(KafkaError):
    code, name, retriable = 107, "INELIGIBLE_REPLICA", False
class NewLeaderElected(KafkaError):
    code, name, retriable = 108, "NEW_LEADER_ELECTED", False
class OffsetMovedToTieredStorage(KafkaError):
    code, name, retriable = 109, "OFFSET_MOVED_TO_TIERED_STORAGE", False
class FencedMemberEpoch(KafkaError):
    code, name, retriable = 110, "FENCED_MEMBER_EPOCH", False
class UnreleasedInstanceId(KafkaError):
    code, name, retriable = 111, "UNRELEASED_INSTANCE_ID", False
class UnsupportedAssignor(KafkaError):
    code, name, retriable = 112, "UNSUPPORTED_ASSIGNOR", False
class StaleMemberEpoch(KafkaError):
    code, name, retriable = 113, "STALE_MEMBER_EPOCH", False
class MismatchedEndpointType(KafkaError):
    code, name, retriable = 114, "MISMATCHED_ENDPOINT_TYPE", False
class UnsupportedEndpointType(KafkaError):
    code, name, retriable = 115, "UNSUPPORTED_ENDPOINT_TYPE", False
class UnknownControllerId(KafkaError):
    code, name, retriable = 116, "UNKNOWN_CONTROLLER_ID", False
class UnknownSubscriptionId(KafkaError):
    code, name, retriable = 117, "UNKNOWN_SUBSCRIPTION_ID", False
class TelemetryTooLarge(KafkaError):
    code, name, retriable = 118, "TELEMETRY_TOO_LARGE", False
class InvalidRegistration(KafkaError):
    code, name, retriable = 119, "INVALID_REGISTRATION", False
class TransactionAbortable(KafkaError):
    code, name, retriable = 120, "TRANSACTION_ABORTABLE", False
class InvalidRecordState(KafkaError):
    code, name, retriable = 121, "INVALID_RECORD_STATE", False
class ShareSessionNotFound(KafkaError):
    code, name, retriable = 122, "SHARE_SESSION_NOT_FOUND", True
class InvalidShareSessionEpoch(KafkaError):
    code, name, retriable = 123, "INVALID_SHARE_SESSION_EPOCH", True
class FencedStateEpoch(KafkaError):
    code, name, retriable = 124, "FENCED_STATE_EPOCH", False
class InvalidVoterKey(KafkaError):
    code, name, retriable = 125, "INVALID_VOTER_KEY", False
class DuplicateVoter(KafkaError):
    code, name, retriable = 126, "DUPLICATE_VOTER", False
class VoterNotFound(KafkaError):
    code, name, retriable = 127, "VOTER_NOT_FOUND", False
class InvalidRegularExpression(KafkaError):
    code, name, retriable = 128, "INVALID_REGULAR_EXPRESSION", False
class RebootstrapRequired(KafkaError):
    code, name, retriable = 129, "REBOOTSTRAP_REQUIRED", False
class StreamsInvalidTopology(KafkaError):
    code, name, retriable = 130, "STREAMS_INVALID_TOPOLOGY", False
class StreamsInvalidTopologyEpoch(KafkaError):
    code, name, retriable = 131, "STREAMS_INVALID_TOPOLOGY_EPOCH", False
class StreamsTopologyFenced(KafkaError):
    code, name, retriable = 132, "STREAMS_TOPOLOGY_FENCED", False
class ShareSessionLimitReached(KafkaError):
    code, name, retriable = 133, "SHARE_SESSION_LIMIT_REACHED", True
# fmt: on


_CLASS_BY_CODE: dict[int, type[KafkaError]] = {
    cls.code: cls for cls in KafkaError.__subclasses__() if cls is not UnknownErrorCode
}


def error_class(code: int) -> type[KafkaError] | None:
    """The class of a Kafka error code; None for 0 (no error) and for codes that are not known."""
    return _CLASS_BY_CODE.get(code)


def error_for_code(code: int, message: str = "") -> KafkaError:
    """An error to raise for a code read from the wire. Raises ValueError for 0, which is no error."""
    if code == 0:
        raise ValueError("code 0 means that there was no error")
    cls = _CLASS_BY_CODE.get(code)
    return UnknownErrorCode(code, message) if cls is None else cls(message)
