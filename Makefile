# Everything is made from nothing by these targets; each says what it does. Options: make TARGET NAME=value.
ENGINES ?= fsdp:d1|hf:d1
MODEL ?=
PYTHON ?= python3
# Address of a package index with CPU builds of torch, for machines whose pip is not set up with one.
TORCH_INDEX ?=
ARGS ?=

VENV := .venvs/dev
STAMP := $(VENV)/.made
POWERTRAIN := $(VENV)/bin/powertrain

.PHONY: help env demo test lint bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

env: $(STAMP) ## Make the virtual environment (.venvs/dev): torch, engines' packages, all dists of this repository

$(STAMP): requirements/dev.txt requirements/constraints.txt core/pyproject.toml $(wildcard plugins/*/pyproject.toml) scripts/make_env.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash scripts/make_env.sh $(VENV)
	@touch $@

demo: $(STAMP) ## Train a small language model by GRPO: make demo ENGINES="fsdp:d2|hf:d2" MODEL=folder-or-hub-id
	$(POWERTRAIN) run examples/grpo_sums.yaml engines='$(ENGINES)' $(if $(MODEL),model='$(MODEL)') $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint ## Lint, type-check and run every test, real engines included
	$(VENV)/bin/python -m pytest $(ARGS)

bench: $(STAMP) ## The committed benchmark of the main job: three seeds and the controls (about an hour on 2 cores)
	$(VENV)/bin/python benchmarks/learning/run.py $(ARGS)

clean: ## Remove what the targets made, the environments included; run folders stay
	rm -rf .venvs .mypy_cache .ruff_cache .hypothesis
