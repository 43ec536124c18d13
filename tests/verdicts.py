"""The one word for a table of verdicts, which the summary folds row by row as it writes them."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.audit.reconciliation.verdicts import Fold, Verdict, WindowVerdict


def overall_verdict(rows: Iterable[WindowVerdict], untrusted: bool = False) -> Verdict:
    fold = Fold()
    for row in rows:
        fold.add(row.verdict, row.state)
    return fold.verdict(untrusted)
