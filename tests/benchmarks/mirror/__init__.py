"""`make bench-mirror` and the mirror's memory: see `bench_mirror.py` and `memory.py`."""
