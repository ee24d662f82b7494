# Needs python3 (3.11 to 3.13), pip and make. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
COLLECTED := $(VENV)/.tests-collected
CLIENTS := .venv-clients
AGENTS := .clients
NEWEST := .venv-newest
TOOLS := .venv-tools
# Of the pips that Pythons bring, some take three times as long to choose releases as the newest.
NEW_VENV = $(PYTHON) -m venv --upgrade-deps
# Two workers, a file's tests in one of them (tests/conftest.py); PYTEST_ARGS="-n 0" runs all in one process. On two cores
# a third one saves nothing: it starts as many servers and imports as much again.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

# Half of what is installed, of which little is imported: it is compiled then.
SELDOM := '/(models|sympy|networkx|pip|setuptools|tests?|testing|_inductor|mypyc?|lexers|torchgen|graphql|openai/types'
SELDOM := $(SELDOM)'|moto/(?!core|s3|moto_|util)\w+)/'

# Workers, and the servers that tests start, would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test test-long test-newest clients lint kernels kernels-matrix format docs \
  dist manifests clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP) ## build .venv unless it is up to date

serve: setup ## serve the demo model at http://127.0.0.1:8000 (SERVE_ARGS="--port 8001" adds flags)
	$(BIN)/strandline serve $(SERVE_ARGS)

demo: setup ## show what the cache saves on the demo model
	$(BIN)/strandline demo

test: ## lint, then all tests: must pass before a commit (PYTEST_ARGS="-k name" picks)
	@$(MAKE) --no-print-directory --jobs=2 lint kernels $(COLLECTED)
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-long: ## the same with the cases marked long, and ten times as many, new examples of every property
	@$(MAKE) --no-print-directory --jobs=2 lint kernels $(COLLECTED)
	$(BIN)/python -m pytest $(WORKERS) --long $(PYTEST_ARGS)

test-newest: ## all tests with the newest releases of all dependencies, in an environment of its own
	test -x $(NEWEST)/bin/pip || $(NEW_VENV) $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
	  --upgrade --upgrade-strategy eager -e '.[dev]'
	@$(NEWEST)/bin/python -m compileall -qq -j 0 -x $(SELDOM) $(NEWEST)/lib || true
	$(NEWEST)/bin/python -c 'from strandline.kernels.compilation import compile_kernels; compile_kernels()'
	$(NEWEST)/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS)

ifdef CLIENT
clients: setup ## drive the programs of docs/clients.md, which it installs (CLIENT=codex picks one coding agent)
	$(BIN)/python -m tests.clients.install $(CLIENT)
	CLIENT=$(CLIENT) $(BIN)/python -m pytest tests/clients/test_sessions.py $(PYTEST_ARGS)
else
clients: $(CLIENTS)/.setup-done
	$(BIN)/python -m tests.clients.install
	PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" $(BIN)/python -m pytest tests/clients/test_sessions.py \
	  tests/cpu/server/test_client_tools.py $(PYTEST_ARGS)
endif

lint: setup ## ruff, format check and mypy, without the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: setup ## compile the kernels for CPUs where that has not been done
	$(BIN)/python -c 'from strandline.kernels.compilation import compile_kernels; compile_kernels()'

kernels-matrix: setup ## compile the kernels of all configurations for other GPUs, without one (hours on two cores)
	mkdir -p build
	PYTHONPATH=$(CURDIR) $(BIN)/python tools/kernel_matrix.py --json build/kernels-matrix.json --families \
	  --store build/kernels-matrix $$(ls -d benchmarks/configs/* | grep -v dflash)

format: setup ## format the code, and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: ## build the documentation as a site below build/site; a dead link is an error
	test -x $(TOOLS)/bin/pip || $(NEW_VENV) $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check --quiet 'mkdocs-material>=9.7'
	mkdir -p build/site-pages
	for each in README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs benchmarks tests; do \
	  ln -sfn $(CURDIR)/$$each build/site-pages/$$each; done
	NO_MKDOCS_2_WARNING=1 $(TOOLS)/bin/mkdocs build --strict

dist: ## build wheel and source distribution below dist, check them, and serve the demo model from the wheel
	test -x $(TOOLS)/bin/pip || $(NEW_VENV) $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check --quiet 'build>=1.4' 'twine>=6.2'
	rm -rf dist
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/twine check --strict dist/*
	tools/try_wheel.sh dist/*.whl $(PYTHON)

manifests: ## check the manifests of deploy/kubernetes against the schemas of Kubernetes (needs kubectl)
	test -x $(TOOLS)/bin/pip || $(NEW_VENV) $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check --quiet 'kubernetes-validate>=1.34'
	mkdir -p build/manifests
	for each in single data-parallel autoscaled; do \
	  kubectl kustomize deploy/kubernetes/$$each > build/manifests/$$each.yaml && \
	  $(TOOLS)/bin/kubernetes-validate --strict -k 1.34 build/manifests/$$each.yaml || exit 1; done

clean: ## remove the virtual environments and the tools' caches
	rm -rf $(VENV) $(CLIENTS) $(AGENTS) $(NEWEST) $(TOOLS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Strandline needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/pip || $(NEW_VENV) $(VENV)
# pip would compile the modules on one core. Some files are templates, which do not compile.
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x $(SELDOM) $(VENV)/lib || true
	@touch $@

# Each worker would compile all tests; mypy leaves a core idle. What fails here fails in them, too.
$(COLLECTED): $(STAMP) | kernels
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null 2>&1 || true
	@touch $@

# What docs/clients.md says to install, with the versions of torch and transformers that we have tested.
$(CLIENTS)/.setup-done: $(STAMP) docs/clients.md
	test -x $(CLIENTS)/bin/pip || $(NEW_VENV) $(CLIENTS)
	sed -n 's/^pip install //p' docs/clients.md | \
	  xargs $(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
	@touch $@
