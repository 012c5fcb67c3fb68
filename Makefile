# make demo   from raw data to training from a bucket, with a crash in the middle (DEMO_URL=s3://… for a real one)
# make test   the promises, in minutes: ruff, mypy, contracts, histories, orders, one job per launcher, the pages of the docs
# make test-all   make test, then what is marked `thorough`: Ray, browsers, trainers, the site, torture, option table
# make venv | lint | types | pytest | thorough | bench | peers    the parts (peers: us beside the other loaders)
# make mlperf   the field's storage benchmark, ours beside torch, tf.data and DALI (MLPERF_ARGS=…)
# make docs   the site, in build/site: pages, reference and all messages; fails on a broken link
# make gpu    everything that needs a CUDA device, tests and figures (benchmarks/GPU.md), in at most ten minutes
# make fuzz   parsers on hostile bytes, for MINUTES=10 minutes
# make torture   an epoch under FAULTS=10000 faults, and CHANGES=1000 of the world with kills, drawn from SEED=1
# make release-check  wheel and sdist in clean environments of every Python that is found, types, extras, oldest versions
# make matrix all tests of both, with the cells of wide matrices whose mechanism other cells show, and 400 examples of properties
# make pauses the tests of make test three times, each time with another side of all loaders late: finds tests of luck
# make flips  FLIPS=100000 flipped bits in all files of an index, under each reader, drawn from SEED=1
# make differential   CASES=10000 random sets, options, ranks and resumes against tarfile, as many histories of all
#             kinds of sets against a model, and CASES/20 against an undisturbed rank, drawn from SEED=1
# make set-histories   HISTORIES=10000 random histories of sets that live: changes, versions, late fields, copies, kills at
#             writes, two writers, on disk, in S3 and without conditional writes, against a model, drawn from SEED=1
#
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS=… is added to pip install (say, an index with CPU builds of
# torch), PYTEST_ARGS=… to pytest. Two processes test for each core, since tests also wait: JOBS=0 for one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) '*' 2)
PIP_ARGS ?=
PYTEST_ARGS ?=
PEERS_ARGS ?= --publish
GPU_ARGS ?=
RUN_TESTS = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
RELEASE_ARGS ?=

# Compiled files are kept even where the environment says otherwise (container images do): tests start a hundred
# interpreters, and to compile all of ours takes each half a second.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: release-check help venv demo test test-all lint types pytest thorough format bench docs gpu peers mlperf fuzz torture flips matrix pauses differential set-histories clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -15

venv: $(VENV)/.installed

# One pip call resolves everything together, torch included, so that nothing is downloaded twice.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	$(BIN)/python examples/demo.py

# mypy beside pytest: some tests wait for others.
test: lint
	@$(MAKE) --no-print-directory -j2 types pytest

test-all: test
	@$(MAKE) --no-print-directory thorough

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

pytest: venv
	$(RUN_TESTS) -m "not thorough" $(PYTEST_ARGS)

thorough: venv
	$(RUN_TESTS) -m thorough $(PYTEST_ARGS)

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: venv
	$(BIN)/python -m docs.site build/site

gpu: venv
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

peers: venv
	$(BIN)/python benchmarks/peers/run.py $(PEERS_ARGS)

mlperf: venv
	$(BIN)/python benchmarks/mlperf_storage/run.py $(MLPERF_ARGS)

release-check: venv
	$(BIN)/python -m tests.release $(RELEASE_ARGS)

matrix: venv
	$(RUN_TESTS) --matrix $(PYTEST_ARGS)

pauses: venv
	@for side in consumer builders requests; do $(RUN_TESTS) -m "not thorough" --pause $$side $(PYTEST_ARGS) || exit 1; done

fuzz: venv
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)

torture: venv
	$(BIN)/python -m pytest -n 0 -s tests/histories/test_torture.py --torture-faults $(or $(FAULTS),10000) --torture-seed $(or $(SEED),1)
	$(BIN)/python -m pytest -n 0 -s tests/loops/test_remesh_processes.py --torture-changes $(or $(CHANGES),1000) --torture-seed $(or $(SEED),1)

flips: venv
	$(BIN)/python -m pytest -n $(JOBS) --dist load tests/catalog/test_index_flips.py --index-flips $(or $(FLIPS),100000) --torture-seed $(or $(SEED),1)

differential: venv
	$(BIN)/python -m pytest -n $(JOBS) tests/histories/test_differential.py tests/histories/test_differential_streamed.py tests/histories/test_histories.py tests/histories/test_histories_model.py --differential-cases $(or $(CASES),10000) --differential-seed $(or $(SEED),1)

set-histories:
	$(BIN)/python -m pytest -n $(JOBS) --dist load tests/histories/test_living_sets.py -k every_version --set-histories $(or $(HISTORIES),10000) --set-histories-seed $(or $(SEED),1)

clean:
	rm -rf .demo .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
