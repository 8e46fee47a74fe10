# Every target does its own set-up; `make test` in a fresh clone is enough.

VENV := .venv
BIN := $(VENV)/bin
# The first Python >= 3.11 that can create virtual environments.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Only files whose hash is in the lock file, and nothing that is not in it.
LOCKED_ONLY := --no-deps --require-hashes
# Test processes; `make test JOBS=0` runs all in one process (for a debugger).
JOBS ?= 2
# Extra arguments, for instance `make pytest ARGS="-k graph -x"`.
ARGS ?=

# Nothing but the locked environment may be imported.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE := 1

# With JOBS processes on as many cores, threads inside torch would only fight each other.
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(JOBS)

# Stamps: a target is set up again only when the file that describes it has changed.
LOCKED := $(VENV)/.locked
READY := $(VENV)/.ready
BENCH := $(VENV)/.bench
DOCS := $(VENV)/.docs

.DEFAULT_GOAL := help
.PHONY: help setup test test-all lint types imports pytest format demo docs bench-setup bench wheel mutants tests-by-function \
	lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
		while IFS='|' read -r name text; do printf '  %-18s %s\n' "$$name" "$$text"; done

$(LOCKED): requirements.lock requirements-torch.lock requirements-cuda.lock
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv found; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Installing requirements.lock into $(VENV)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) install $(LOCKED_ONLY) -r requirements.lock -r requirements-torch.lock || \
		{ echo "No build of torch for the processor was found: taking the one with CUDA"; \
		$(PIP) install $(LOCKED_ONLY) -r requirements.lock -r requirements-cuda.lock; }
	@$(PIP) check
	@touch $@

$(READY): $(LOCKED) pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(BENCH): requirements-bench.lock $(READY)
	@echo "Installing requirements-bench.lock into $(VENV)"
	@$(PIP) install $(LOCKED_ONLY) --no-build-isolation -r requirements-bench.lock
	@touch $@

$(DOCS): requirements-docs.lock $(READY)
	@echo "Installing requirements-docs.lock into $(VENV)"
	@$(PIP) install $(LOCKED_ONLY) -r requirements-docs.lock
	@touch $@

setup: $(READY) ## Create the environment: locked dependencies and the package itself

test: lint types imports ## Run every check: ruff, mypy, import directions, tests and doctests
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint types imports ## The same with the slow tests
	$(PYTEST) $(ARGS)

lint: $(READY) ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## Check types
	$(BIN)/mypy

# Without its cache: that one forgets an import when the imported module is added later.
imports: $(READY) ## Check that layers import only the layers below them
	$(BIN)/lint-imports --no-cache

pytest: $(READY) ## Run the tests only
	$(PYTEST) -m "not slow" $(ARGS)

format: $(READY) ## Repair style and formatting where possible
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(READY) ## Run the demonstration; results go to demo/
	MPLBACKEND=Agg $(BIN)/python examples/demo.py $(ARGS)

# Warnings are errors (strict: in mkdocs.yml), broken links among them; the gallery's examples run.
docs: $(DOCS) ## Build the documentation as a site into build/site
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -W error::UserWarning -m mkdocs build --clean $(ARGS)

wheel: $(READY) ## Build the wheel into dist/
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

bench-setup: $(BENCH) ## Add the libraries that the benchmarks compare with

bench: $(BENCH) ## Run the benchmarks
	MPLBACKEND=Agg $(BIN)/python -m benchmarks $(ARGS)

# For a nightly run: each mutant takes tests that enter the changed function. `make mutants ARGS="--seed 3 --number 40"`.
mutants: $(READY) ## Change the code in small ways and list what no test notices
	OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m benchmarks.mutants --number 200 $(ARGS)

tests-by-function: $(READY) ## Note which tests enter which function, for the mutants
	OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m benchmarks.tests_by_function $(ARGS)

# The newest versions that fit pyproject.toml; torch stays at the version already locked, and its local suffix is cut
# off: see CONTRIBUTING.md. Hashes are those of all files of a version.
FREEZE = build/lock/bin/python -m pip freeze --all | grep -vE '^(pip|otpdag|torch)[ =]' | sed -E 's/(==[^+]*)\+.*/\1/'

# `make lock KEEP=1` changes only what pyproject.toml asks for: what is locked stays where it fits.
lock: ## Renew the lock files
	"$(PYTHON)" -m venv --clear build/lock
	grep -hoE '^[A-Za-z0-9._-]+==[^ ]+' requirements*.lock | grep $(if $(KEEP),.,'^torch==') > build/kept.pins
	build/lock/bin/python -m pip install --quiet -c build/kept.pins torch hatchling editables '.[dev]'
	$(FREEZE) > build/core.pins
	build/lock/bin/python -m pip install --quiet -c build/kept.pins -c build/core.pins '.[bench]'
	$(FREEZE) | grep -vxFf build/core.pins > build/bench.pins
	"$(PYTHON)" -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet -c build/kept.pins -c build/core.pins '.[dev,docs]'
	$(FREEZE) | grep -vxFf build/core.pins > build/docs.pins
	for file in core bench docs; do \
		lock=requirements-$$file.lock; test $$file = core && lock=requirements.lock; \
		{ sed '/^[^#]/,$$d' $$lock; cat build/$$file.pins; } > build/$$file.headed; \
		build/lock/bin/python tools/lock_hashes.py < build/$$file.headed > build/$$lock && mv build/$$lock $$lock || exit 1; \
	done

clean: ## Remove the environment, caches and outputs
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
