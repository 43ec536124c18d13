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
        ("ModuleNotFoundError: No module named 'pyroaring'", "workers lack the Python package pyroaring"),
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
            "file:///state/cells/1/a.parquet cannot be read; restore it",
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
