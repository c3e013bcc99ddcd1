# make demo    set up, then several answers to each prompt, with and without drafts
# make test    set up, then run the tests
# make check   lint, format and types
# make sanitize  the kernels' tests with address and undefined-behaviour checks
# make valgrind  the kernels under memcheck, without Python
# make docs    links, page lengths, option tables, commands, numbers and words of the docs
# make bench   the benchmarks that docs/results quotes; names those that lack data, peers or packages
# make peers   environments of the libraries that forerun is measured against (docs/peers.md)
#
# PYTHON=python3.12   the interpreter that makes the virtual environment (3.11 or newer)
# VENV=.venv          where it goes
# DATA_DIR=folder     real prompts and models; tests that need them skip without it
# PEERS_DIR=.peers    where the environments of peers go; ARGS="vllm openvino" makes some of them
# ARGS="-k tree"      passed on to pytest, or to the demo

PYTHON ?= python3
VENV ?= .venv
DATA_DIR ?=
PEERS_DIR ?= .peers
ARGS ?=
CHECKS := -g -fsanitize=address,undefined -fno-sanitize=alignment -fno-sanitize-recover=undefined
KERNELS := src/forerun/runner/native
MEMORY := $(CC) -g -O1 -std=gnu11 -fopenmp -Wno-psabi -I$(KERNELS) tests/native_memory.c $(KERNELS)/kernels.c -lm
BIN := $(VENV)/bin
# what an installation is made of: the C kernels are compiled by it
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/forerun/runner/native/*.[ch])
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: demo test check sanitize valgrind docs bench peers clean

demo: $(VENV)/.ready
	@$(BIN)/forerun demo $(ARGS)

test: $(VENV)/.ready-dev
	@echo "test: pytest, a process for every core"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(if $(DATA_DIR),"--data-dir=$(DATA_DIR)") $(ARGS)

check: $(VENV)/.ready-dev
	@echo "check: ruff check, ruff format, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

sanitize: $(VENV)/.ready-dev
	@echo "sanitize: kernels on buffers of exact sizes (minutes)"
	@mkdir -p build
	@$(MEMORY) $(CHECKS) -o build/native_memory_checked
	@build/native_memory_checked heap && build/native_memory_checked pages
	@echo "sanitize: kernels built with checks (minutes), and as they were afterwards"
	@CFLAGS="$(CHECKS)" FORERUN_OPTIMISE=-O1 $(BIN)/python setup.py -q build_ext --inplace --force
	@status=0; LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 \
		$(BIN)/python -m pytest $(wildcard tests/unit/test_native*.py) $(ARGS) || status=$$?; \
		$(BIN)/python setup.py -q build_ext --inplace --force; exit $$status

valgrind:
	@command -v valgrind > /dev/null || { echo "valgrind: not installed; try apt-get install valgrind"; exit 1; }
	@echo "valgrind: kernels on buffers of exact sizes (about a minute)"
	@mkdir -p build
	@$(MEMORY) -o build/native_memory
	@OMP_WAIT_POLICY=passive valgrind -q --error-exitcode=9 build/native_memory heap $(ARGS)

docs: $(VENV)/.ready
	@$(BIN)/python docs/check.py

bench: $(VENV)/.ready
	@set -e; skipped=; for file in $(sort $(filter-out %_worker.py %_peer.py %_timing.py %/scripts.py,$(wildcard benchmarks/*.py))); do \
		echo "bench: $$file"; status=0; $(BIN)/python $$file || status=$$?; \
		case $$status in 0) ;; 77) skipped="$$skipped $$file";; *) exit $$status;; esac; done; \
	echo "bench: forerun demo"; $(BIN)/forerun demo $(ARGS); \
	for file in $$skipped; do echo "bench: skipped $$file"; done

peers: $(VENV)/.ready
	@$(BIN)/python -m forerun.bench.peers.install --folder "$(PEERS_DIR)" $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "forerun needs Python 3.11 or newer; try make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: $(SOURCES) | $(VENV)/bin/python
	@echo "setup: forerun and what it needs (minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.ready-dev: $(SOURCES) | $(VENV)/bin/python
	@echo "setup: forerun, what it needs, and the tools for tests (minutes the first time)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.ready

clean:
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: environment, caches and builds removed"
