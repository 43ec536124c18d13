"""PySpark warns of libraries that it does not support: none of those that are installed here is one."""

from __future__ import annotations

import warnings

from pyspark.sql.pandas.utils import require_minimum_pandas_version, require_minimum_pyarrow_version


def test_pyspark_warns_of_no_library_that_the_audit_brings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_minimum_pandas_version()
        require_minimum_pyarrow_version()
