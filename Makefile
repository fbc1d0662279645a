SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup parity test lint clean

PYTHON ?=
WORKERS ?= 2
export PYTHON
bin := .venv/bin

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "PYTHON=/path/to/python3.11 chooses the interpreter, WORKERS=N the number of test processes (2)."

setup: ## virtual environment and all requirements, once, into .venv
	@bash scripts/setup.sh

parity: setup ## the parity suite at its smoke profile, with the report table
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(WORKERS) --dist worksteal dsv4/parity --dsv4-profile smoke

test: lint ## everything: lint, types, every test, the parity suite at its ci profile
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(WORKERS) --dist loadfile --dsv4-profile ci

lint: setup ## ruff and mypy
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy

clean: ## remove .venv, caches and builds
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
