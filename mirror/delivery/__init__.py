"""The way to the target: lanes, transactions, positions, and the commit rules."""
