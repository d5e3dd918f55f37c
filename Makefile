# `make run` and `make test`: everything a fresh machine needs is python3 (3.10 to 3.12) with venv, g++, and make.
PYTHON ?= python3
VENV := .venv
# Most tests use one core; those that measure run alone (tests/conftest.py).
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.installed

.PHONY: run test
run: $(STAMP)
	@$(VENV)/bin/evenkv run

test: $(STAMP)
	@$(VENV)/bin/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal

# Bytecode is compiled on first import instead of for every module of every dependency: a minute less on two cores.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing evenkv and its pinned dependencies into $(VENV) (once, about two minutes)"
	@$(VENV)/bin/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	@touch $@
