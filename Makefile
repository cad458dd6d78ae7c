# Every target sets itself up first, in .venv; once that is done it costs nothing. `make test PYTEST="-k store -x"` passes options on.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python -m
PYTEST ?=

# As many workers as tests/conftest.py says; `make test PYTEST="-n 0 --pdb"` runs in one process
SIDE_BY_SIDE := -n logical --dist worksteal

# Tests start hundreds of processes: each would compile the sources anew if Python might not keep bytecode
unexport PYTHONDONTWRITEBYTECODE

# Workers and the cells that they start share the cores: a thread each, or they wait for each other
test test-slow test-newest: export OMP_NUM_THREADS := 1

# For test-newest: --admitted takes no release that constraints.txt does not admit yet
NEWEST ?=

# The oldest triton of pyproject.toml, beside the installed one: kernels must compile with both
OLDEST_TRITON := $(VENV)/triton-3.6.0

# axe-core, which looks for what readers with a screen reader or a keyboard cannot use: the package carries it as one script
AXE := $(VENV)/axe-core

# What builds the documentation site, in an environment of its own: it reads the source and needs no torch
DOCS_TOOLS := build/docs-tools

.PHONY: help demo test test-slow test-gpu test-newest compile-all oldest-triton axe-core check map docs docs-tools clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       measure a small model on this machine and write report.html"
	@echo "make test       the fast tests                make check    lint, format, types, layers"
	@echo "make test-slow  the slow ones, Slurm too      make test-gpu the tests that need a GPU"
	@echo "make test-newest  mypy and tests with the newest torch and triton of the package index (0.6 GB; no GPU used)"
	@echo "make compile-all  every attention kernel for four GPU architectures, none needed (long)"
	@echo "make oldest-triton  200 MB: lets test-slow compile the kernels with the oldest triton too"
	@echo "make axe-core   0.6 MB: lets test-slow look for accessibility violations on the page too"
	@echo "make map        docs/map.md, a line a file, from the docstrings"
	@echo "make docs       the documentation site, in build/docs; it reads offline (the first time installs 40 MB)"
	@echo "make clean      remove .venv and caches"

$(VENV)/ready: pyproject.toml constraints.txt scripts/setup_venv.py
	@test -n "$(PYTHON)" || { echo "trainstep needs Python 3.11 or newer, and no python3 here is; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup_venv.py $(VENV)
# A fresh clone's index is as old as its files, so that git reads them all each time a cell asks it (0.13 s), until it has looked once
	@git update-index -q --refresh 2>/dev/null || true
	@touch $@

demo: $(VENV)/ready
	$(VENV)/bin/trainstep bench --data stdlib --out runs/demo.jsonl --page report.html

test: $(VENV)/ready
	$(RUN) pytest $(SIDE_BY_SIDE) $(PYTEST)

test-slow: $(VENV)/ready
	TRAINSTEP_OLDEST_TRITON=$(wildcard $(OLDEST_TRITON)) TRAINSTEP_AXE_CORE=$(wildcard $(AXE)) $(RUN) pytest $(SIDE_BY_SIDE) -m "slow and not gpu and not multigpu" $(PYTEST)

test-gpu: $(VENV)/ready
	$(RUN) pytest -m "gpu or multigpu" $(PYTEST)

test-newest: $(VENV)/ready
	$(VENV)/bin/python scripts/newest_releases.py $(VENV) $(NEWEST) $(PYTEST)

compile-all: $(VENV)/ready
	PYTHONPATH=tests $(VENV)/bin/python tests/ops/flash_attention/test_compilation.py

oldest-triton: $(OLDEST_TRITON)

$(OLDEST_TRITON): | $(VENV)/ready
	@rm -rf $@.part
	$(RUN) pip install -q --disable-pip-version-check --no-deps --target $@.part triton==3.6.0
	@mv $@.part $@

axe-core: $(AXE)

$(AXE): | $(VENV)/ready
	@rm -rf $@.part
	$(RUN) pip install -q --disable-pip-version-check --no-deps --target $@.part axe-playwright-python==0.1.8
	@mv $@.part $@

# `make check test` runs the tests of layers once, among the others
check: $(VENV)/ready
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(if $(filter test,$(MAKECMDGOALS)),,$(RUN) pytest -q tests/test_layers.py)

map: $(VENV)/ready
	$(VENV)/bin/python scripts/map.py

docs: $(DOCS_TOOLS)/ready
	$(DOCS_TOOLS)/bin/python scripts/docs_site.py build/docs

docs-tools: $(DOCS_TOOLS)/ready

$(DOCS_TOOLS)/ready: pyproject.toml constraints.txt
	@rm -rf $(DOCS_TOOLS)
	@"$(PYTHON)" -m venv $(DOCS_TOOLS)
	$(DOCS_TOOLS)/bin/python -m pip install -q --disable-pip-version-check --constraint constraints.txt $$("$(PYTHON)" -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
