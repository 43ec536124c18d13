"""A whole system on one machine: ZooKeeper, one broker process a cluster, mirror processes.

Called by `millrace local` (detached, found again by pid files) and by the demo (children that die with it).
Everything lies in one folder:

    config/   the YAML that each process was started with     data/   what brokers and ZooKeeper keep
    logs/     standard error of each process                  run/    pid files and the lock

Order: ZooKeeper, then all brokers at once, then all mirrors at once; `down` goes the other way. A start that
fails stops what it started, and says what the process itself said. A service that has a pid file belongs to
the sandbox, also when its description does not name it any more.

What must stay true: only a folder that `make_folders` has made a sandbox's is ever deleted, and only `up` and
the demo make one, in a folder that holds no file of anybody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kio.schema.api_versions.v0.request import ApiVersionsRequest

from millrace.broker.errors import DataFolderNotWritable, FatalError, PortTaken
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import encode_request
from millrace.deploy import processes, zookeeper
from millrace.deploy.local.spec import DEFAULT_FILE, MirrorSpec, SandboxSpec, load_spec

START_TIMEOUT_S = 180.0
"""A process that ends is seen at once; one that lives may compile, beside others on a small machine."""
SLOW_START_S = 5.0
WHY_SLOW = "the first start on a machine compiles their loops, once; this may take a minute"
STOP_GRACE_S = 30.0
READY_POLL_S = 0.05
ANSWER_TIMEOUT_S = 2.0
MIRROR_SESSION_TIMEOUT_MS = 5_000
LEFT_OVER = "left over"
"""The state of a service that runs and that the description does not name."""
DRAINED = "drained"
"""The state of a mirror's worker that lives, carries nothing and never will again."""

# What suits many brokers on one small machine; a cluster's own settings lie over these.
BROKER_SETTINGS: dict[str, str | int | bool] = {
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1_000,
    "offsets.topic.num.partitions": 4,
    "zookeeper.session.timeout.ms": 4_000,
}


def mirror_command(config: Path, process: str) -> list[str]:
    """The command line of an ordinary mirror process."""
    return [sys.executable, "-m", "millrace.deploy.cli", "mirror", "run", "--config", str(config)]


@dataclass(frozen=True, slots=True)
class Service:
    """One process of the sandbox. `prepare` writes its config and returns its command line."""

    name: str
    tier: int
    address: str
    prepare: Callable[[], list[str]]
    answers: Callable[[], bool]
    is_drained: Callable[[], bool] = lambda: False


class Sandbox:
    """Starts, finds and stops the processes that a `SandboxSpec` describes."""

    def __init__(
        self,
        spec: SandboxSpec,
        folder: Path | None = None,
        *,
        detached: bool = True,
        mirror_command: Callable[[Path, str], list[str]] = mirror_command,
        say: Callable[[str], None] = lambda line: None,
    ):
        """`say` is told, in a line for people, what a start that takes long is waiting for."""
        self.spec = spec
        self.folder = spec.data.absolute() if folder is None else folder.expanduser().absolute()
        self._detached = detached
        self._mirror_command = mirror_command
        self._say = say
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._services = {service.name: service for service in self._describe_services()}

    @classmethod
    def from_file(
        cls,
        file: Path | None = None,
        data: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> Sandbox:
        return cls(load_spec(file or DEFAULT_FILE), data, say=say)

    def bootstrap(self, cluster: str) -> str:
        return self.spec.clusters[cluster].listen

    def addresses(self) -> list[dict[str, str]]:
        """One row a service, in the order of starting."""
        return [{"service": service.name, "address": service.address} for service in self._services.values()]

    def control_addresses(self) -> list[str]:
        """Where the mirror processes answer `/status`."""
        return [address for mirror in self.spec.mirrors for address in mirror.control]

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def up(self, *, only_tiers: Sequence[int] = (0, 1, 2)) -> list[str]:
        """Starts what does not run, and again what is drained, and waits until all of it serves; returns the
        names of what it started."""
        make_folders(self.folder)
        started: list[str] = []
        with self._lock():
            try:
                for tier in only_tiers:
                    services = self._tier(tier)
                    self._stop([each.name for each in services if self._is_drained(each)])
                    for service in services:
                        if not self._living(service.name):
                            started.append(service.name)
                            self._spawn(service)
                    self._wait_until_serving([each.name for each in services])
            except BaseException:
                self._stop(started)
                raise
        return started

    def start(self, name: str) -> None:
        """Starts one service again and waits until it serves."""
        self._spawn(self._services[name])
        self._wait_until_serving([name])

    def kill(self, name: str) -> None:
        """SIGKILL to one service, as a machine that fails would."""
        identity = self._living(name)
        if identity is None:
            raise FatalError(f"{name} does not run: {self.last_words(name)}")
        processes.kill(identity)
        self._reap(name)

    def down(self) -> list[str]:
        """Stops what runs, mirrors first and ZooKeeper last; returns the names of what it stopped."""
        if not is_sandbox(self.folder):
            return []
        with self._lock():
            return self._stop([*self._services, *self._left_over()])

    def status(self) -> list[dict[str, Any]]:
        """One row a service: `state` is serving, starting (no answer yet), DRAINED, stopped, or LEFT_OVER."""
        rows = []
        for service in self._services.values():
            identity = self._living(service.name)
            rows.append(self._row(service.name, self._state(service), identity, service.address))
        for name in self._left_over():
            if identity := self._living(name):
                rows.append(self._row(name, LEFT_OVER, identity, ""))
        return rows

    def _state(self, service: Service) -> str:
        if not self._living(service.name):
            return "stopped"
        if service.answers():
            return "serving"
        return DRAINED if service.is_drained() else "starting"

    def _row(
        self, name: str, state: str, identity: processes.ProcessIdentity | None, address: str
    ) -> dict[str, Any]:
        return {
            "service": name,
            "state": state,
            "pid": identity.pid if identity else None,
            "address": address,
            "log": str(self.log(name)),
        }

    def ended(self) -> list[str]:
        """Names of the services that this sandbox started and that have ended since."""
        return [name for name, child in self._children.items() if child.poll() is not None]

    def last_words(self, name: str) -> str:
        """What a service that ended said last, and where its log is."""
        words = processes.last_lines(self.log(name), 1).removeprefix("millrace: ")
        return f"{words or 'it said nothing'} (log: {self.log(name)})"

    def delete_data(self) -> bool:
        """Deletes the folder; False where there is none. Raises FatalError when something runs in it, or
        it is not a sandbox's."""
        if not self.folder.exists():
            return False
        if not is_sandbox(self.folder):
            raise FatalError(f"{self.folder} is not a sandbox's folder: nothing is deleted")
        running = [name for name in (*self._services, *self._left_over()) if self._living(name)]
        if running:
            raise FatalError(f"{', '.join(running)} still runs in {self.folder}: stop it first")
        shutil.rmtree(self.folder)
        return True

    # Starting and stopping.

    def _spawn(self, service: Service) -> None:
        _check_address_is_free(service)
        child = processes.spawn(
            service.prepare(), log=self.log(service.name), die_with_parent=not self._detached
        )
        self._children[service.name] = child
        self._process_file(service.name).write(processes.identity_of(child))

    def _wait_until_serving(self, names: Sequence[str]) -> None:
        began = time.monotonic()
        is_slow = False
        waiting = list(names)
        while waiting:
            for name in waiting:
                child = self._children.get(name)
                status = None if child is None else child.poll()
                if status is not None:
                    raise FatalError(f"{name} ended with status {status}: {self.last_words(name)}")
                if child is None and not self._living(name):
                    raise FatalError(f"{name} ended: {self.last_words(name)}")
            waiting = [name for name in waiting if not self._services[name].answers()]
            lasts_s = time.monotonic() - began
            started = [name for name in waiting if name in self._children]
            compiling = [name for name in started if self._services[name].tier > 0]
            if compiling and not is_slow and lasts_s > SLOW_START_S:
                is_slow = True
                self._say(f"still starting {', '.join(compiling)}: {WHY_SLOW}")
            if waiting and lasts_s > START_TIMEOUT_S:
                name = waiting[0]
                where = self._services[name].address
                raise FatalError(
                    f"{name} does not serve at {where} after {START_TIMEOUT_S:.0f} s: {self.last_words(name)}"
                )
            if waiting:
                time.sleep(READY_POLL_S)

    def _stop(self, names: Sequence[str]) -> list[str]:
        """Ends the given services tier by tier; those of one tier end side by side."""
        stopped: list[str] = []
        for tier in (2, 1, 0):
            living = {
                name: identity
                for name in names
                if self._tier_of(name) == tier and (identity := self._living(name))
            }
            for identity in living.values():
                processes.send(identity, signal.SIGTERM)
            deadline = time.monotonic() + STOP_GRACE_S
            for name, identity in living.items():
                if not processes.wait_until_ended(identity, max(0.0, deadline - time.monotonic())):
                    processes.kill(identity)
                self._reap(name)
                stopped.append(name)
        for name in names:
            if not self._living(name):
                self._process_file(name).remove()
        return stopped

    def _is_drained(self, service: Service) -> bool:
        """Whether it lives and will never serve again."""
        return self._living(service.name) is not None and service.is_drained()

    def _reap(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.wait()

    def _living(self, name: str) -> processes.ProcessIdentity | None:
        return self._process_file(name).living()

    def _process_file(self, name: str) -> processes.ProcessFile:
        return processes.ProcessFile(self.folder / "run" / f"{name}.pid")

    def _left_over(self) -> list[str]:
        """Services that were started here and that the description does not name, any more or yet."""
        names = sorted(path.stem for path in (self.folder / "run").glob("*.pid"))
        return [name for name in names if name not in self._services]

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keeps two commands from starting or stopping the same sandbox at once."""
        with (self.folder / "run" / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FatalError(
                    f"another command starts or stops {self.spec.name} in {self.folder}: wait for it to end"
                ) from None
            yield

    # What the services are.

    def _describe_services(self) -> list[Service]:
        services = [self._zookeeper_service()]
        services.extend(self._broker_service(name, id_) for id_, name in enumerate(self.spec.clusters, 1))
        for mirror in self.spec.mirrors:
            services.extend(self._mirror_service(mirror, address) for address in mirror.control)
        return services

    def _tier(self, tier: int) -> list[Service]:
        return [service for service in self._services.values() if service.tier == tier]

    def _tier_of(self, name: str) -> int:
        service = self._services.get(name)
        if service is not None:
            return service.tier
        return 0 if name == "zookeeper" else 1 if name.startswith("broker-") else 2

    def _zookeeper_service(self) -> Service:
        host, port = Address.parse(self.spec.zookeeper.listen)
        return Service(
            name="zookeeper",
            tier=0,
            address=self.spec.zookeeper.listen,
            prepare=lambda: zookeeper.launch_command(
                port, self.folder / "data" / "zookeeper", host=host, heap_mib=self.spec.zookeeper.heap_mib
            ),
            answers=lambda: zookeeper.is_serving(port, host),
        )

    def _broker_service(self, cluster: str, id_: int) -> Service:
        spec = self.spec.clusters[cluster]
        name = f"broker-{cluster}"

        def prepare() -> list[str]:
            config = self._write_config(
                name,
                {
                    "id": id_,
                    "listen": spec.listen,
                    "zookeeper": f"{self.spec.zookeeper.listen}/{cluster}",
                    "data": [str(self.folder / "data" / cluster)],
                    "rack": cluster,
                    "settings": {**BROKER_SETTINGS, **spec.settings},
                },
            )
            return [sys.executable, "-m", "millrace.deploy.cli", "broker", "run", "--config", str(config)]

        return Service(name, 1, spec.listen, prepare, answers=lambda: _answers_requests(spec.listen))

    def _mirror_service(self, mirror: MirrorSpec, address: str) -> Service:
        name = f"mirror-{mirror.name}-{mirror.control.index(address) + 1}"

        def prepare() -> list[str]:
            config = self._write_config(name, self._mirror_config(mirror, address))
            return self._mirror_command(config, name)

        return Service(
            name,
            2,
            address,
            prepare,
            answers=lambda: _ask_mirror(address, "/readyz") is not None,
            is_drained=lambda: _says_drained(address),
        )

    def _mirror_config(self, mirror: MirrorSpec, control: str) -> dict[str, Any]:
        topics: dict[str, Any] = {"include": mirror.topics.include, "exclude": mirror.topics.exclude}
        return {
            "name": mirror.name,
            "target": {"cluster": mirror.target, "bootstrap": [self.bootstrap(mirror.target)]},
            "sources": [
                {"cluster": cluster, "bootstrap": [self.bootstrap(cluster)], "topics": topics}
                for cluster in mirror.sources
            ],
            "control": {"listen": control},
            "group": {"session_timeout_ms": MIRROR_SESSION_TIMEOUT_MS},
        }

    def _write_config(self, name: str, content: dict[str, Any]) -> Path:
        path = self.folder / "config" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return path


def is_sandbox(folder: Path) -> bool:
    """Whether `make_folders` was here, or an earlier release, which left these too once ZooKeeper had run."""
    return (folder / "run" / "lock").is_file() and (folder / "data" / "zookeeper").is_dir()


def make_folders(folder: Path) -> None:
    """Makes the folder a sandbox's, which may be deleted as a whole. Raises DataFolderNotWritable, and
    FatalError where files of somebody else are in it."""
    lock = folder / "run" / "lock"
    files = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    if not is_sandbox(folder) and any(file != lock for file in files):
        raise FatalError(f"{folder} holds other files: choose an empty folder with --data")
    try:
        for name in ("config", "data/zookeeper", "logs", "run"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise DataFolderNotWritable(
            f"cannot write to {folder} ({error.strerror}): choose another folder with --data"
        ) from error


def _check_address_is_free(service: Service) -> None:
    """A stranger on the port would look like the service that is being started."""
    if _accepts_connections(service.address):
        raise PortTaken(
            f"{service.name} needs {service.address}, where something else listens: "
            "stop that, or change the address in the sandbox file"
        )


def _accepts_connections(address: str) -> bool:
    try:
        with socket.create_connection(Address.parse(address), timeout=1.0):
            return True
    except OSError:
        return False


def _answers_requests(address: str) -> bool:
    """Whether a broker serves: its port takes connections from its first moment on, long before it does."""
    try:
        with socket.create_connection(Address.parse(address), timeout=ANSWER_TIMEOUT_S) as connection:
            connection.sendall(encode_request(ApiVersionsRequest(), 1, "millrace-local"))
            return len(connection.recv(1)) == 1
    except OSError:
        return False


def _says_drained(address: str) -> bool:
    """Whether a mirror's worker has given its work up; one that does not answer has not said so."""
    try:
        status = json.loads(_ask_mirror(address, "/status") or b"{}")
    except ValueError:
        return False
    return isinstance(status, dict) and status.get("draining") is True


def _ask_mirror(address: str, path: str) -> bytes | None:
    """The answer of a mirror's worker; None where it is none, or another status than 200."""
    host, port = Address.parse(address)
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
