# Two commands do everything: `make cifar10-byol-fedx` and `make test`. `make help` lists the rest.
PYTHON  ?= python3
PROFILE ?= auto
SEED    ?= 0
SEEDS   ?= 0
JOBS    ?= 1
ARGS    ?=
CPUS    ?= default:SSE41:2 avx2:AVX2:1 avx512:DEFAULT:2

BIN     := .venv/bin
INSTALL := $(BIN)/python -m pip install
DATA    := cifar10 svhn fmnist imagenet10
METHODS := simclr moco byol protocl fedu
EXPERIMENTS := $(basename $(notdir $(wildcard experiments/*.yaml)))
OF_PAPER := $(basename $(notdir $(shell grep -l '^paper:' experiments/*.yaml)))
REPORT  := $(BIN)/fedx-pl report $(if $(filter auto,$(PROFILE)),,experiments/results/$(PROFILE))
RUNS    := $(foreach d,$(DATA),$(foreach m,$(METHODS),$d-$m $d-$m-fedx))

.DEFAULT_GOAL := help
.PHONY: help install test test-fast test-slow test-cpus lint format docs bench report paper tensorboard wheel dist version audit lock clean $(RUNS) $(EXPERIMENTS)

help:  ## List the targets
	@echo "make DATA-METHOD[-fedx] [PROFILE=auto|paper|mini|cpu] [SEED=0] [ARGS='key=value ...']   train and evaluate"
	@echo "    DATA: $(DATA)    METHOD: $(METHODS)"
	@echo "    PROFILE=paper takes weeks without a GPU, and asks before it starts; ARGS=--yes does not ask"
	@echo "make EXPERIMENT [PROFILE=auto|paper|mini] [SEEDS=0,1,2] [JOBS=1]   all runs of a table or figure, then the report"
	@echo "    EXPERIMENT: $(EXPERIMENTS)"
	@echo "    PROFILE=paper asks here, too; ARGS=--yes does not ask"
	@awk -F ':.*## *' '/^[a-z][a-z-]*:.*##/ { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# byol-fedx on cifar10 is nothing but: data=cifar10 method=byol fedx=true
$(RUNS): .venv/installed
	$(BIN)/fedx-pl train data=$(word 1,$(subst -, ,$@)) method=$(word 2,$(subst -, ,$@)) fedx=$(if $(filter %-fedx,$@),true,false) profile=$(PROFILE) seed=$(SEED) $(ARGS)

$(EXPERIMENTS): .venv/installed
	$(BIN)/fedx-pl sweep $@ profile=$(PROFILE) --seeds $(SEEDS) --jobs $(JOBS) $(ARGS); code=$$?; $(REPORT); exit $$code

paper: .venv/installed  ## All experiments of the paper, then the report
	$(BIN)/fedx-pl sweep $(OF_PAPER) profile=$(PROFILE) --seeds $(SEEDS) --jobs $(JOBS) $(ARGS); code=$$?; $(REPORT); exit $$code

report: .venv/installed  ## Tables and figures of all finished experiments
	$(REPORT)

install: .venv/installed  ## Create .venv and install fedx-pl (about 5.5 GB with torch)

tensorboard: .venv/installed  ## The dashboards of all runs, at the address it prints
	$(BIN)/tensorboard --logdir runs --samples_per_plugin images=100

test: lint test-fast test-slow  ## Lint, types and all tests, the slow real-data ones too

test-fast: .venv/installed-dev  ## The fast tests only
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: .venv/installed-dev  ## The slow tests only: real data, end to end
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

# Each of CPUS is what torch, oneDNN and the tests are told: kernels : instructions at most : threads.
test-cpus: .venv/installed-dev  ## The fast tests as on other CPUs: three kinds of kernels, one and two threads
	@failed=; for setting in $(CPUS); do \
		set -- $$(echo $$setting | tr : ' '); \
		if [ $$1 != default ] && ! grep -q " $$1" /proc/cpuinfo; then echo "skipped $$setting: needs a CPU with $$1"; continue; fi; \
		echo "ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 FEDX_TEST_THREADS=$$3"; \
		ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 FEDX_TEST_THREADS=$$3 \
			$(BIN)/python -m pytest -n 2 --dist loadgroup $(or $(ARGS),-m "not slow") || failed="$$failed $$setting"; \
	done; if [ -n "$$failed" ]; then echo "failed with$$failed"; exit 1; fi

lint: .venv/installed-dev  ## ruff, mypy, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/installed-docs  ## Build the documentation's pages to site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/installed  ## How fast a round is: reference, bound and a rival (half an hour)
	$(BIN)/python -m benchmarks $(ARGS)

# Needs no torch. An older build folder would get into it.
wheel: | .venv/bin/python  ## Build the package for other machines, into dist/
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# An environment of its own: twine and Flower need different versions of a package.
dist: | .venv/bin/python  ## Build and check the source archive and the wheel of a release, into dist/
	rm -rf build dist
	$(BIN)/python -m venv .venv/release
	.venv/release/bin/python -m pip install --quiet build twine
	.venv/release/bin/python -m build --outdir dist .
	.venv/release/bin/python -m twine check --strict dist/*

version:  ## Print the version of this checkout
	@sed -n 's/^__version__ = "\(.*\)"$$/\1/p' src/fedx_pl/__init__.py

audit: .venv/installed-dev  ## Known holes in the installed packages, where an advisory database can be reached
	@$(INSTALL) --quiet pip-audit
	@log=$$(mktemp); $(BIN)/pip-audit --skip-editable --progress-spinner off > $$log 2>&1; code=$$?; \
	grep -v "could not be audited" $$log | tail -n 30; unknown=$$(grep -c "could not be audited" $$log); \
	if [ $$unknown -gt 0 ]; then echo "audit: $$unknown packages were NOT checked: the advisory database cannot be reached from here"; fi; \
	if [ $$code -ne 0 ] && grep -qiE "connection|resolve|timed out|retries" $$log; then \
		echo "audit: no advisory database can be reached from here, so nothing was checked"; code=0; fi; rm -f $$log; exit $$code

lock: .venv/installed-dev  ## Write the installed versions to requirements.lock
	$(BIN)/python -m pip freeze --exclude-editable > requirements.lock

clean:  ## Remove the environment and caches; data/ and runs/ stay
	rm -rf .venv build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than Python 3.11; type make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: setup.cfg | .venv/bin/python
	@echo "Installing fedx-pl with torch into .venv: about 5.5 GB, a few minutes on the first run."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) -e .
	@touch $@

.venv/installed-dev: setup.cfg .venv/installed
	$(INSTALL) -e .[dev,docs,flower,onnx,privacy,ray,tables]
	@touch $@

.venv/installed-docs: setup.cfg .venv/installed
	$(INSTALL) -e .[docs]
	@touch $@
