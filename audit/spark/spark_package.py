"""Our own package, handed to a cluster's executors, so that nothing of ours has to be installed there.

Called by `spark_session` for masters on other machines, and by `spark_source.register` for a session that the
user made. What executors need is `millrace.audit` and the part of `millrace.broker` that it may import, some
hundreds of kilobytes; the libraries beneath them (numba, numpy, pyarrow, …) hold compiled code and must be
installed there.

The zip that Spark sends holds a small `millrace` package whose first import unpacks the rest into a folder of
the user who runs the executor, named by the content, and goes on from there. A zip alone would do for Python,
but numba keeps what it compiled beside the source: unpacked once, it compiles once a machine and version, not
once an application. What the driver has compiled travels along and is used where processor and Python are the
same (numba checks both, and the source).

What must stay true: executors run the driver's very version, also where another one is installed; a folder
that somebody else could write is never imported from.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

import millrace.audit
import millrace.broker
from millrace.audit.spark.environment import own_metadata

PARTS = (
    "audit/**/*.py",
    "broker/*.py",
    "broker/client/**/*.py",
    "broker/protocol/**/*.py",
    "broker/telemetry/**/*.py",
)
COMPILED = ("audit/**/__pycache__/*.nb?", "broker/protocol/**/__pycache__/*.nb?")

_SHIM = '''"""Made by millrace: unpacks the package that travelled with a Spark application, to import it."""

import os
import shutil
import stat
import tempfile
import zipfile

DIGEST = "{digest}"


def _is_ours(folder):
    try:
        found = os.stat(folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _unpacked(archive):
    for parent in (os.path.expanduser("~/.cache"), tempfile.gettempdir()):
        kept = os.path.join(parent, f"millrace-{{os.getuid()}}")
        try:
            os.makedirs(kept, mode=0o700, exist_ok=True)
            if not _is_ours(kept):
                continue
            return _unpack_in(kept, archive)
        except OSError:
            continue
    return _unpack_in(tempfile.mkdtemp(prefix="millrace-"), archive)


def _unpack_in(kept, archive):
    final = os.path.join(kept, DIGEST)
    if not os.path.isdir(final):
        staging = tempfile.mkdtemp(dir=kept)
        try:
            with zipfile.ZipFile(archive) as packed:
                names = [name for name in packed.namelist() if name.startswith("payload/")]
                packed.extractall(staging, names)
            os.rename(os.path.join(staging, "payload"), final)
        except OSError:
            if not os.path.isdir(final):
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return final


__path__ = [_unpacked(__loader__.archive)]
'''


def ship_package(spark: SparkSession, folder: Path | None = None) -> None:
    """Send the package to the session's executors, now and whenever one joins.

    The zip stays in `folder` (by default one of its own, removed when this process ends): Spark serves it
    from there as long as the session runs.
    """
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="millrace-package-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = build_package(folder)
    if not hasattr(spark, "_jsparkSession"):  # Spark Connect: there is no context here
        spark.addArtifacts(str(archive), pyfile=True)
        return
    path = list(sys.path)
    spark.sparkContext.addPyFile(str(archive))
    sys.path[:] = path  # the driver goes on with what it has


def build_package(folder: Path) -> Path:
    """Write the zip and return its path; equal content gives an equal name."""
    sources = dict(_files(PARTS))
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    metadata = own_metadata()  # beside the payload: Python finds it in the zip, which is on its path
    digest.update("".join(metadata).encode())
    label = digest.hexdigest()[:16]
    archive = folder / f"millrace-{label}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        packed.writestr("millrace/__init__.py", _SHIM.format(digest=label))
        for name, text in metadata.items():
            packed.writestr(name, text)
        for name, path in sorted({**sources, **dict(_files(COMPILED))}.items()):
            packed.write(path, f"payload/{name}")
    return archive


def _files(patterns: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(name below `millrace/`, path) of the package's files, wherever its parts are installed."""
    for pattern in patterns:
        part, _, rest = pattern.partition("/")
        package = {"audit": millrace.audit, "broker": millrace.broker}[part]
        root = Path(str(package.__file__)).parent
        for path in root.glob(rest):
            yield f"{part}/{path.relative_to(root)}", path
