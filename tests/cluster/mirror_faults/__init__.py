"""The mirror's fault run: two sources, two workers, a target, a numbered load, and faults between them, most
of them random.

`python -m tests.cluster.mirror_faults --events 30 --seed 7 --pair kafka-millrace` (or `make mirror-faults`,
`make soak`) runs it; `test_mirror_faults.py` has three fixed events of it in the gate, and the rest in the
long suite. `run.py` is the story; `plan.py` the events of a seed, `events.py` their doing, `places.py` the
servers and workers, `links.py` what is between them, `load.py` and `audited_load.py` who writes, `witness.py`
who reads the aggregate meanwhile, and `records.py` and `checks.py`, both pure, what was written and the
judgement of what was read; `audited_end.py` has the product audit its part of the load (not in CI), and
`spared_memory.py` judges what a long run leaves of memory. The networks, ZooKeeper and the timeline are those
of the brokers' run (`tests/cluster/faults`).
"""
