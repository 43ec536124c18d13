# Millrace. `make demo` and `make test` work on a bare Debian or Ubuntu with Python 3.11+: what is missing is set
# up once (deploy/bootstrap.sh) and again when pyproject.toml or constraints.txt change.
#
#   make demo [ARGS="--lose 7 --duplicate 3 --seed 42"]      make lint      make clean
#   make test [ARGS="tests/unit -k offsets"]                 make bench [ARGS="--gb 10"]
#
# PYTHON=/path/to/python3 chooses the interpreter that .venv is made with.

ARGS ?=
export PYTHON

BIN := .venv/bin
SET_UP_INPUTS := pyproject.toml constraints.txt deploy/bootstrap.sh
TYPECHECK := .typecheck
PARTS := broker mirror audit deploy

.PHONY: help setup setup-test demo test lint bench clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: .venv/.ready-demo
setup-test: .venv/.ready-test

.venv/.ready-demo: $(SET_UP_INPUTS)
	@./deploy/bootstrap.sh demo
	@touch $@

.venv/.ready-test: $(SET_UP_INPUTS)
	@./deploy/bootstrap.sh test
	@touch $@

demo: .venv/.ready-demo
	@$(BIN)/millrace demo $(ARGS)

test: .venv/.ready-test
	$(BIN)/python -m pytest $(ARGS)

# mypy reads the packages through a folder of links, because `broker/` is imported as `millrace.broker`.
lint: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPECHECK) && mkdir -p $(TYPECHECK)/millrace
	@for part in $(PARTS); do ln -s ../../$$part $(TYPECHECK)/millrace/$$part; done
	MYPYPATH=$(TYPECHECK) $(BIN)/mypy $(PARTS:%=-p millrace.%)
	$(BIN)/lint-imports

bench: .venv/.ready-test
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

clean:
	rm -rf .venv .typecheck .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build
	rm -rf demo-report millrace.egg-info
	find . -name __pycache__ -type d -not -path './.peers/*' -prune -exec rm -rf {} +
