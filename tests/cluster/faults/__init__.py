"""The fault run: three real brokers and a real ZooKeeper under random faults and a numbered load.

`python -m tests.cluster.faults --rounds 5 --seed 7` (or `make faults`) runs it; `test_fault_rounds.py` does
so in CI. `rounds.py` is the story of a round; `network.py` and `proxies.py` what can be cut, `cluster.py`
the servers, `plan.py` the faults of a seed, `faults.py` their doing, `load.py` with `producers.py`,
`transactions.py` and `consumers.py` who uses the cluster meanwhile, `evidence.py` what is found afterwards,
and `checks.py` the pure judgement of it.
"""
