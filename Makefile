# make demo   personalise the built-in model and write demo/report.html
# make test   style, types and tests
# make lint   style and types alone
# make format rewrite the code in the house's layout
# make clean  remove what these commands made, the virtual environment included (not build/, where tools/ works)
#
# Needs Python 3.11 or newer, with its venv module; another one is chosen by `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(READY)
	$(BIN)/blockskip demo --output demo

# Tiny models gain nothing from more threads, and lose much when other work shares the cores: two processes instead.
WORKERS ?= 2
test: export OMP_NUM_THREADS := 1
test: lint
	@echo "== tests"
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(READY)
	@echo "== style: ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== types: mypy --strict of method/ and families/"
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Installed once, and again when what has to be installed changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "== a virtual environment in $(VENV) and its packages (minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,benchmark,evaluation,quantization]"
	@touch $(READY)

clean:
	rm -rf $(VENV) demo dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
