# `make demo` and `make test` are all a newcomer needs; both set up .venv on first use and never install twice.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the demo needs less than developers do; where everything is installed already, that serves it too
DEMO_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.ready-demo)

# the oldest versions that we support, and those on which the GPU figures are measured; numpy: with a newer one Triton 3.6's
# interpreter cannot run loops
OLDEST := .venv-oldest
OLDEST_VERSIONS := torch==2.11.0 torchvision==0.26.0 triton==3.6.0 transformers==5.17.0 'numpy<2.4'

# the versions that .venv gets: what passed here passes on another day, whatever was released since
TESTED := constraints.txt
NEWEST := .venv-newest

.PHONY: help demo check test test-full test-research mutants test-slow test-gpu fuzz-gpu test-oldest test-newest constraints test-seeds test-peers lint types layers bench format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       set up, then train one small network with every attention (table and report.html, 6 minutes)"
	@echo "make check      after every edit: lint, types, layer rule, and the tests of what changed (SINCE=main)"
	@echo "make test       before every commit: set up, then lint, types, layer rule, tests"
	@echo "make test-full  every night: all tests, slow ones too, with every combination of their cases"
	@echo "make test-research  the tests of research/ and benchmarks/, which are no part of the package"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-gpu   the kernels on a CUDA device"
	@echo "make fuzz-gpu   random calls of the op on a CUDA device against float64, for some minutes"
	@echo "make test-oldest  the tests with the oldest versions that we support, in a second environment"
	@echo "make test-newest  types and tests with the newest releases of everything, in a third environment"
	@echo "make constraints  write the versions of that environment to $(TESTED), from which .venv is made"
	@echo "make mutants    plant bugs and see which of them the tests notice (COUNT=200 SEED=0 WORKERS=2 ROOMS=tasks,data)"
	@echo "make test-seeds  the numeric tests with many seeds, and every bar with little room (SEEDS=1-20, WORKERS=processes)"
	@echo "make test-peers  the suites of timm and transformers over our models, the authors' networks beside ours (TIMM=, TRANSFORMERS=, AUTHORS=)"
	@echo "make bench      the op against its peers: time and memory"
	@echo "make format     rewrite the sources in the project's format"
	@echo "make clean      remove everything that these commands made"

# how an environment is made: $(1) its folder, $(2) what is installed into it, with options of pip. pip says what it does: minutes of silence look like a fault
define install
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; say which with make PYTHON=python3.12")'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "installing into $(1) (a few minutes on first use, about 6 GB with PyTorch)"
	@$(1)/bin/python -m pip install --disable-pip-version-check --editable $(2)
	@touch $@
endef

# a comma would end an argument of `call`
DEMO_EXTRAS := '.[cli,vision]'

# the stamps depend on these files alone: a changed dependency installs, a second run does not
$(READY): pyproject.toml $(TESTED)
	$(call install,$(VENV),'.[dev]' --constraint $(TESTED))

# not compiled: bytecode of all that is installed takes longer than that of what the demo imports, which Python makes by itself
$(VENV)/.ready-demo: pyproject.toml $(TESTED)
	$(call install,$(VENV),$(DEMO_EXTRAS) --constraint $(TESTED) --no-compile)

# tests of what uses the package and is not in it
BESIDE := research/tests benchmarks/tests

demo: $(DEMO_READY)
	@$(BIN)/python -m research.demo --out runs/demo

# after every edit: what changed since the branch left SINCE, and what imports it
SINCE ?= main
check: $(READY) lint types layers
	@files=$$($(BIN)/python tests/changed_tests.py --since $(SINCE)); \
	if [ -z "$$files" ]; then echo "no test is concerned"; else $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $$files; fi

test: $(READY) lint types layers
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

# NALAFORMER_FULL: every case of tests that are marked pairwise, and every feature map where others look at one of each kind
test-full: $(READY) lint types layers
	NALAFORMER_FULL=1 $(BIN)/python -m pytest -n 2 -m "not gpu" tests $(BESIDE)

test-research: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(BESIDE)

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu" tests $(BESIDE)

# on a machine with a CUDA device: the kernels compiled instead of interpreted, and what only a GPU can show
test-gpu: $(READY)
	TRITON_INTERPRET=0 NALAFORMER_FULL=1 $(BIN)/python -m pytest -m "gpu or kernels" tests $(BESIDE)

# SEED, MINUTES and WORKERS may be given; a failing case is printed with the command that runs it alone
SEED ?= 0
MINUTES ?= 8
fuzz-gpu: $(READY)
	$(BIN)/python tests/fuzz_gpu.py --seed $(SEED) --minutes $(MINUTES) $(if $(WORKERS),--workers $(WORKERS))

$(OLDEST)/.ready: pyproject.toml Makefile
	$(call install,$(OLDEST),'.[dev]' $(OLDEST_VERSIONS))

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n 2 -m "not slow and not gpu"

# the environment is brought up to date in every run
$(NEWEST)/.ready: FORCE
	$(call install,$(NEWEST),'.[dev]' --upgrade --upgrade-strategy eager)

test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/mypy
	$(NEWEST)/bin/python -m pytest -n 2 -m "not slow and not gpu"

# once test-newest is green
constraints: $(NEWEST)/.ready
	{ echo "# The versions that make demo and make test install; make constraints writes this file."; \
	  $(NEWEST)/bin/python -m pip list --disable-pip-version-check --format=freeze --exclude-editable --exclude pip; } > $(TESTED)

FORCE:

# another machine sums in another order, as another seed does: a bar that passes by little here fails there
SEEDS ?= 1-20
test-seeds: $(READY)
	NALAFORMER_FULL=1 $(BIN)/python tests/run_seeds.py --seeds $(SEEDS) --workers $(or $(WORKERS),2) --out runs/seeds

# COUNT, ROOMS and WORKERS may be given; the same command resumes, and runs/mutants is emptied to begin anew
mutants: $(READY)
	@test -d runs/mutants/lines || $(BIN)/python tests/run_mutants.py record --workers $(or $(WORKERS),2)
	$(BIN)/python tests/run_mutants.py plant --count $(or $(COUNT),200) --seed $(SEED) --workers $(or $(WORKERS),2) --rooms "$(ROOMS)"

# the peers' own suites over our models; TIMM and TRANSFORMERS are checkouts of their repositories at the installed versions,
# AUTHORS is a folder of checkouts of the papers' repositories, whose networks are compared with ours
test-peers: $(READY)
	$(BIN)/python tests/run_peers.py $(if $(TIMM),--timm $(TIMM)) $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS)) $(if $(AUTHORS),--authors $(AUTHORS))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks ops

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
