"""Every mutant, in the order in which they are tried."""

from __future__ import annotations

from tests.mutants.of_audit import OF_AUDIT
from tests.mutants.of_audit_clients import OF_AUDIT_CLIENTS
from tests.mutants.of_audit_keeping import OF_AUDIT_KEEPING
from tests.mutants.of_audit_ledger import OF_AUDIT_LEDGER
from tests.mutants.of_audit_outcome import OF_AUDIT_OUTCOME
from tests.mutants.of_audit_runs import OF_AUDIT_RUNS
from tests.mutants.of_broker import OF_BROKER
from tests.mutants.of_mirror import OF_MIRROR
from tests.mutants.of_mirror_logs import OF_MIRROR_LOGS
from tests.mutants.of_operation import OF_OPERATION

MUTANTS = (
    *OF_BROKER,
    *OF_OPERATION,
    *OF_MIRROR,
    *OF_MIRROR_LOGS,
    *OF_AUDIT,
    *OF_AUDIT_CLIENTS,
    *OF_AUDIT_KEEPING,
    *OF_AUDIT_LEDGER,
    *OF_AUDIT_OUTCOME,
    *OF_AUDIT_RUNS,
)
