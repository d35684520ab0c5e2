# Everything needs only python3 and a C++ compiler; each target sets up .venv by itself.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-test
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
CPP_SOURCES := $(filter %.cc %.cpp %.h %.hpp %.cu %.cuh,$(NATIVE_SOURCES))
# Two workers: the suite is to finish in 20 minutes on two cores. A part of it: make test PYTEST_ARGS="-k speculation -x"
PYTEST_ARGS ?= -n 2 --dist worksteal
MODEL ?= demo
BENCH_ARGS ?=
SANITIZE_OPTIONS := -DLLMOPT_PYTHON=OFF -DLLMOPT_TESTS=ON

.PHONY: help demo test lint format sanitize bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## generate text with a small real model, check it against model.generate, show both speeds
	$(BIN)/llmopt demo

test: $(TEST_READY) ## run the whole suite, the tests with a real model included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY) ## ruff, mypy --strict and clang-format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES),@true)

format: $(READY) ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP_SOURCES),$(BIN)/clang-format -i $(CPP_SOURCES),@true)

# Only the library and its tests; threads meet in the tests of the thread team and of the decoder.
sanitize: $(READY) ## C++ tests with the address, undefined-behaviour and thread sanitizers (compiles for many minutes)
	$(BIN)/cmake -S csrc -B build/sanitize-address $(SANITIZE_OPTIONS) -DLLMOPT_SANITIZE=address,undefined
	$(BIN)/cmake --build build/sanitize-address --parallel 2
	$(BIN)/ctest --test-dir build/sanitize-address --output-on-failure
	$(BIN)/cmake -S csrc -B build/sanitize-thread $(SANITIZE_OPTIONS) -DLLMOPT_SANITIZE=thread
	$(BIN)/cmake --build build/sanitize-thread --parallel 2 --target llmopt_tests llmopt_decoder_tests
	build/sanitize-thread/tests/llmopt_tests --gtest_filter='*ThreadTeam*:Parallel*'
	build/sanitize-thread/tests/llmopt_decoder_tests

bench: $(READY) ## compare model.generate, the plain pipeline and plugins (MODEL=..., BENCH_ARGS="--quick")
	$(BIN)/llmopt bench $(MODEL) $(BENCH_ARGS)

clean: ## remove the environment, builds and caches (the model cache in the home folder stays)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: a half-made environment is completed by the next call. It is also older than any changed
# C++ source, so the compiled core follows the tree. Without build isolation a rebuild compiles only what changed.
$(READY): pyproject.toml constraints.txt llmopt/version.py $(NATIVE_SOURCES)
	@echo "setting up $(VENV): takes minutes the first time, seconds afterwards"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(PIP_INSTALL) scikit-build-core nanobind cmake ninja
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

$(TEST_READY): $(READY) # the evaluation harness brings much along, so only the tests pay for it
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,eval]'
	@touch $@
