# All commands for development and CI. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# Container images often set it; every process would then compile two thousand modules again, 6 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Print every target with a line
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v git >/dev/null || { echo "git is needed: install it first"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Python 3.11 is needed: set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet -c constraints.txt -e '.[dev,s3,tensorboard]'
	@touch $@

.PHONY: install
install: $(VENV)/.installed ## Create .venv and install everything, pinned

RUN ?= demo
CONFIG ?= configs/demo.yaml

.PHONY: demo
demo: install ## Train a tiny model to spell words backward, and show how it learned
	$(BIN)/marin-rl run $(CONFIG) --run-id $(RUN)

# Two processes, a file of tests at a time: its fixtures are made once.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: install ## Install and run the default tests (2 cores, no network)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

.PHONY: test-slow
test-slow: install ## Run the tests marked slow (kills, real server and worker, demo)
	$(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE)

# A process that starts on one core, as on a machine with one core. No test of a mesh there.
ONE_CORE := $(BIN)/python -c 'import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'
TWO_DEVICES := --xla_force_host_platform_device_count=2
BITS := -m pytest -m 'bits and not slow'
PROGRAMS := $(CURDIR)/.pytest_cache/d/marin-rl-programs

.PHONY: test-isa
test-isa: install ## Run the tests that compare bits with AVX2, with SSE4.2 and on one core
	XLA_FLAGS="$(TWO_DEVICES) --xla_cpu_max_isa=AVX2" MARIN_RL_TEST_PROGRAMS=$(PROGRAMS)-avx2 $(BIN)/python $(BITS) $(SIDE_BY_SIDE)
	XLA_FLAGS="$(TWO_DEVICES) --xla_cpu_max_isa=SSE4_2" MARIN_RL_TEST_PROGRAMS=$(PROGRAMS)-sse4_2 $(BIN)/python $(BITS) $(SIDE_BY_SIDE)
	XLA_FLAGS="--xla_force_host_platform_device_count=1" MARIN_RL_TEST_PROGRAMS=$(PROGRAMS)-one-core $(ONE_CORE) $(BITS)

.PHONY: check
check: install ## ruff, pyright and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

.PHONY: format
format: install ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: install ## Write the generated pages of docs/ again
	$(BIN)/marin-rl config reference > docs/configuration.md
	$(BIN)/marin-rl config metrics > docs/metrics.md

.PHONY: up
up: install ## Start a local Prefect server, a worker and the deployments
	$(BIN)/python -m flows.stack up

.PHONY: down
down: install ## End what `make up` started
	$(BIN)/python -m flows.stack down

.PHONY: bench
bench: install ## Measure a round against TRL side by side (installs TRL in its own venv)
	$(BIN)/python bench/round.py --install-peers

.PHONY: clean
clean: ## Remove the virtual environment and caches, never a run
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
