"""Every mutant, in the order in which they are tried."""

from __future__ import annotations

from tests.mutants.of_audit_cells import OF_AUDIT_CELLS
from tests.mutants.of_audit_clients import OF_AUDIT_CLIENTS
from tests.mutants.of_audit_keeping import OF_AUDIT_KEEPING
from tests.mutants.of_audit_ledger import OF_AUDIT_LEDGER
from tests.mutants.of_audit_outcome import OF_AUDIT_OUTCOME
from tests.mutants.of_audit_reading import OF_AUDIT_READING
from tests.mutants.of_audit_resting import OF_AUDIT_RESTING
from tests.mutants.of_audit_runs import OF_AUDIT_RUNS
from tests.mutants.of_audit_upkeep import OF_AUDIT_UPKEEP
from tests.mutants.of_audit_verdicts import OF_AUDIT_VERDICTS
from tests.mutants.of_coordination import OF_COORDINATION
from tests.mutants.of_coordinators import OF_COORDINATORS
from tests.mutants.of_mirror_batches import OF_MIRROR_BATCHES
from tests.mutants.of_mirror_delivery import OF_MIRROR_DELIVERY
from tests.mutants.of_mirror_fetching import OF_MIRROR_FETCHING
from tests.mutants.of_mirror_logs import OF_MIRROR_LOGS
from tests.mutants.of_mirror_offsets import OF_MIRROR_OFFSETS
from tests.mutants.of_mirror_routes import OF_MIRROR_ROUTES
from tests.mutants.of_mirror_workers import OF_MIRROR_WORKERS
from tests.mutants.of_operation import OF_OPERATION
from tests.mutants.of_replication import OF_REPLICATION
from tests.mutants.of_requests import OF_REQUESTS
from tests.mutants.of_storage import OF_STORAGE

MUTANTS = (
    *OF_REPLICATION,
    *OF_STORAGE,
    *OF_COORDINATION,
    *OF_COORDINATORS,
    *OF_REQUESTS,
    *OF_OPERATION,
    *OF_MIRROR_BATCHES,
    *OF_MIRROR_FETCHING,
    *OF_MIRROR_LOGS,
    *OF_MIRROR_DELIVERY,
    *OF_MIRROR_WORKERS,
    *OF_MIRROR_ROUTES,
    *OF_MIRROR_OFFSETS,
    *OF_AUDIT_READING,
    *OF_AUDIT_CELLS,
    *OF_AUDIT_VERDICTS,
    *OF_AUDIT_CLIENTS,
    *OF_AUDIT_KEEPING,
    *OF_AUDIT_UPKEEP,
    *OF_AUDIT_RESTING,
    *OF_AUDIT_LEDGER,
    *OF_AUDIT_OUTCOME,
    *OF_AUDIT_RUNS,
)
