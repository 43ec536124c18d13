"""What Spark's traces come down to: one line, or nothing for what nobody expects."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.audit.spark.shared_state import require_shared, rows_in
from millrace.audit.spark.spark_failures import one_line
from millrace.broker.errors import ConfigError

TRACE = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 4207, in invoke_udf
{}

\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:571)
"""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "millrace.broker.errors.ClusterUnreachable: cluster jfk: no broker answers",
            "cluster jfk: no broker answers",
        ),
        (
            "ModuleNotFoundError: No module named 'pyroaring'",
            "A worker of Spark's lacks the Python package pyroaring: install millrace's dependencies for",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than in driver: 3.11.",
            "run another Python than the driver: Python in worker has different version: 3.12",
        ),
        (
            'java.io.IOException: Cannot run program "/no/python": error=2, No such file or directory',
            "workers cannot start /no/python",
        ),
        (
            "org.apache.kafka.common.errors.SaslAuthenticationException: Authentication failed",
            "Spark's Kafka connector was refused: Authentication failed",
        ),
        (
            "java.lang.IllegalStateException: Cannot fetch offset 0 (GroupId: x, TopicPartition: t-0).",
            "offsets vanished between their pinning",
        ),
        (
            "org.apache.kafka.common.KafkaException: Failed to create new KafkaAdminClient\n\tat a.b\n"
            "Caused by: org.apache.kafka.common.KafkaException: Failed to create new NetworkClient\n\tat d\n"
            "Caused by: java.io.IOException: expecting the object identifier for AES cipher\n\tat e",
            "could not be set up: IOException: expecting the object identifier for AES cipher",
        ),
        (
            "SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file "
            "file:///state/cells/1/a.parquet.  SQLSTATE: KD001\n\tat d",
            "file:///state/cells/1/a.parquet cannot be read",
        ),
        (
            "[PATH_NOT_FOUND] Path does not exist: file:/state/cells/1/a.parquet. SQLSTATE: 42K03",
            "do not find file:/state/cells/1/a.parquet: the state must lie",
        ),
    ],
)
def test_expected_failures(said, line):
    found = one_line(RuntimeError(TRACE.format(said)))
    assert found is not None and line in found and "\n" not in found


def test_a_defect_keeps_its_trace():
    assert one_line(RuntimeError(TRACE.format("ZeroDivisionError: division by zero"))) is None


def test_cells_that_the_driver_does_not_find_are_not_taken_for_a_loss(tmp_path):
    pq.write_table(pa.table({"n": [1, 2, 3]}), tmp_path / "part.parquet")
    require_shared("state", 3, rows_in([tmp_path / "part.parquet"]))
    require_shared("state", 0, rows_in([]))
    for files in ([], [tmp_path / "part.parquet"]):
        with pytest.raises(ConfigError, match="every executor shares with the driver: 5 rows"):
            require_shared("state", 5, rows_in(files))


LOST = "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.7 executor 1): "
CURE = ": install millrace's dependencies anew for its Python, or send them along (millrace audit package); "


def trace_of(said: str, *frames: str) -> str:
    """What Spark tells of a task that raised this, below these frames ("file|function")."""
    told = [f'  File "{place}", line 7, in {where}' for place, where in (each.split("|") for each in frames)]
    trace = TRACE.format("\n".join([*told, said]))
    return f"Task 0 in stage 0.0 failed 4 times, most recent failure: {LOST}{trace}"


SITE = "/opt/venv/lib/python3.11/site-packages"
READER = "/home/spark/.cache/millrace-7/0123/audit/spark/task_reader.py"


@pytest.mark.parametrize(
    ("frames", "said", "told"),
    [
        (
            (f"{READER}|<module>", f"{SITE}/crc32c/__init__.py|<module>"),
            f"ImportError: {SITE}/crc32c/_crc32c.so: undefined symbol: PyUnicode_New",
            f"crc32c (ImportError: {SITE}/crc32c/_crc32c.so: undefined symbol: PyUnicode_New)",
        ),
        (
            (
                f"{READER}|<module>",
                f"{SITE}/numba/__init__.py|<module>",
                f"{SITE}/llvmlite/binding/ffi.py|load",
            ),
            "OSError: Could not find/load shared object file: libllvmlite.so",
            "llvmlite (OSError: Could not find/load shared object file: libllvmlite.so)",
        ),
        (
            (f"{READER}|unpack",),
            f"ImportError: {SITE}/cramjam.abi3.so: cannot open shared object file: No such file or directory",
            f"cramjam (ImportError: {SITE}/cramjam.abi3.so: cannot open shared object file: No such",
        ),
        (
            (f"{READER}|<module>",),
            "ImportError: cannot import name 'njit' from 'numba' (unknown location)",
            "numba (ImportError: cannot import name 'njit' from 'numba' (unknown location))",
        ),
        (
            (f"{SITE}/pyspark/worker.py|main", f"{SITE}/numpy/__init__.py|<module>"),
            "ImportError: \n\nIMPORTANT: PLEASE READ THIS\n\nOriginal error was: libopenblas.so.0: none",
            "numpy (ImportError: libopenblas.so.0: none)",
        ),
    ],
)
def test_a_library_that_is_there_and_cannot_be_loaded_is_named_with_its_worker(frames, said, told):
    found = one_line(RuntimeError(trace_of(said, *frames)))
    assert found is not None and "\n" not in found
    assert found.startswith(f"Spark's worker 10.0.0.7 cannot load the Python package {told}")
    assert CURE in found


def test_one_that_is_not_there_is_named_with_its_worker():
    found = one_line(trace_of("ModuleNotFoundError: No module named 'numba'", f"{READER}|<module>"))
    assert found is not None and found.startswith("Spark's worker 10.0.0.7 lacks the Python package numba: ")


def test_an_error_of_a_disk_or_a_socket_is_no_librarys():
    for frames in ((f"{READER}|read",), (f"{SITE}/pyarrow/fs.py|open_input", f"{READER}|read")):
        assert one_line(trace_of("OSError: [Errno 5] Input/output error", *frames)) is None
