"""Proofs of the audit at size: whole runs whose truth is known, a table at their end (tests/README.md)."""
