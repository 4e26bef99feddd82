# `make demo` and `make test` need python3 (3.11 or newer), make and a package index; each makes the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check clean

demo: $(READY)
	$(BIN)/python deploy/demo.py

test: check
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Through the constraints, since an unconstrained torch pulls gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing coterie and what it needs into $(VENV) (a minute or two)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist demo-run .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
