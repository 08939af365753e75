# Works on an empty clone: the first target that needs it makes .venv and installs into it.
#   make demo        the demonstration: a real model, plain and drafted
#   make test        the default suite (minutes on two cores, no network)
#   make test-slow   what takes longer
#   make lint        ruff and mypy
#   make bench       the demonstration with more repeats, and what steps cost: figures for docs/LOG.md
# Settings: PYTHON=python3.12   TORCH_VERSION=2.13.0   TORCH_INDEX=<address of PyTorch's wheels>   (see README)

PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.portadraft-ready

export PYTHON VENV TORCH_VERSION TORCH_INDEX

.PHONY: demo test test-slow lint bench clean setup

demo: $(READY)
	@$(BIN)/portadraft demo

test: $(READY)
	@$(BIN)/python -m pytest

test-slow: $(READY)
	@$(BIN)/python -m pytest --slow -m slow

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)
	@$(BIN)/portadraft demo --repeats 5
	@$(BIN)/portadraft bench plain
	@$(BIN)/portadraft bench packed
	@$(BIN)/portadraft bench oracle

setup: $(READY)

$(READY): pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find portadraft tests -name __pycache__ -type d -prune -exec rm -rf {} +
