# Everything sets itself up: `make quickstart` and `make test` work on a machine with Python, pip, gcc and make.
# the first Python that runs and is new enough
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
RUN    := $(VENV)/bin/python
ORACLE ?= $(or $(wildcard ../shared/oracle ../shared/oracle_zoo),tests/golden)
ARGS   ?=

# jax from PyPI is the CPU build; say JAX_PLATFORMS= to let jax choose among what you installed yourself
export JAX_PLATFORMS ?= cpu
# huge pages: a step's buffers are fresh memory every time, and on CPUs page faults cost a quarter of it
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# tests run for milliseconds what takes seconds to compile; without the optimiser it is a quarter of that.
# `make test FAST=` compiles as users do
FAST ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
test test-all: export XLA_FLAGS := $(XLA_FLAGS) $(FAST)

# the tests of a file share fixtures and compiled programs
SHARE  := -n 2 --dist loadfile

.PHONY: help quickstart test test-all bench docs clean
help:
	@echo "make quickstart        train and decode tiny models of every kind; ARGS='--data FILE' uses your rows"
	@echo "make test              quick tests, then reference numbers in $(ORACLE)"
	@echo "make test-all          slow tests too"
	@echo "make bench             decoding benchmark; ARGS are passed on"
	@echo "make docs              the documentation as a site, in site/"
	@echo "make clean             removes the environment and caches, never runs/"

quickstart: $(VENV)/.installed
	$(RUN) -m launch.quickstart $(ARGS)

test: $(VENV)/.installed-test
	$(RUN) -m pytest $(SHARE) -q -m "not slow" $(ARGS)
	$(RUN) -m tests.oracle $(ORACLE)

test-all: $(VENV)/.installed-test
	$(RUN) -m pytest $(SHARE) -q $(ARGS)
	$(RUN) -m tests.oracle $(ORACLE)

bench: $(VENV)/.installed
	$(RUN) -m launch.benchmark decode $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(RUN):
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or say make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(RUN) install pip; }

# the stamps make a second call instant; the environment follows pyproject.toml
$(VENV)/.installed: pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --editable '.[test,aot]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --editable '.[docs]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .cache .pytest_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
