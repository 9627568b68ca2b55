# `make run` and `make test` each work alone, first, on a fresh clone: Python 3.10+, git and make.

# The root must not be on sys.path: its folder vllm_omni is not the package vllm_omni.
export PYTHONSAFEPATH = 1
PYTHON ?= python3
VENV_PYTHON = .venv/bin/python
MODEL ?=
PYTEST_ARGS ?=

.PHONY: setup run test test-gpu lint types bench soak

setup:
	@$(PYTHON) tools/setup.py

run: setup
	$(VENV_PYTHON) examples/serve.py $(if $(MODEL),--model $(MODEL))

test: setup lint types
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

test-gpu: setup
	$(VENV_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: setup
	$(VENV_PYTHON) -m ruff check .

types: setup
	$(VENV_PYTHON) -m mypy

bench: setup
	$(VENV_PYTHON) bench/all.py $(if $(QUICK),--quick)

soak: setup
	$(VENV_PYTHON) bench/soak.py
