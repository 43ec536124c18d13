"""What a settled row says of every record, as a digest that a later run compares. Pure.

Made where the row is made, in Spark's workers (`verdict_rows`), so that who numbers revisions (`settled`)
compares strings. Must stay as it is, byte for byte: the state keeps it, and another digest would number every
window of every state anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from millrace.audit.reconciliation.verdicts import WindowVerdict

_NOT_COMPARED = ("reasons", "append_ms", "not_before_ms", "silent_from_ms", "unpromised", "shared")


def said_of(verdict: WindowVerdict, detail: Mapping[str, Any]) -> str:
    """Equal for rows that say the same of every record, by name; reasons, times and the places where lost
    ones were last had may differ. `detail` is the row's, before it is JSON."""
    told = {name: value for name, value in detail.items() if name not in _NOT_COMPARED}
    if "missing" in told:
        told["missing"] = [
            {name: value for name, value in lost.items() if name != "places"} for lost in told["missing"]
        ]
    counts = sorted((tier, int(count)) for tier, count in verdict.consumed.items())
    said = [str(verdict.verdict), int(verdict.published), int(verdict.ambiguous), counts, told]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=12).hexdigest()
