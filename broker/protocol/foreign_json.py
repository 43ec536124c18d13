"""JSON that others wrote: records of a cluster, answers of servers. Pure.

A thousand brackets are enough for `json.loads` to raise RecursionError, which is no ValueError: one record of
a kilobyte would end whoever reads it.
"""

from __future__ import annotations

import json
from typing import Any


def read_json(text: bytes | str) -> Any:
    """Raises ValueError for whatever is no JSON, or nested deeper than anybody's values are."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
