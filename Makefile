# `make run` trains, `make test` checks everything; each first makes what it needs in .venv.
PYTHON  ?= python3
# Of `make bundle PYTHON=3.12` the version that the bundle is for; what makes it is any Python.
ifneq ($(filter 3.%,$(PYTHON)),)
BUNDLED := $(PYTHON)
override PYTHON := python3
endif
PY      := .venv/bin/python
PIP     := $(PY) -m pip -q --disable-pip-version-check
MEMBERS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard core/*/pyproject.toml)) cli/pyproject.toml $(sort $(wildcard plugins/*/*/pyproject.toml)))

# A stamp says that set-up came to its end, for this path of the checkout (environments cannot be moved) and for these
# inputs. Without a stamp for the path the environment is half-made or moved, and is made anew; without one for the
# inputs it is brought up to date.
INPUTS  := Makefile constraints.txt requirements-dev.txt pyproject.toml $(addsuffix /pyproject.toml,$(MEMBERS))
HERE    := $(shell pwd -P | cksum | cut -d" " -f1)
STATE   := $(HERE)-$(shell cat $(INPUTS) | cksum | cut -d" " -f1)
RUNTIME := .venv/.runtime-$(STATE)
DEV     := .venv/.dev-$(STATE)
# What an offline bundle has installed is complete (tests/bundle).
ifneq ($(wildcard .venv/.bundle),)
RUNTIME :=
DEV     :=
endif
# When the interpreter behind the environment is gone, so is the environment.
$(shell [ -x $(PY) ] || rm -f .venv/.runtime-* .venv/.dev-*)

# Settings of the caller's shell that would lead pip or Python astray.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE PYTHONWARNINGS VIRTUAL_ENV
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV

# DeepSpeed comes as sources, and would compile operators that nothing here uses.
export DS_BUILD_OPS := 0

CORES    := $(shell getconf _NPROCESSORS_ONLN)
SPREAD   := -n $(if $(filter 1 2,$(CORES)),$(shell expr $(CORES) + 2),4) --dist loadfile --no-loadscope-reorder
PRODUCTS := $(addprefix tests/integration/test_integration_,\
  $(addsuffix .py,experts scatter_messages tensor tensor_random tensor_text))

.PHONY: run test lint types unit gpu gpu-day te te-env grid graph-grid context-grid sharded-grid compose nightly campaigns series mutants mutants-by-tool setup format docs site wheels
.PHONY: bundle clean lock
run: $(RUNTIME)
	.venv/bin/megatron-run --plugin schedule=interleaved

# The types are checked beside the tests, which leave a core idle where they wait. What fails is named at the end.
test: lint
	@$(MAKE) --no-print-directory -j2 types unit
lint: $(DEV)
	$(PY) -m ruff check -q .
	$(PY) -m ruff format --check -q .
types: $(DEV)
	$(PY) -m mypy
# Tests of one file stay in one process: they share what is costly to make. Many wait for processes of their own, so there
# are two more than cores, and not more than four. Those marked `nightly` are left out. tests/conftest.py puts the longest
# files first; xdist's own order, by the number of tests, would put many of them last.
unit: $(DEV)
	$(PY) -m pytest -q $(SPREAD)
# The tests that need a CUDA device; elsewhere they are skipped, and say so. One GPU is enough for most. Many wait for
# compilers or for processes of their own, so each core has a worker, up to twelve, which share the GPU's memory.
# Each is named when it ends, so that a run that is cut short has told what failed.
gpu: $(DEV)
	$(PY) -m pytest -v --tb=short -m gpu --maxfail=20 -n $(shell [ $(CORES) -lt 12 ] && echo $(CORES) || echo 12) --dist worksteal \
		$(shell grep -rl --include='test_*.py' 'mark\.gpu\|CUDA\]' tests)
# All that a GPU has to show: libraries, tests, figures for at most SECONDS, their page.
SECONDS ?= 2400
gpu-day: $(DEV)
	.venv/bin/megatron-run doctor
	-@$(MAKE) --no-print-directory gpu
	$(PY) -m benchmarks.gpu --seconds $(SECONDS)
	$(PY) -m benchmarks.gpu --page > gpu/page.md
# The tests against the real Transformer Engine, which needs no GPU for them, in an environment of its own (.te-env, 12 GB).
TE_PYTHON ?= python3.12
te-env:
	sh tests/te/environment.sh .te-env $(TE_PYTHON) $(MEMBERS)
te: te-env
	.te-env/bin/python -m pytest -q -m te $(shell grep -rl --include='test_*.py' 'mark\.te\b' tests)
# Every schedule in every shape and variant, and every split, where `test` runs each choice and a few pairs: two hours.
grid: $(DEV)
	WHOLE_PRODUCT=1 $(PY) -m tests.integration.whole_grid
	WHOLE_PRODUCT=1 $(PY) -m pytest -q $(PRODUCTS)
# Captured graphs in every arrangement of ranks and every way, where `test` runs a selection: minutes.
graph-grid: $(DEV)
	$(PY) -m tests.integration.whole_graph_grid
# Samples split over context-parallel ranks, with every feature of a run: half an hour.
context-grid: $(DEV)
	$(PY) -m tests.integration.whole_context_grid
# Parameters that are whole only where a segment needs them, against whole ones: a quarter of an hour.
sharded-grid: $(DEV)
	$(PY) -m tests.integration.whole_sharded_grid
# Random configurations of everything that is installed, each against the single process: half an hour.
compose: $(DEV)
	$(PY) -m tests.compose
# What `test` leaves out: wheels, packages that are installed, whole runs with DeepSpeed, the site, walks of pages,
# benchmarks, and the cases that differ least from those that it runs.
nightly: $(DEV)
	$(PY) -m pytest -q -m nightly $(SPREAD)
# Hundreds of kills, signals, damaged files and malformed inputs, where `test` tries each kind once: minutes.
campaigns: $(DEV)
	$(PY) -m tests.campaigns
# `make test` twenty times, with 2 and 4 workers, in random orders of files: hours.
series: $(DEV)
	$(PY) -m tests.series
# Do the tests notice faults? Those that no tool plants, one by one in a copy of the tree; then a sample of a tool's, in an
# environment of its own (.cosmic-ray). `test` sees that each of the former can still be planted.
mutants: $(DEV) mutants-by-tool
	$(PY) -m tests.mutants
mutants-by-tool: $(DEV)
	[ -x .cosmic-ray/bin/cosmic-ray ] || { $(PYTHON) -m venv .cosmic-ray && \
	  .cosmic-ray/bin/python -m pip -q --disable-pip-version-check install cosmic-ray==8.7.0; }
	.cosmic-ray/bin/python -m tests.mutants.by_tool

setup: $(DEV)
# With LOCKED=1 what is installed first is what requirements.lock names, file by file (Linux, x86-64, Python 3.11); torch,
# whose builds differ, follows by its version. `lock` writes that file anew: minutes, after a change of requirements.
lock: $(DEV)
	$(PY) -m tests.bundle.lock

# Members that left the tree are uninstalled first, so that no stale entry point stays behind.
.venv/.runtime-$(STATE):
	@ls .venv/.runtime-$(HERE)-* >/dev/null 2>&1 || $(MAKE) --no-print-directory .venv
	@rm -f .venv/.runtime-* .venv/.dev-*
	@ours=$$($(PY) -m pip list --format=freeze 2>/dev/null | sed -n 's/^\(megatron-run[^=@ ]*\).*/\1/p'); \
	  [ -z "$$ours" ] || $(PIP) uninstall -y $$ours
	@$(if $(LOCKED),echo "installing what requirements.lock names",:)
	$(if $(LOCKED),$(PIP) install --no-deps --require-hashes -r requirements.lock)
	@echo "installing torch and all that training needs in .venv: minutes, 0.3 GB to fetch for CPUs, 3 GB for GPUs"
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation $(addprefix -e ./,$(MEMBERS))
	@touch $@
.venv/.dev-$(STATE): $(RUNTIME)
	@echo "installing what tests, checks and the site need in .venv: minutes, 0.5 GB to fetch"
	$(PIP) install -c constraints.txt -r requirements-dev.txt
	@touch $@

.PHONY: .venv
.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@echo "making the environment .venv"
	@$(PYTHON) -m venv --clear .venv \
	  || { echo "Python's venv module is missing: install it (Debian: python3-venv), or set PYTHON="; exit 1; }

format: $(DEV)
	$(PY) -m ruff check -q --fix .
	$(PY) -m ruff format -q .
# Files with lists of first-party plugins, which come from the plugins' metadata.
LISTS := $(shell grep -l '\[\[\[cog' README.md docs/*.md pyproject.toml core/kernel/src/megatron_run/registry/*.py)
# Brings what pages show up to date: lists of plugins, quoted files, the reference of the configuration, what commands print.
docs: $(DEV)
	$(PY) -m cogapp -r $(LISTS)
	$(PY) -m tests.docs.quoted
	$(PY) -m tests.docs.key_tables
	$(PY) -m tests.docs.flag_tables
	$(PY) -m tests.docs.family_table
	$(PY) -m tests.docs.field_table
	$(PY) -m tests.docs.consoles
	$(PY) -m tests.docs.walk
	$(PY) -m tests.docs.notebooks
	$(PY) -m tests.architecture.picture
# The documentation as a site, in site/; a broken link is an error.
site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
# All that a machine with Python and PyTorch needs, and no network: make bundle PYTHON=3.12 PLATFORM=manylinux_2_28_x86_64
PLATFORM ?= manylinux_2_28_x86_64
# TE=1: with Transformer Engine for GPUs of one architecture (ARCH=90: H100, H200). TE_WHEEL is its part for PyTorch, which
# `make te-env` compiles. HAVE=FILE: without what the machine has, by the output of `pip list --format=freeze` there.
TE_WHEEL ?= $(firstword $(wildcard .te-env/wheels/transformer_engine_torch-*.whl))
ARCH     ?= 90
bundle: $(DEV)
	$(if $(TE),@[ -f "$(TE_WHEEL)" ] || { echo "its part for PyTorch is not compiled: type make te-env or set TE_WHEEL="; exit 1; })
	$(PY) -m tests.bundle --python $(or $(BUNDLED),3.12) --platform $(PLATFORM) \
	  $(if $(TE),--te $(TE_WHEEL) --arch $(ARCH)) $(if $(HAVE),--have $(HAVE))
wheels: $(DEV)
	rm -rf dist
	MEGATRON_RUN_RELEASE=1 $(PIP) wheel --no-deps --no-build-isolation -w dist . $(addprefix ./,$(MEMBERS))
clean:
	rm -rf .venv dist site .mypy_cache .pytest_cache .ruff_cache
