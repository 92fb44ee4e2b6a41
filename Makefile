# Every target does its own set-up: a virtual environment in .venv with the pinned packages (constraints.txt).
# Needs git, make, Python >= 3.11 and a package index. PYTHON=/path/to/python picks an interpreter (test-gpu runs in it as it is);
# QUINTET_TORCH=cpu|cuda overrides the choice of torch (tools/bootstrap.py says how it is made).

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Containers set it, and then every process of every test compiles torch anew: the environments below are ours to write to.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo quick test test-slow test-vllm test-nightly test-gpu lint bench-laptop lock lock-trl clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.quintet-stamp
FIND_PYTHON := for p in $(PYTHON) python3 python3.11 python3.12 python3.13 python3.14 python; do \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; exit 0; }; done; \
	echo "error: no Python >= 3.11 found (tried $(PYTHON) python3, python3.11 ... python3.14). Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1
BOOTSTRAP = python=$$($(FIND_PYTHON)) && "$$python" tools/bootstrap.py

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv with the pinned packages

$(STAMP): constraints.txt pyproject.toml tools/bootstrap.py
	@$(BOOTSTRAP) --venv $(VENV) && touch $@

demo: $(STAMP)  ## a small model learns to add by reinforcement (1 to 2 minutes on two cores)
	@$(BIN)/quintet train recipes/laptop_demo.yaml $(ARGS)

# Rooms whose tests start neither ranks nor Ray, but for what makes models, plans giants, or waits for processes.
QUICK := algorithms cli data models observe packing plan recipe rewards runs train
SLOWER := plan/test_memory.py plan/test_seconds.py cli/test_plan.py rewards/test_pool.py
quick: $(STAMP)  ## the tests of the rooms without engine (under a minute on two cores); ARGS as for test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --hypothesis-profile quick $(addprefix tests/,$(QUICK)) tests/test_errors.py tests/test_size.py \
	  tests/test_typed.py $(addprefix --ignore=tests/,$(SLOWER)) $(ARGS)

# Three test processes for two cores: many tests wait more than they compute. ARGS="-n 0" runs them in one.
test: $(STAMP)  ## the tests (5 to 6 minutes on two cores); ARGS="-k name" is handed to pytest
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 $(ARGS)

# 5 is pytest's exit code for "nothing selected", which is no failure here.
test-slow: $(STAMP)  ## the tests that take minutes each and guard most (about 20 minutes on two cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 -m "slow and not nightly" -o timeout=1200 $(ARGS) || [ $$? -eq 5 ]

# Its versions of torch and transformers are those that vLLM for CPU was built for, so it has an environment of its own.
OF_VLLM := vllm and not nightly
test-vllm:  ## the tests with real vLLM, on CPU, in .venv-vllm (5 to 6 minutes on two cores)
	@export QUINTET_TORCH=cpu; $(BOOTSTRAP) --venv .venv-vllm --constraints tests/vllm-constraints.txt -- --no-deps -r tests/vllm-constraints.txt -e .
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n 3 -m "$(OF_VLLM)" -o timeout=600 $(ARGS)

# What each part of the nightly tests runs; "rest" is all that no other part does without vLLM.
PARTS := oracle demo saves kills benchmarks rest vllm
OF_oracle := tests/oracle
OF_demo := tests/end_to_end/test_recipes.py
OF_saves := tests/end_to_end/test_resume.py tests/end_to_end/test_damaged_checkpoint.py
OF_kills := tests/security/test_kills.py
OF_benchmarks := tests/test_benchmarks.py $(wildcard tests/test_*_benchmark.py)
OF_rest := tests $(foreach part,oracle demo saves kills benchmarks,$(addprefix --ignore ,$(OF_$(part))))
PART := $(PARTS)
test-nightly: $(STAMP)  ## at most 25 minutes a part, on two cores: PART=oracle, demo, saves, kills, benchmarks, rest or vllm (all unless named)
	@failed=; $(foreach part,$(filter-out vllm,$(PART)),echo "=== nightly: $(part)"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(OF_$(part)) -m "nightly and not vllm" -o timeout=7200 $(ARGS) || [ $$? -eq 5 ] || failed="$$failed $(part)";) \
	  $(if $(filter vllm,$(PART)),echo "=== nightly: vllm"; make --no-print-directory test-vllm OF_VLLM="vllm and nightly" || failed="$$failed vllm";) \
	  [ -z "$$failed" ] || { echo "=== failed:$$failed"; exit 1; }

# PYTHON, where named, runs it as it is, with the packages that it has: a GPU machine may reach no package index.
test-gpu: PART := oracle-te oracle-portable kernels steps scheduler vllm kills fp8 engine rollout sync
test-gpu: $(if $(PYTHON),,$(STAMP))  ## on 1 to 4 GPUs, under 9 minutes, vllm more, a part: PART=oracle-te, oracle-portable, kernels, steps, scheduler, vllm, kills, fp8, engine, rollout, sync (all unless named) or sglang
	@$(or $(PYTHON),$(BIN)/python) -m benchmarks.gpu_check --part $(PART) $(ARGS)

lint: $(STAMP)  ## ruff, ruff format, mypy, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench-laptop: $(STAMP)  ## seconds per GRPO step, against TRL on the same work; writes benchmarks/results
	@$(BOOTSTRAP) --venv .venv-trl --constraints benchmarks/trl-constraints.txt -- trl
	@$(BIN)/python -m benchmarks.laptop_grpo $(ARGS)

lock:  ## resolve the newest allowed versions anew and write constraints.txt
	@$(BOOTSTRAP) --venv .venv-lock --lock -- -e '.[dev,wandb]' && rm -rf .venv-lock

lock-trl:  ## the same for the benchmark's TRL environment
	@$(BOOTSTRAP) --venv .venv-lock --lock --constraints benchmarks/trl-constraints.txt -- trl && rm -rf .venv-lock

clean:  ## remove the environments and caches, not the runs
	@rm -rf .venv .venv-vllm .venv-trl .venv-lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
