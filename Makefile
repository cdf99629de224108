# Thresher's commands. `make demo` and `make test` set everything up themselves; `make help` lists the rest.
PY := .venv/bin/python
MARKED := ray or vllm or sandbox or slow

.PHONY: help setup demo test unit marked exhaustive faults lint format lock clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## virtual environment, locked dependencies, tmux, bubblewrap, small weights (runs by itself when needed)
	@bash scripts/setup.sh

demo: setup ## harvest, SFT, asynchronous RLOO and evaluation with the tiny policy, on this machine
	$(PY) -m recipes.demo $(ARGS)

test: lint unit marked ## everything CI runs: lint, then the quick tests, then those that start real services

unit: setup ## the quick tests alone (about a minute on two cores)
	$(PY) -m pytest -q -n auto -m "not ($(MARKED) or exhaustive or gpu)" $(ARGS)

marked: setup ## tests with real vLLM, Ray, sandboxes and gloo; those with both vLLM and Ray one after the other
	$(PY) -m pytest -q -n 2 --dist loadfile --durations=20 -m "($(MARKED)) and not (ray and vllm) and not (exhaustive or gpu)" $(ARGS)
	$(PY) -m pytest -q --durations=20 -m "ray and vllm and not (exhaustive or gpu)" $(ARGS)

exhaustive: setup ## tests of further combinations that take minutes each
	$(PY) -m pytest -q -m exhaustive $(ARGS)

faults: setup ## kills every part of a run at random moments; about half an hour
	$(PY) -m tests.faults.matrix --out benchmarks/results/faults.json $(ARGS)
	$(PY) -m tests.faults.servers --out benchmarks/results/server_kills.json

lint: setup ## ruff, pyright and the layer contracts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports

format: setup ## apply ruff's fixes and formatting
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

lock: setup ## resolve requirements/cpu.lock and requirements/gpu.lock again from pyproject.toml
	@bash scripts/lock.sh

clean: ## remove the virtual environment, runs and caches
	rm -rf .venv runs .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
