"""The audit on a real cluster: `make audit-cluster [ARGS="--records 20k --seed 7"]`.

    python -m tests.proofs.real_cluster [--records 200k] [--partitions 16] [--producers 100] [--seed 7]
        [--steps audits,workers,drivers,name-nodes]

Spark standalone (a master and two workers), the state on HDFS (a name node and a data node), the
producers' source and an aggregate on brokers of their own. As root each of Spark's servers has a network
namespace, a user and folders of its own, and can write nothing of the driver's; elsewhere all is one user on
loopback, which is said. `--records` are sent before each step, some lost or repeated on the way. Steps:

- an audit, and the same again;
- a worker killed, with its executors, while they count, and another time while they reconcile;
- the driver killed when all is written, when the commit is written aside, and when it is made;
- the name node killed and started again between two runs, and while one reconciles.

What a disturbed run says must be exact or one line (status 3), and after each the next run must say what is
true of all that was ever sent: every loss and every repeat by name, nothing else, nothing counted twice. Exit
status 0 when it did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from millrace.audit.contract.events import HEARTBEAT
from millrace.deploy.processes import spawn
from tests.benchmarks.audit.bench_audit import parse_count
from tests.cluster.faults.network import BRIDGE, NamespaceNetwork, enter_namespaces
from tests.peers.hdfs import SUPERUSER, HdfsPeer
from tests.points.fault import Fault
from tests.points.launcher import DIED
from tests.proofs.audited import COUNT, RECONCILE, Audited, Truth, audit, end_tidily, table, write_config
from tests.proofs.hashed_load import Sending, count_events, drawn, even, stream_event
from tests.proofs.world import World
from tests.spark.standalone import WORKER_COUNT, StandaloneCluster, bare_python
from tests.waiting import patience

LOOPBACK = "127.0.0.1"
STATE = "/audit/state"
SENDING_MS = 120_000
AGO_MS = 3_600_000
FINDINGS = 2
WORK_S, LOOK_S = 0.05, 0.05
"""Processor time of a worker's Python when it is in the middle of something, and the time between looks."""
DRIVER_TIMEOUT_S = 300.0
INTERPRETER, LIBRARIES = "interpreter", "libraries"
USERS = ("daemon", "nobody", "bin", "games")
"""That every Debian has: the master's, and the workers'."""


class Apart(StandaloneCluster):
    """Servers in namespaces, under users of their own, who see Spark and Python in folders that are mounted
    for them: the driver's home may be closed to them."""

    def __init__(self, folder: Path, network: NamespaceNetwork) -> None:
        self._network = network
        self._users: dict[str, pwd.struct_passwd] = {}
        folder.chmod(0o755)
        _mount(Path(sys.base_prefix), folder / INTERPRETER)
        _mount(Path(sysconfig.get_paths()["purelib"]), folder / LIBRARIES)
        for name, user in zip(self.names(), USERS, strict=False):
            self._users[name] = found = pwd.getpwnam(user)
            for own in (folder / f"home-{name}", *self._work_folders(folder, name)):
                own.mkdir(parents=True)
                os.chown(own, found.pw_uid, found.pw_gid)
                own.chmod(0o700)
        super().__init__(folder)

    @staticmethod
    def names() -> list[str]:
        return ["master", *(f"worker-{number}" for number in range(WORKER_COUNT))]

    @staticmethod
    def _work_folders(folder: Path, name: str) -> list[Path]:
        kind, _, number = name.partition("-")
        return [folder / f"work-{number}"] if kind == "worker" else []

    @property
    def spark_home(self) -> Path:
        return self.folder / LIBRARIES / "pyspark"

    def make_python(self) -> Path:
        interpreter = self.folder / INTERPRETER / "bin" / f"python3.{sys.version_info.minor}"
        return bare_python(self.folder / "python", interpreter, self.folder / LIBRARIES)

    def host_of(self, name: str) -> str:
        return self._network.host(name)

    def command_of(self, name: str, words: list[str]) -> list[str]:
        return self._network.command(name, [*self._as_user(name), *words])

    def environment_of(self, name: str) -> dict[str, str]:
        user = self._users[name].pw_name
        return {
            "HOME": str(self.folder / f"home-{name}"),
            "USER": user,
            "LOGNAME": user,
            # An interpreter that is built with a library of its own looks for it where it was built for.
            "LD_LIBRARY_PATH": str(self.folder / INTERPRETER / "lib"),
        }

    def _as_user(self, name: str) -> list[str]:
        user = self._users[name]
        words = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        return [*words, "--inh-caps=-all", "--bounding-set=-all", "--pdeathsig=KILL", "--"]

    def can_write(self, name: str, folder: Path) -> bool:
        done = subprocess.run([*self._as_user(name), "test", "-w", str(folder)], check=False)
        return done.returncode == 0


def _mount(what: Path, where: Path) -> None:
    """Shown to this process and its children alone, to be read only, and gone with them."""
    where.mkdir(parents=True)
    subprocess.run(["mount", "-o", "bind,ro", str(what), str(where)], check=True)


@dataclass(slots=True)
class Story:
    """What was sent so far, and what an audit must find of it."""

    sending: Sending
    truth: Truth = field(default_factory=lambda: Truth(0, {"src": 0, "agg": 0}))
    number: int = 0

    def send(self, world: World, seed: int) -> None:
        """The next two minutes: some of it lost or repeated on the way, all of it told."""
        sending = self.sending
        lost = drawn(sending, FINDINGS, seed + 2 * self.number)
        repeated = [n for n in drawn(sending, FINDINGS, seed + 2 * self.number + 1) if n not in lost]
        world.send(sending, "src")
        world.send(sending, "agg", without=lost, twice=repeated)
        end_ms = sending.start_ms + sending.span_ms
        now_ms = time.time_ns() // 1_000_000
        world.tell(count_events(sending, now_ms))
        told = zip(
            sending.who.tolist(), sending.streams.tolist(), sending.assigned_after().tolist(), strict=True
        )
        world.tell(stream_event(*each[:2], HEARTBEAT, each[2], end_ms, now_ms) for each in told)
        world.position(world.ends("src"))
        count = sending.record_count
        self.truth = Truth(
            self.truth.acknowledged + count,
            {
                "src": self.truth.seen["src"] + count,
                "agg": self.truth.seen["agg"] + count - len(lost),
            },
            self.truth.losses | {sending.place(number) for number in lost},
            self.truth.duplicates | {sending.place(number) for number in repeated},
        )
        self.number += 1
        self.sending = replace(
            sending, assigned=sending.assigned_after(), start_ms=end_ms, seed=sending.seed + 1
        )


class Proof:
    """The servers, and the table that grows."""

    def __init__(self, given: argparse.Namespace, folder: Path, world: World, spark: StandaloneCluster,
                 hdfs: HdfsPeer, host: str) -> None:  # fmt: skip
        self.given, self.folder, self.world, self.spark, self.hdfs = given, folder, world, spark, hdfs
        self.rows: list[tuple[object, ...]] = []
        self.wrongs: list[str] = []
        start_ms = (time.time_ns() // 1_000_000 - AGO_MS) // SENDING_MS * SENDING_MS
        self.story = Story(
            even(
                given.producers, given.records, start_ms, SENDING_MS, given.partitions, linger_ms=5_000,
                seed=given.seed,
            )
        )  # fmt: skip
        settings = {
            "spark.driver.host": host,
            "spark.driver.bindAddress": host,
            "spark.executor.memory": "512m",
            "spark.cores.max": str(WORKER_COUNT),
            # Nothing runs before both executors are there.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.hadoop.dfs.client.use.datanode.hostname": "false",
        }
        self.config = write_config(
            folder / "driver",
            world.bootstraps,
            grace="1s",
            keep="forever",
            spark=settings,
            state=f"{hdfs.uri}{STATE}",
        )
        self.environment = {"PYSPARK_PYTHON": str(spark.python), "SPARK_LOCAL_IP": host}

    def send(self) -> None:
        self.story.send(self.world, self.given.seed)

    def audit(self, what: str, at_step: Callable[[str], None] = lambda step: None) -> Audited:
        """A run that must be exact."""
        found = self._run(at_step)
        self._tell(what, found, self.story.truth.wrong(found))
        return found

    def _run(self, at_step: Callable[[str], None] = lambda step: None) -> Audited:
        return audit(self.config, master=self.spark.master, environment=self.environment, at_step=at_step)

    def _tell(self, what: str, found: Audited, wrong: list[str], note: str = "") -> None:
        steps = " ".join(f"{seconds:.0f}" for seconds in found.steps.values())
        read = found.cost.get("records", "")
        self._row(what, found.status, read, f"{found.seconds:.0f} ({steps})", wrong, note)

    def _row(
        self, what: str, status: object, read: object, seconds: str, wrong: list[str], note: str = ""
    ) -> None:
        result = "WRONG" if wrong else note or "exact"
        self.rows.append((what, status, read, seconds, result))
        print(f"{what}: status {status}, {seconds} s, {result}", *wrong, sep="\n    ", flush=True)
        self.wrongs += [f"{what}: {each}" for each in wrong]

    def kill_worker_in(self, step: str) -> None:
        """The first worker whose Python is at work in this step dies; the run must be exact all the same."""
        killed: list[int] = []
        over = threading.Event()

        def kill() -> None:
            before = [self.spark.python_seconds(number) for number in range(WORKER_COUNT)]
            while not over.wait(LOOK_S):
                for number, before_s in enumerate(before):
                    if self.spark.python_seconds(number) > before_s + WORK_S and not over.is_set():
                        self.spark.kill_worker(number)
                        killed.append(number)
                        return

        threads: list[threading.Thread] = []

        def at_step(name: str) -> None:
            if name == step:
                threads.append(threading.Thread(target=kill))
                threads[0].start()
            elif threads:
                over.set()

        found = self._run(at_step)
        over.set()
        for thread in threads:
            thread.join()
        wrong = self.story.truth.wrong(found)
        if not killed:
            wrong.append(f"the worker was not killed: {step} was over before; give more --records")
        else:
            self.spark.start_worker(killed[0])
            self.spark.wait_until_whole()
        self._tell(f"a worker killed in {step}", found, wrong)

    def kill_driver_at(self, point: str) -> None:
        """It dies there; what the next run says is another row."""
        fault = Fault(self.folder / f"fault-{len(self.rows)}", point)
        begin = time.monotonic()
        log = self.folder / "driver" / f"died-{len(self.rows)}.log"
        words = [sys.executable, *fault.program, "audit", "run", "--config", str(self.config)]
        process = spawn(
            [*words, "--master", self.spark.master], log=log, environment=self.environment,
            die_with_parent=True,
        )  # fmt: skip
        status = process.wait(patience(DRIVER_TIMEOUT_S))
        wrong = [] if status == DIED else [f"it did not die there: {log.read_text()[-1000:]}"]
        self._row(f"driver killed: {point}", status, "", f"{time.monotonic() - begin:.0f}", wrong, "died")

    def restart_name_node_in(self, step: str) -> None:
        """The run either lives through it, or says so in one line and leaves the state as it was."""

        def at_step(name: str) -> None:
            if name == step:
                self.hdfs.kill_name_node()
                self.hdfs.start_name_node()

        before = files_of(self.hdfs, STATE)
        found = self._run(at_step)
        if found.status == 3 and not found.summary:
            wrong = [] if found.problem and "\n" not in found.problem else [f"not one line: {found.problem}"]
            after = files_of(self.hdfs, STATE)
            # What a run that failed has left is named by no commit, and swept in a day.
            others = before.items() - after.items()
            commits = {name for name in before.keys() ^ after.keys() if "/commits/" in name}
            if others or commits:
                wrong.append(f"the state is not as it was: {sorted([*dict(others), *commits])}")
            self._tell(f"name node restarted in {step}", found, wrong, f"one line: {found.problem[:60]}…")
        else:
            self._tell(f"name node restarted in {step}", found, self.story.truth.wrong(found))


def audits(proof: Proof) -> None:
    proof.send()
    first = proof.audit("an audit")
    again = proof.audit("the same again")
    if first.summary.get("counts") != again.summary.get("counts") or again.cost.get("records"):
        proof.wrongs.append("the second run, with nothing new, read or found something else")


def workers(proof: Proof) -> None:
    for step in (COUNT, RECONCILE):
        proof.send()
        proof.kill_worker_in(step)
        proof.audit("after it")


def drivers(proof: Proof) -> None:
    for point in (
        "all written, commit not begun",
        "commit written aside, not renamed",
        "committed, nothing told",
    ):
        proof.send()
        proof.kill_driver_at(point)
        proof.audit("after it")


def name_nodes(proof: Proof) -> None:
    proof.send()
    proof.hdfs.kill_name_node()
    proof.hdfs.start_name_node()
    proof.audit("name node restarted between runs")
    proof.send()
    proof.restart_name_node_in(RECONCILE)
    proof.audit("after it")


STEPS = {"audits": audits, "workers": workers, "drivers": drivers, "name-nodes": name_nodes}


@contextlib.contextmanager
def servers(given: argparse.Namespace) -> Iterator[Proof]:
    obstacle = enter_namespaces() if os.geteuid() == 0 else "not root"
    network = None if obstacle else NamespaceNetwork(Apart.names())
    host = LOOPBACK if network is None else BRIDGE
    where = f"one network and user for all ({obstacle})" if obstacle else "namespaces and users of their own"
    print(f"Spark's servers: {where}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="millrace-cluster-"))
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, folder)
        if network is not None:
            stack.callback(network.close)
        world = stack.enter_context(World(folder / "world", partitions=given.partitions, host=host))
        world.make_topics()
        hdfs = stack.enter_context(HdfsPeer(folder / "hdfs", host))
        _open_folder(hdfs, "/audit")
        (folder / "spark").mkdir()
        folder.chmod(0o755)
        spark = stack.enter_context(
            StandaloneCluster(folder / "spark") if network is None else Apart(folder / "spark", network)
        )
        proof = Proof(given, folder, world, spark, hdfs, host)
        if isinstance(spark, Apart):
            for name in spark.names():
                if spark.can_write(name, folder / "driver"):
                    proof.wrongs.append(f"{name} could write the driver's folder")
        yield proof


def _remove(folder: Path) -> None:
    """All of it, but not what is mounted there, which is this machine's own Python."""
    mounted = [folder / "spark" / name for name in (INTERPRETER, LIBRARIES)]
    for where in filter(_holds_something, mounted):
        subprocess.run(["umount", "-l", str(where)], check=False)
    if not any(map(_holds_something, mounted)):
        shutil.rmtree(folder, ignore_errors=True)


def _holds_something(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def files_of(hdfs: HdfsPeer, path: str) -> dict[str, tuple[int, int]]:
    """{path: (bytes, when it was last written in ms)} of everything below; HDFS changes no file in place."""
    address = f"{hdfs.web_address}/webhdfs/v1{path}?op=LISTSTATUS&user.name={SUPERUSER}"
    with urllib.request.urlopen(address, timeout=patience(60)) as answer:
        listed = json.load(answer)["FileStatuses"]["FileStatus"]
    found: dict[str, tuple[int, int]] = {}
    for each in listed:
        name = f"{path}/{each['pathSuffix']}"
        if each["type"] == "DIRECTORY":
            found |= files_of(hdfs, name)
        else:
            found[name] = (each["length"], each["modificationTime"])
    return found


def _open_folder(hdfs: HdfsPeer, path: str) -> None:
    address = f"{hdfs.web_address}/webhdfs/v1{path}?op=MKDIRS&permission=777&user.name={SUPERUSER}"
    with urllib.request.urlopen(urllib.request.Request(address, method="PUT"), timeout=patience(60)):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=parse_count, default=200_000, help="sent before each step")
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--producers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000 % 10**6)
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    given = parser.parse_args()
    end_tidily()
    if unknown := set(given.steps.split(",")) - set(STEPS):
        parser.error(f"no such steps: {', '.join(sorted(unknown))}")
    print(f"seed {given.seed}; {given.records:,} records before each step", flush=True)
    with servers(given) as proof:
        for name in given.steps.split(","):
            STEPS[name](proof)
    print()
    print(table(("step", "status", "records read", "seconds (by step)", "result"), proof.rows))
    print("every verdict was exact" if not proof.wrongs else f"{len(proof.wrongs)} WRONG")
    return 1 if proof.wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
