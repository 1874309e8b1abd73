# `make` lists the targets. Everything is installed into $(VENV).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
MGTP_MODELS ?= .models
export MGTP_MODELS
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FILES := $(VENV)/.files

.PHONY: help venv models demo test soak lint format docs clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## install mgtp and what its tests need into .venv

demo: $(STAMP) ## shard a small model for two processes, chat with it, look at what each process holds
	@PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh

models: $(STAMP) ## fetch the small models that the tests use
	@$(BIN)/python scripts/fetch_models.py --all "$(MGTP_MODELS)"

# Each worker has a world of ranks of its own, so a large machine is not given more of them than pay.
test: models ## run the test suite
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

soak: models ## run the long tests
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[soak]' --config-settings editable_mode=strict
	@$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, pyright, and the shell scripts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python
	@for script in .ci/run scripts/*.sh benchmarks/*.sh; do bash -n "$$script"; done
	@if command -v shellcheck >/dev/null; then shellcheck --severity=warning .ci/run scripts/*.sh benchmarks/*.sh; fi

format: $(STAMP) ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## regenerate docs/cli.md from the commands
	@$(BIN)/python scripts/docs_cli.py

clean: ## remove the environment, builds, caches and demo output (fetched models stay)
	rm -rf "$(VENV)" .demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A strict editable install links every file, so that type checkers and editors can follow `mgtp.*`: it is made again
# when a file is added or removed, which the list in $(FILES) shows (it is rewritten only when it differs).
$(STAMP): pyproject.toml setup.py constraints.txt $(FILES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1 || true), mgtp needs Python 3.11 or later (hint: make PYTHON=python3.11 ...)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a first time takes minutes)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' --config-settings editable_mode=strict
	@touch $@

$(FILES): FORCE
	@mkdir -p $(VENV)
	@find cli runtime shardplan -type f ! -name '*.pyc' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
