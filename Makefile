# Everything sets itself up: `make quickstart` and `make test` work on a machine with Python, pip, gcc and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV   ?= .venv
RUN    := $(VENV)/bin/python
ORACLE ?= $(if $(wildcard ../shared/oracle),../shared/oracle,tests/golden)
ARGS   ?=

# jax from PyPI is the CPU build; say JAX_PLATFORMS= to let jax choose among what you installed yourself
export JAX_PLATFORMS ?= cpu

.PHONY: help quickstart test test-all bench clean
help:
	@echo "make quickstart        train and decode a tiny ReFusion model; ARGS='--data FILE' uses your rows"
	@echo "make test              quick tests, then reference numbers in $(ORACLE)"
	@echo "make test-all          slow tests too"
	@echo "make bench             decoding benchmark; ARGS are passed on"
	@echo "make clean             removes the environment and caches, never runs/"

quickstart: $(VENV)/.installed
	$(RUN) -m launch.quickstart $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 -q -m "not slow" $(ARGS)
	$(RUN) -m tests.oracle $(ORACLE)

test-all: $(VENV)/.installed-test
	$(RUN) -m pytest -n 2 -q $(ARGS)
	$(RUN) -m tests.oracle $(ORACLE)

bench: $(VENV)/.installed
	$(RUN) -m launch.benchmark decode $(ARGS)

$(RUN):
	$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(RUN) install pip; }

# the stamps make a second call instant; the environment follows pyproject.toml
$(VENV)/.installed: pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --editable '.[test,aot]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
