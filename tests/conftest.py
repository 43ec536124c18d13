"""Fixtures for all tests: real servers, started only when a test asks for one."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
import structlog

# Tests share helper modules (`tests.servers`, `tests.peers`), also when pytest is started by its script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import forked, log_tails, seeds
from tests.kafka_fixture import kafka_peer  # noqa: F401
from tests.pairs import (  # noqa: F401
    mortal_kafka_source,
    mortal_kafka_target,
    mortal_millrace_source,
    mortal_millrace_target,
    pair,
    pair_kafka_second_source,
    pair_kafka_source,
    pair_kafka_target,
    pair_millrace_second_source,
    pair_millrace_source,
    pair_millrace_target,
    second_source,
)
from tests.peers import spark_classes
from tests.points.fault import fault_at  # noqa: F401
from tests.secure_kafka import second_secure_kafka, secure_kafka  # noqa: F401
from tests.servers import BrokerProcess, ZooKeeper

# A first call compiles kernels, and a machine stands still at times: how long an example takes says nothing.
hypothesis.settings.register_profile("gate", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile(
    "search", deadline=None, derandomize=False, database=None, print_blob=True
)
hypothesis.settings.load_profile("search" if seeds.is_chosen() else "gate")

TESTS = Path(__file__).resolve().parent
GUARDING = ("properties", "simulation")

BrokerFactory = Callable[..., BrokerProcess]

forked.turn_on()
if spark_classes.options():
    os.environ.setdefault(spark_classes.VARIABLE, spark_classes.options())


def pytest_configure() -> None:
    """SIGTERM ends a run as Ctrl-C does: its servers are stopped, those too that outlive their starter."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would end the ending
    raise KeyboardInterrupt("SIGTERM")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed says with which seed it drew its input, and what servers said meanwhile."""
    report = yield
    if call.when == "call" and seeds.taken() and report.failed:
        report.sections.append(("seed", f"{seeds.VARIABLE}={seeds.given()} draws the same again"))
    if report.failed and item.path.is_relative_to(TESTS):
        folder = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        report.sections += log_tails.sections(folder, call.start)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Histories and models guard data, all of them."""
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).parts[0] in GUARDING:
            item.add_marker(pytest.mark.safety)


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """A test that sets up logging binds it to the stderr that pytest captures for that test alone."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    """One real ZooKeeper for the whole session; tests keep apart by chroot."""
    server = ZooKeeper(tmp_path_factory.mktemp("zookeeper"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def broker_factory(zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[BrokerFactory]:
    """`broker_factory(**settings)` starts a broker, by default in a cluster of its own.

    Keyword `zookeeper_path` joins an existing cluster, `broker_id` names the broker, `start=False` leaves
    starting to the caller; dots in setting names are written as underscores.
    """
    yield from _broker_factory(zookeeper, tmp_path)


@pytest.fixture(scope="module")
def module_broker_factory(
    zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerFactory]:
    """The same for brokers that a module's tests share."""
    yield from _broker_factory(zookeeper, tmp_path_factory.mktemp("brokers"))


def _broker_factory(zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[BrokerFactory]:
    brokers: list[BrokerProcess] = []

    def make(
        *, zookeeper_path: str | None = None, broker_id: int = 1, start: bool = True, **settings: object
    ) -> BrokerProcess:
        folder = tmp_path / f"broker-{len(brokers)}"
        named = {key.replace("_", "."): value for key, value in settings.items()}
        broker = BrokerProcess(
            zookeeper_path or zookeeper.chroot(), folder, broker_id=broker_id, settings=named
        )
        brokers.append(broker)
        return broker.start() if start else broker

    try:
        yield make
    finally:
        for broker in brokers:
            broker.kill()


@pytest.fixture
def broker(broker_factory: BrokerFactory) -> BrokerProcess:
    """One running broker in a cluster of its own."""
    return broker_factory()


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    """A command that runs in this process turns the collector off and answers to signals, as it does at the
    start of its own."""
    yield
    gc.enable()
    if signal.getsignal(signal.SIGTERM) not in (_interrupt, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, _interrupt)
