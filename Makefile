# Everything is made from nothing by these targets; each says what it does. Options: make TARGET NAME=value.
ENGINES ?= fsdp:d1|hf:d1
MODEL ?=
PYTHON ?= python3
# Address of a package index with CPU builds of torch, for machines whose pip is not set up with one.
TORCH_INDEX ?=
ARGS ?=
# Processes that run tests side by side.
JOBS ?= 2

# A row of requirements/environments.txt, for `make env`.
ENVIRONMENT ?= dev

ENVIRONMENTS := $(shell sed -n 's/^\([a-z][a-z0-9-]*\) *|.*/\1/p' requirements/environments.txt)
# The demo runs in the environment that has the name of one of its engines, else in dev.
DEMO := $(firstword $(foreach name,$(ENVIRONMENTS),$(if $(findstring $(name):,$(ENGINES)),$(name))) dev)

VENV := .venvs/dev
STAMP := $(VENV)/.made
STARTED := $(shell date +%s)

.PHONY: help env constraints demo demo-gpu test lint docs reference bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

env: .venvs/$(ENVIRONMENT)/.made ## Make a virtual environment (dev, or ENVIRONMENT=vllm): torch, engines' packages, all dists of this repository

.venvs/%/.made: requirements/environments.txt requirements/%.txt requirements/constraints-%.txt core/pyproject.toml $(wildcard plugins/*/pyproject.toml requirements/*/pyproject.toml) scripts/make_env.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash scripts/make_env.sh $*
	@touch $@

constraints: ## Resolve all environments anew and write requirements/constraints-*.txt
	@TORCH_INDEX="$(TORCH_INDEX)" $(PYTHON) scripts/constraints.py $(ARGS)

demo: .venvs/$(DEMO)/.made ## Train a small language model by GRPO: make demo ENGINES="fsdp:d2|hf:d2" MODEL=folder-or-hub-id ARGS="ppo.steps=5"
	.venvs/$(DEMO)/bin/powertrain run examples/grpo_sums.yaml engines='$(ENGINES)' $(if $(MODEL),model='$(MODEL)') $(ARGS)

demo-gpu: ## The same on one CUDA card with vLLM, 20 steps, in the environment that is active (see docs/backends/vllm.md)
	powertrain run examples/grpo_sums.yaml engines='$(if $(filter command% env%,$(origin ENGINES)),$(ENGINES),fsdp:d1|vllm:d1?gpu_memory_utilization=0.3)' device=cuda dtype=bfloat16 ppo.steps=20 $(if $(MODEL),model='$(MODEL)') $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint $(if $(ARGS),,$(foreach name,$(ENVIRONMENTS),.venvs/$(name)/.made)) ## Lint, type-check and run every test, real engines included; with ARGS, the tests that these pick
	$(VENV)/bin/python $(if $(ARGS),-m pytest $(ARGS),scripts/test.py --started $(STARTED) --jobs $(JOBS))

docs: reference ## Write the reference pages anew and build the site, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

reference: $(STAMP) ## Write the generated pages of docs/reference anew
	$(VENV)/bin/python scripts/reference.py

bench: $(STAMP) ## The committed benchmark of the main job: three seeds and the controls (about an hour on 2 cores)
	$(VENV)/bin/python benchmarks/learning/run.py $(ARGS)

clean: ## Remove what the targets made, the environments included; run folders stay
	rm -rf .venvs site .mypy_cache .ruff_cache .hypothesis
