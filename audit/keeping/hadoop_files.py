"""A state's files on a Hadoop file system: HDFS, object stores, and what else Spark's JVM reaches by a URI.

Called by `state_files.open_files`. What must stay true is **create if absent**: of two jobs that commit the
same number one wins, and the name never shows half a file. No single call of Hadoop's API promises that
everywhere, so it is chosen by where the folder really lies (a `viewfs` path is followed to its mount):

    file system           how                                       guaranteed by
    file                  write aside, link(2)                      link fails on a name that exists (Hadoop's
                                                                    own rename overwrites)
    hdfs, webhdfs         write aside, rename without overwrite     the name node renames under one lock, and
                                                                    refuses a name that exists
    ofs, o3fs             the same                                  Ozone's manager, under the bucket's lock
    abfs(s)               the same                                  Azure: `If-None-Match: *` with the rename
    s3a, and whatever     createFile with `must` of                 Hadoop's contract of that option: check
    declares the option   fs.option.create.conditional.overwrite    and creation are one step, at close
    gs                    create without overwrite, seen at close   Google Cloud Storage: generation 0

Anything else is refused with a line (`StatePlaceUnsafe`): a rename that copies, as of S3A and of Azure's
older wasb do, lets both jobs commit. S3A has the option from Hadoop 3.4.2 on, unless
`fs.s3a.create.conditional.enabled` is off; a store behind it that leaves the condition unread is found out by
creating one probe twice.

An answer can be lost though the call did its work (a name node that dies or fails over, a retried PUT). So
after an error, or a refusal that a retry could have caused, the file system is asked what is there.

Durability: what is written here is flushed to disk where the file system knows how (`hsync`). Cells are
written by Spark, which only closes its files: HDFS has them on as many data nodes as
`dfs.namenode.replication.min` says, and on their disks at once with `dfs.datanode.synconclose`.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from millrace.audit.keeping.hadoop_gateway import java_gateway
from millrace.audit.keeping.state_files import Entry, StatePlaceUnsafe, no_hard_links, not_writable
from millrace.broker.errors import DiskFull, FatalError

CONDITIONAL_CREATE = "fs.option.create.conditional.overwrite"
NO_ROOM = ("No space left", "quota", "Quota")
AWAY = frozenset(
    {
        "ClosedChannelException",
        "ConnectException",
        "ConnectTimeoutException",
        "EOFException",
        "NoRouteToHostException",
        "RetriableException",
        "SocketException",
        "SocketTimeoutException",
        "StandbyException",
        "UnknownHostException",
    }
)
"""What Java calls a server that does not answer."""

_CHUNK_BYTES = 4 << 20  # that go to the JVM at one time
_RENAMES = frozenset({"hdfs", "webhdfs", "swebhdfs", "ofs", "o3fs", "abfs", "abfss"})


class Rule(StrEnum):
    """How a file is created only if its name is free."""

    LINK = "link"
    RENAME = "rename"
    CONDITIONAL = "conditional create"
    GENERATION = "create at close"


class FileSystemFailed(FatalError, OSError):
    """The state's file system refused, in one line."""

    exit_status = 3


class FileSystemAway(FileSystemFailed):
    """It does not answer, or takes no writes for now: nothing is wrong with the folder."""


def commit_rule(scheme: str, declares_conditional_create: bool) -> Rule | None:
    """The sound way on the file system that the scheme names, None where none is known. Pure.

    `declares_conditional_create`: its answer to `hasPathCapability`, which Hadoop requires of every store
    that has the option and has it enabled.
    """
    if scheme == "file":
        return Rule.LINK
    if scheme in _RENAMES:
        return Rule.RENAME
    if declares_conditional_create:
        return Rule.CONDITIONAL
    return Rule.GENERATION if scheme == "gs" else None


def refusal(where: str, scheme: str) -> str:
    """Why such a place cannot take a state, and which can."""
    if scheme == "s3a":
        why = (
            "this S3A has no conditional create (it needs Hadoop 3.4.2 or later, "
            "and fs.s3a.create.conditional.enabled), and its rename is a copy"
        )
    else:
        why = f"{scheme}:// is not known to create a file only if its name is free, in one step"
    return (
        f"{where} cannot take the audit's state: {why}, so two jobs could both commit; "
        "set state: to a folder of this machine, of HDFS, or of a store with conditional writes"
    )


class HadoopFiles:
    """A folder of a Hadoop file system, through the Py4J gateway of the JVM that Spark runs in.

    The settings are Spark's own (`spark.hadoop.*`) when it runs; without it they are taken from `settings`,
    Spark's by name. The gateway outlives the session.
    """

    def __init__(self, root: str, settings: Mapping[str, str] | None = None) -> None:
        self.where = root
        with _io_errors(root):
            self._jvm, self._conf = java_gateway(settings)
            self._root = self._jvm.org.apache.hadoop.fs.Path(root)
            self._fs = self._root.getFileSystem(self._conf)
        self._rule: Rule | None = None

    def uri(self, name: str) -> str:
        return f"{self.where}/{name}"

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name) if name else self._root

    def prepare(self, folders: Sequence[str]) -> None:
        """Raises StatePlaceUnsafe, FileSystemAway, DataFolderNotWritable."""
        try:
            with _io_errors(self.where):
                for name in folders:
                    if not self._fs.mkdirs(self._path(name)):
                        raise OSError(f"{name} cannot be made")
            rule = self._settled_rule()
            probe = f".probe-{uuid.uuid4().hex}"
            try:
                if rule in (Rule.LINK, Rule.RENAME):
                    self._write_probe(probe)
                else:
                    self._try_twice(probe)
                if rule is Rule.LINK:
                    self._link_probe(probe)
            finally:
                for each in (probe, f"{probe}-linked"):
                    with contextlib.suppress(OSError):
                        self.remove(each)
        except FileSystemAway:
            raise
        except OSError as problem:
            raise not_writable(self.where, str(problem).removeprefix(f"{self.where}: ")) from problem

    def _write_probe(self, probe: str) -> None:
        with _io_errors(self.where):
            self._put(probe, b"")

    def _link_probe(self, probe: str) -> None:
        try:
            with _io_errors(self.where):
                self._link(probe, f"{probe}-linked")
        except OSError as problem:
            raise no_hard_links(self.where, str(problem).removeprefix(f"{self.where}: ")) from problem

    def _try_twice(self, probe: str) -> None:
        """Stores behind S3's protocol may leave a condition that they do not know unread."""
        if not self.create(probe, b"first") or self.create(probe, b"second"):
            raise StatePlaceUnsafe(
                f"{self.where} cannot take the audit's state: its store replaced a file that was to be made "
                "only if absent, so two jobs could both commit; set state: to a folder of this machine, "
                "of HDFS, or of a store with conditional writes"
            )

    def _settled_rule(self) -> Rule:
        """Follow the folder to where it really lies, once; from then on its own file system is used."""
        if self._rule is None:
            with _io_errors(self.where):
                self._root = self._fs.resolvePath(self._root)
                self._fs = self._root.getFileSystem(self._conf)
                scheme = str(self._fs.getUri().getScheme()).lower()
                declared = bool(self._fs.hasPathCapability(self._root, CONDITIONAL_CREATE))
            self._rule = commit_rule(scheme, declared)
            if self._rule is None:
                raise StatePlaceUnsafe(refusal(self.where, scheme))
        return self._rule

    def read(self, name: str) -> bytes:
        with _io_errors(self.uri(name)):
            stream = self._fs.open(self._path(name))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def source(self, name: str) -> _Reading:
        with _io_errors(self.uri(name)):
            path = self._path(name)
            size = int(self._fs.getFileStatus(path).getLen())
            return _Reading(self.uri(name), self._jvm, self._fs.open(path), size)

    def at_hand(self, name: str, copy: Path) -> Path:
        """The JVM writes the copy, so that no byte of it goes through the gateway."""
        with _io_errors(self.uri(name)):
            to = self._jvm.org.apache.hadoop.fs.Path(copy.absolute().as_uri())
            self._fs.copyToLocalFile(False, self._path(name), to, True)  # raw: without checksums beside it
        return copy

    def write(self, name: str, content: bytes) -> None:
        try:
            with _io_errors(self.uri(name)):
                self._put(name, content)
        except BaseException:
            with contextlib.suppress(OSError, DiskFull):  # what failed is what must be told
                self.remove(name)
            raise

    def replace(self, name: str, content: bytes | Path) -> None:
        """Put a file in the place of another, or of none: who reads sees either, whole. What a file of this
        machine has is never held whole."""
        aside = f".{name}.{uuid.uuid4().hex}"
        with _io_errors(self.uri(name)):
            if str(self._fs.getUri().getScheme()).lower() not in (*_RENAMES, "file"):
                stream = self._fs.create(self._path(name), True)  # a store shows it once it is closed
                _fill(stream, content)
                stream.close()
                return
            try:
                self._put(aside, content)
                options = self._jvm.org.apache.hadoop.fs.Options.Rename
                chosen = self._jvm.java.lang.reflect.Array.newInstance(options.OVERWRITE.getClass(), 1)
                chosen[0] = options.OVERWRITE
                context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(
                    self._fs.getUri(), self._conf
                )
                context.rename(self._fs.makeQualified(self._path(aside)), self._path(name), chosen)
            except BaseException:
                self._fs.delete(self._path(aside), True)
                raise

    def create(self, name: str, content: bytes) -> bool:
        rule = self._settled_rule()
        if rule in (Rule.LINK, Rule.RENAME):
            return self._create_aside(name, content, rule)
        try:
            with _io_errors(self.uri(name)):
                self._create_at_close(name, content, rule)
            return True
        except OSError:
            there = self._look(name)
            if there is None:
                raise
            return there == content  # equal: it is ours, and the refusal was for the second try of it

    def _create_aside(self, name: str, content: bytes, rule: Rule) -> bool:
        folder, _, last = name.rpartition("/")
        temporary = f"{folder}/.{last}.{uuid.uuid4().hex}" if folder else f".{last}.{uuid.uuid4().hex}"
        done = False
        try:
            with _io_errors(self.uri(name)):
                self._put(temporary, content)
                done = (self._link if rule is Rule.LINK else self._rename)(temporary, name)
        except OSError:
            done = self._took_place(temporary, name, content)
            if not done and self._look(name) is None:
                raise
        else:
            done = done or (rule is Rule.RENAME and self._took_place(temporary, name, content))
        finally:
            if not done or rule is Rule.LINK:
                with contextlib.suppress(OSError, DiskFull):
                    self.remove(temporary)
        return done

    def _took_place(self, temporary: str, name: str, content: bytes) -> bool:
        """Whether our rename was done, whatever its answer: nobody else knows the temporary name."""
        return self._look(temporary) is None and self._look(name) == content

    def _look(self, name: str) -> bytes | None:
        """What is there: None when nothing is. Raises FileSystemFailed when that cannot be learnt."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def _put(self, name: str, content: bytes | Path) -> None:
        stream = self._fs.create(self._path(name), False)
        try:
            _fill(stream, content)
            if self._rule is Rule.LINK or stream.hasCapability("hsync"):
                stream.hsync()
        finally:
            stream.close()

    def _create_at_close(self, name: str, content: bytes, rule: Rule) -> None:
        """The content becomes visible when the stream is closed, if nobody was first."""
        builder = self._fs.createFile(self._path(name)).overwrite(False)
        if rule is Rule.CONDITIONAL:
            builder = builder.must(CONDITIONAL_CREATE, True)
        stream = builder.build()
        stream.write(bytearray(content))
        stream.close()

    def _rename(self, temporary: str, name: str) -> bool:
        return bool(self._fs.rename(self._path(temporary), self._path(name)))

    def _link(self, temporary: str, name: str) -> bool:
        """A hard link, made by the JVM: the one call that never replaces a file of a local disk. False where
        the name is another file's; that it is ours says more than an answer that may have been lost."""
        from py4j.protocol import Py4JJavaError

        files = self._jvm.java.nio.file.Files
        there, aside = (
            self._jvm.java.io.File(self._fs.makeQualified(self._path(each)).toUri().getPath())
            for each in (name, temporary)
        )
        try:
            files.createLink(there.toPath(), aside.toPath())
        except Py4JJavaError as problem:
            if there.exists() and files.isSameFile(there.toPath(), aside.toPath()):
                return True
            if "FileAlreadyExistsException" in str(problem.java_exception.getClass().getName()):
                return False
            raise
        return True

    def entries(self, folder: str) -> list[Entry]:
        try:
            with _io_errors(self.uri(folder)):
                found = [
                    Entry(
                        str(each.getPath().getName()),
                        each.getModificationTime() / 1000,
                        int(each.getLen()),
                        bool(each.isDirectory()),
                    )
                    for each in self._fs.listStatus(self._path(folder))
                ]
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda entry: entry.name)

    def remove(self, name: str) -> None:
        with _io_errors(self.uri(name)):
            self._fs.delete(self._path(name), True)

    def flush(self, names: Sequence[str]) -> None:
        """Nothing to do: Hadoop's own commit protocol has closed them."""


def _fill(stream: Any, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        stream.write(bytearray(content))
        return
    with content.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            stream.write(bytearray(chunk))


class _Reading(io.RawIOBase):
    """A file of the file system, read a stretch at a time."""

    def __init__(self, where: str, jvm: Any, stream: Any, size: int) -> None:
        super().__init__()
        self._where, self._jvm, self._stream, self._size, self._at = where, jvm, stream, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = begin + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        with _io_errors(self._where):
            self._stream.seek(self._at)
            found = bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(self._stream, count))
        self._at += len(found)
        return found

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError, DiskFull), _io_errors(self._where):
                self._stream.close()
        super().close()


@contextlib.contextmanager
def _io_errors(where: str) -> Iterator[None]:
    """Turn a Java exception into an OSError (or DiskFull) of one line."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except Py4JJavaError as problem:
        cause = problem.java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        kind = str(cause.getClass().getSimpleName())
        if kind == "RemoteException":  # the server's own, whose message is its whole stack
            kind = str(cause.getClassName()).rpartition(".")[2]
        raise os_error(where, kind, str(cause.getMessage() or kind)) from problem
    except (Py4JError, PySparkException) as problem:
        raise FileSystemFailed(f"{where}: {' '.join(str(problem).split())[:200]}") from problem


def os_error(where: str, kind: str, message: str) -> Exception:
    """The error for a Java exception, by the simple name of its class and its message. Pure."""
    lines = message.strip().splitlines()
    told = " ".join(lines[0].split()) if lines else kind
    if kind in ("FileNotFoundException", "NoSuchFileException"):
        return FileNotFoundError(f"{where}: {told}")
    if any(text in told for text in NO_ROOM):
        return DiskFull(f"{where}: {told}; make room, then run the audit again")
    if kind in ("ClassNotFoundException", "UnsupportedFileSystemException"):
        return FileSystemFailed(
            f"{where}: {told}; its file system's jars belong in spark.jars or spark.jars.packages "
            "(audit.yaml: spark)"
        )
    if kind in AWAY:
        return FileSystemAway(
            f"{where} cannot be reached ({told}, {kind}); run it again when its file system is back"
        )
    if kind == "SafeModeException":
        return FileSystemAway(f"{where} takes no writes now ({told}); run it again when safe mode is over")
    return FileSystemFailed(f"{where}: {told} ({kind})")
