# Millrace. `make demo` and `make test` work on a bare Debian or Ubuntu with Python 3.11+: what is missing is set
# up once (deploy/bootstrap.sh) and again when pyproject.toml or constraints.txt change.
#
#   make demo [ARGS="--lose 7 --duplicate 3 --seed 42"]      make lint      make clean
#   make test [ARGS="tests/unit -k offsets"]: the gate        make bench [ARGS="--gb 10"]
#   make test-long [ONLY=pairs,faults,soak,hunt] [MINUTES=60] [RUNS=2000] [ROUNDS=20] [SEED=7] [PROCESSES=2]: all that
#     is random, long or a matrix, with a table at the end (tests/README.md)
#   make test-wire [ARGS="-k groups"]: foreign clients, the same against Apache Kafka and Millrace
#   make test-pairs [ARGS="-k gaps"]: the mirror's scenarios between all four pairs of Millrace and Apache Kafka
#   make fuzz [RUNS=1000000] [SEED=7]
#   make test-hdfs: the audit's state on a real HDFS         make test-yarn: the audit on a real YARN
#   make test-older-kafka: the mirror from and to an Apache Kafka of before topic ids
#   make simulate [RUNS=2000] [SEED=1]                       make bench-peers [ARGS="--only produce"]
#   make bench-mirror [ARGS=--short]: beside MirrorMaker 2    make bench-mirror-memory [ARGS="--gb 20"]
#     (ARGS="--small --short": batches of 1 to 500 records alone; ARGS="--vary batches.coalesce_bytes=32768,131072": ours by a setting)
#   make bench-restart: start-up with 1,000 partitions and 20 GB
#   make faults [ROUNDS=20] [SEED=1]                         make mirror-faults [EVENTS=30] [SEED=1] [PAIR=kafka-kafka]
#   make bench-audit [ARGS=--short]: beside Spark's Kafka connector     make bench-producer: beside plain confluent-kafka
#   make bench-audit-batches: what a record costs the audit's reader in batches of 1 to 500
#   make bench-audit-job [ARGS="--records 100M --lose 2"]: producers' word, a mirror and the whole audit of so many records
#   make bench-audit-cells: what cells of one record cost, in columns and one by one
#   make bench-audit-repeats: what a stream costs whose records all came twice
#   make bench-audit-rows, bench-audit-events: what a verdict row, and a producer's event, costs the audit's driver
#   make audit-mutations [RUNS=1000] [SEED=1]: random histories whose truth is known
#   [MILLRACE_E2E_KAFKA=ewr,agg] make audit-end-to-end [RUNS=20]: the same through real producers, brokers, a mirror and Spark
#   make audit-month [DAYS=3] [RECORDS=20000] [SEED=1]: thirty days of a million records, audited daily
#   make audit-hundred-million [RECORDS=1M] [SEED=1] [ARGS="--skewed"]: hashed over 64 partitions, in one run
#   make audit-billion [ARGS="--producers 100 --hours 6"] [SEED=1]: the metadata of a billion records a day
#   make audit-cluster [RECORDS=20k] [SEED=1] [ARGS="--steps workers"]: Spark's servers and HDFS apart, killed in turn
#   make soak [MINUTES=60] [SEED=…] [PAIR=…]: mirror-faults for long, with a table
#   make test-mutants [ARGS="--list"]: rules that protect data taken out one by one, and which test is red without each
#
# PYTHON=/path/to/python3 chooses the interpreter that .venv is made with.

ARGS ?=
RUNS ?= 2000
ROUNDS ?= 20
EVENTS ?= 30
MINUTES ?= 60
PAIR ?= millrace-millrace
DAYS ?= 30
RECORDS ?=
SEED ?= 1
ONLY ?=
PROCESSES ?=
export PYTHON
# Each of the hundreds of processes that tests start would compile all of its modules: seconds in place of half of one.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
SET_UP_INPUTS := pyproject.toml constraints.txt deploy/bootstrap.sh
TYPECHECK := .typecheck
PARTS := broker mirror audit deploy

.PHONY: help setup setup-test setup-peers demo test test-long test-wire test-pairs test-mutants test-hdfs test-yarn test-older-kafka lint simulate fuzz bench bench-peers faults \
	mirror-faults soak bench-mirror bench-mirror-memory bench-restart bench-audit bench-audit-batches bench-audit-cells bench-audit-repeats bench-audit-rows bench-audit-events bench-audit-job bench-producer audit-mutations audit-end-to-end \
	audit-month audit-hundred-million audit-billion audit-cluster clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: .venv/.ready-demo
setup-test: .venv/.ready-test
setup-peers: .venv/.ready-peers

.venv/.ready-demo: $(SET_UP_INPUTS)
	@./deploy/bootstrap.sh demo
	@touch $@

.venv/.ready-test: $(SET_UP_INPUTS)
	@./deploy/bootstrap.sh test
	@touch $@

.venv/.ready-peers: .venv/.ready-test
	@./deploy/bootstrap.sh peers
	@touch $@

demo: .venv/.ready-demo
	@$(BIN)/millrace demo $(ARGS)

test: .venv/.ready-test
	$(BIN)/python -m $(if $(ARGS),pytest $(ARGS),tests.suite)

# A setting that nobody gave is left to the part that it is for.
given = $(if $(filter file,$(origin $(1))),,--$(2) $($(1)))
test-long: .venv/.ready-test
	$(BIN)/python -m tests.long_suite $(if $(ONLY),--only $(ONLY)) $(call given,MINUTES,minutes) \
		$(call given,RUNS,runs) $(call given,ROUNDS,rounds) $(call given,SEED,seed) \
		$(if $(PROCESSES),--processes $(PROCESSES))

# Against Millrace and Apache Kafka; MILLRACE_WIRE_SERVERS=kafka (or millrace) runs against one of the two alone.
test-wire: .venv/.ready-test
	MILLRACE_WIRE_SERVERS=$${MILLRACE_WIRE_SERVERS:-millrace,kafka} $(BIN)/python -m pytest tests/wire $(ARGS)

# Each scenario runs in one pair in `make test`; here in all four.
test-pairs: .venv/.ready-test
	MILLRACE_PAIRS=all $(BIN)/python -m pytest -m pairs $(ARGS)

# In a copy of the source, some five minutes; --only name,name takes some of them.
test-mutants: .venv/.ready-test
	$(BIN)/python -m tests.mutants $(ARGS)

# mypy reads the packages through a folder of links, because `broker/` is imported as `millrace.broker`; and the
# benchmarks and proofs, which nothing runs but a hand, and which would fall behind unseen.
lint: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@[ ! -s tests/unsteady.txt ] || { echo "tests/unsteady.txt lists tests whose outcome depends on luck:"; \
		cat tests/unsteady.txt; echo "mend each or mark it unstable (tests/README.md), and empty the file"; exit 1; }
	@rm -rf $(TYPECHECK) && mkdir -p $(TYPECHECK)/millrace
	@for part in $(PARTS); do ln -s ../../$$part $(TYPECHECK)/millrace/$$part; done
	MYPYPATH=$(TYPECHECK):. $(BIN)/mypy $(PARTS:%=-p millrace.%) -p tests.benchmarks -p tests.proofs
	$(BIN)/lint-imports

bench: .venv/.ready-test
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

# Needs RabbitMQ and ActiveMQ, which nothing else here does: they are set up the first time.
bench-peers: .venv/.ready-peers
	$(BIN)/python -m tests.benchmarks.peers.bench_peers $(ARGS)

# Beside MirrorMaker 2, between Apache Kafka's brokers and between ours: --short takes some ten minutes, all of it more than an hour.
bench-mirror: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.mirror.bench_mirror $(ARGS)

# Start-up with a thousand partitions and 20 GB, after a clean stop and after SIGKILL; needs 31 GB of disk.
bench-restart: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.bench_restart $(ARGS)

bench-mirror-memory: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.mirror.memory $(ARGS)

# Beside the same count through Spark's Kafka connector: --short takes some ten minutes; --records 100M, --scale.
bench-audit: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_audit $(ARGS)

bench-audit-job: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_job $(ARGS)

bench-audit-batches: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_batches $(ARGS)

# Cells of one record, made and added up in columns and one by one; a minute, on one core, without brokers.
bench-audit-cells: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_cells $(ARGS)

# A stream of which every record came twice, counted and reconciled; some minutes, on one core.
bench-audit-repeats: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_repeats $(ARGS)

# A day of proven windows, as the driver sees them after reconciliation; half a minute, on one core.
bench-audit-rows: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_rows $(ARGS)

# Producers' reports as the driver learns, keeps and knows them again; half a minute, on one core.
bench-audit-events: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_events $(ARGS)

bench-producer: .venv/.ready-test
	$(BIN)/python -m tests.benchmarks.audit.bench_producer $(ARGS)

# The audit's state on a real HDFS, which Maven fetches the first time (56 MB).
test-hdfs: .venv/.ready-test
	$(BIN)/python -m pytest -m "" tests/spark/test_state_on_hdfs.py $(ARGS)

# The audit on a real YARN: the same jar, and 12 MB more.
test-yarn: .venv/.ready-test
	$(BIN)/python -m pytest -m "" tests/spark/test_yarn.py $(ARGS)

# The mirror between an older Apache Kafka, which Maven fetches the first time (30 MB), and those of today.
test-older-kafka: .venv/.ready-test
	$(BIN)/python -m pytest -m "" tests/cluster/test_mirror_older_kafka.py $(ARGS)

audit-mutations: .venv/.ready-test
	MILLRACE_AUDIT_RUNS=$(if $(filter file,$(origin RUNS)),1000,$(RUNS)) \
		$(if $(filter file,$(origin SEED)),,MILLRACE_AUDIT_SEED_START=$(SEED)) \
		$(BIN)/python -m pytest -q -s tests/simulation/test_audit_mutations.py

audit-end-to-end: .venv/.ready-test
	MILLRACE_E2E_RUNS=$(if $(filter file,$(origin RUNS)),20,$(RUNS)) \
		$(BIN)/python -m pytest -q -s -m "" tests/spark/test_end_to_end.py

simulate: .venv/.ready-test
	MILLRACE_SIMULATE_RUNS=$(RUNS) MILLRACE_SIMULATE_SEED=$(SEED) \
		$(BIN)/python -m pytest -q -x tests/simulation/test_cluster_histories.py

# Proofs at size (tests/README.md); a seed that nobody gave is drawn and printed.
PROOF = $(if $(RECORDS),--records $(RECORDS)) $(call given,SEED,seed) $(ARGS)
audit-month: .venv/.ready-test
	$(BIN)/python -m tests.proofs.month --days $(DAYS) $(PROOF)

audit-hundred-million: .venv/.ready-test
	$(BIN)/python -m tests.proofs.hundred_million $(PROOF)

audit-billion: .venv/.ready-test
	$(BIN)/python -m tests.proofs.billion_metadata $(call given,SEED,seed) $(ARGS)

# HDFS comes by Maven the first time (56 MB); as root Spark's servers have networks and users of their own.
audit-cluster: .venv/.ready-test
	$(BIN)/python -m tests.proofs.real_cluster $(PROOF)

# Random and mutated frames at a broker, in process and over sockets; prints the seed it can be run again with.
fuzz: .venv/.ready-test
	$(BIN)/python -m tests.fuzz --runs $(if $(filter file,$(origin RUNS)),1000000,$(RUNS)) \
		$(if $(filter file,$(origin SEED)),,--seed $(SEED))

# Real brokers, real faults. As root (or where users may have namespaces) networks are cut and a disk runs full.
faults: .venv/.ready-test
	$(BIN)/python -m tests.cluster.faults --rounds $(ROUNDS) --seed $(SEED)

# The mirror's: two sources, two workers, a target; the same namespaces, or proxies where there are none.
mirror-faults: .venv/.ready-test
	$(BIN)/python -m tests.cluster.mirror_faults --events $(EVENTS) --seed $(SEED) --pair $(PAIR) $(ARGS)

soak: .venv/.ready-test
	$(BIN)/python -m tests.cluster.mirror_faults --minutes $(MINUTES) --pair $(PAIR) \
		$(if $(filter file,$(origin SEED)),,--seed $(SEED)) $(ARGS)

clean:
	rm -rf .venv .typecheck .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build
	rm -rf demo-report millrace.egg-info
	find . -name __pycache__ -type d -not -path './.peers/*' -prune -exec rm -rf {} +
