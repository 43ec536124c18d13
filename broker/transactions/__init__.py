"""Transactions: who may write under a transactional id, and how a transaction ends everywhere."""
