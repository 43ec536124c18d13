"""Clusters of several brokers, of Millrace and of Apache Kafka alike, for mirrors between them.

`three_millraces` and `ThreeKafkas` start one, `brokers_of` either. In both, the tests kill, move and start
brokers 2 and up; the first stays: of Apache Kafka's it is the controller too. Internal topics lie on two
brokers, so that any one of those can go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.three_brokers import ThreeBrokers
from tests.conftest import BrokerFactory
from tests.pairs import MORTAL_KAFKA, SETTINGS, SMALL_HEAP, End, Kind
from tests.peers.kafka import KafkaPeer
from tests.servers import BrokerProcess

REPLICATED = {
    "offsets.topic.replication.factor": "2",
    "transaction.state.log.replication.factor": "2",
    "transaction.state.log.min.isr": "1",
}


class ThreeKafkas(ThreeBrokers):
    """Apache Kafka's brokers 1, 2, ..., asked as Millrace's are."""

    def __init__(self, folder: Path, count: int = 3, **settings: str) -> None:
        named: Mapping[str, str] = MORTAL_KAFKA | REPLICATED | settings
        first = KafkaPeer(folder / "broker-1", settings=named, jvm_options=SMALL_HEAP)
        self.brokers = {1: first}  # type: ignore[dict-item]
        for number in range(2, count + 1):
            self.brokers[number] = KafkaPeer(  # type: ignore[assignment]
                folder / f"broker-{number}",
                settings=named,
                jvm_options=SMALL_HEAP,
                joins=first,
                node_id=number,
            )
        try:
            first.start()
            for number in range(2, count + 1):
                self.brokers[number].launch()
            for number in range(2, count + 1):
                self.brokers[number].wait_until_serving()
            self.wait_for_brokers(*self.brokers)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for broker in reversed(self.brokers.values()):
            broker.kill()


def three_millraces(make: BrokerFactory, count: int = 3, **settings: str) -> ThreeBrokers:
    """What `make` starts is ended with its fixture."""

    def replicated(**more: object) -> BrokerProcess:
        named = {key.replace(".", "_"): value for key, value in (SETTINGS | REPLICATED | settings).items()}
        return make(**{**named, **more})

    return ThreeBrokers(replicated, count)


@contextmanager
def brokers_of(
    kind: Kind, make: BrokerFactory, folder: Path, count: int = 3, **settings: str
) -> Iterator[ThreeBrokers]:
    """A cluster of its own for one test."""
    if kind == "kafka":
        several: ThreeBrokers = ThreeKafkas(folder, count, **settings)
    else:
        several = three_millraces(make, count, **settings)
    try:
        yield several
    finally:
        for broker in reversed(several.brokers.values()):
            broker.kill()


def end_of(several: ThreeBrokers, kind: Kind, name: str) -> End:
    """The cluster as a pair's source or target; its data are broker 1's."""
    first = several.brokers[1]
    data = first.directory / "data" if isinstance(first, KafkaPeer) else first.data
    return End(kind, name, first.bootstrap, data, first)


def move(broker: BrokerProcess | KafkaPeer, port: int, host: str = "127.0.0.1") -> None:
    """Stops a broker and starts it with its data at another port, and at another host."""
    if isinstance(broker, KafkaPeer):
        broker.restart(port=port, host=host)
    else:
        broker.stop()
        broker.port, broker.advertised_host = port, host
        broker.start()
