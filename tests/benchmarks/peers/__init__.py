"""The paper's experiment against other brokers: servers, loads, and `bench_peers.py`, which runs them."""
