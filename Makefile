# `make run` trains the quickstart; `make test` runs the tests that are not slow, `make test-all` all of them, and
# `make test` on each other Python from 3.11 to 3.13 that is here. Each sets up .venv first, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The other Pythons of this machine that this project takes.
OTHERS = $(shell for minor in 11 12 13; do for at in $$(command -v python3.$$minor) ~/.pyenv/versions/3.$$minor.*/bin/python3; do \
  [ -x "$$at" ] && ! $(BIN)/python -V | grep -q " 3\.$$minor\." && echo 3.$$minor=$$at && break; done; done)
EXTRA := $(shell { command -v nvidia-smi || ls /dev/nvidia0; } >/dev/null 2>&1 && echo cuda || echo cpu)
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check
PIP_SHOWN := $(filter-out --quiet,$(PIP)) # with progress
# Three workers on two cores: tests of processes wait for a good part of their time.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal
# Set-up leaves it to the first import to compile; never compiled, a role takes twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

export CHECK := import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or \
  sys.exit("Python %d.%d is none of 3.11 to 3.13: rm -r $(VENV), then make setup PYTHON=python3.12" % sys.version_info[:2])
export TYPED := The pages' commands begin with .venv/bin/areal; after `. .venv/bin/activate` it is areal.

.PHONY: run test test-all test-runner kit recipes paper-mini bench coverage lint docs setup vision clean

run: setup
	$(BIN)/python run.py $(ARGS)

test: setup
	$(BIN)/python -V
	$(PYTEST) -m "not slow" $(ARGS)

# Then `make test` with each other Python, in environments below build.
test-all: setup
	$(BIN)/python -V
	$(PYTEST) $(ARGS)
	$(MAKE) recipes ARGS=--quick
	for other in $(OTHERS); do \
	  $(MAKE) test VENV=build/python$${other%%=*} PYTHON=$${other#*=} || exit 1; \
	done

# The engine's tests on vLLM's model runner of GPUs, interpreted: minutes. Triton has a folder of its own, 1 GB; in .venv
# all other tests would import it too.
test-runner: setup build/triton
	$(PYTEST) tests/runner_v2 $(ARGS)

build/triton:
	rm -rf $@.part
	$(PIP) --no-deps --target $@.part triton==3.9.0
	mv $@.part $@

# The plan of proof for GPUs (docs/gpu.md); on CPUs its rehearsal. Continues where it was stopped. Prints a table.
kit: setup
	$(BIN)/python tests/gpu/kit.py $(ARGS)

# Runs each recipe that needs no download and no package with three seeds, and compares how it ends (docs/results.md).
# Continues where it was stopped. The others by name: areal check-recipe configs/examples/dots (needs `make vision`)
recipes: setup
	$(BIN)/areal check-recipe configs/quickstart.yaml \
	  $(filter-out %/dots/,$(dir $(wildcard configs/examples/*/run.yaml))) \
	  $(wildcard configs/paper/small/*_small.yaml) $(ARGS)

# The experiments of configs/paper in miniature, on two CPU cores. Prints the paper's tables with their rows.
paper-mini: setup
	$(BIN)/python tests/benchmarks/paper_mini.py $(ARGS)

# The benchmarks of docs/benchmarks.md, for hours; continues where it was stopped. Prints their ratios.
bench: setup
	$(PIP) --editable '.[bench]'
	$(BIN)/python tests/benchmarks/bench.py $(ARGS)

# All tests, slower, and in build/coverage what it runs of the project, in all processes but those that are killed.
coverage: setup
	$(PYTEST) --cov --cov-report=term --cov-report=html:build/coverage $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/size.py
	$(BIN)/mypy

# Fails on a link that leads nowhere.
docs: setup
	test -x $(BIN)/mkdocs || $(PIP) --editable '.[docs]'
	$(BIN)/python docs/site/configuration.py
	$(BIN)/mkdocs build --config-file docs/site/mkdocs.yml

setup: $(VENV)/installed-$(EXTRA)

# uv can override and leave out packages. It does not read pip's configuration, so the index configured there is passed on.
$(VENV)/installed-cpu: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "$$CHECK"
	@echo "PyTorch, vLLM and DeepSpeed are installed into $(VENV), once: 0.9 GB to download (3.3 GB without PyTorch's CPU"
	@echo "build), in two to ten minutes. Then the first start compiles what is imported."
	$(PIP) uv==0.13.9
	$(PIP_SHOWN) --no-deps torch==2.13.0+cpu 2>/dev/null || \
	  echo "pip does not find PyTorch's CPU build. PyPI's build is installed instead: 2.3 GB more to download."
	index=$$($(BIN)/pip config list | sed -n "s/.*\.index-url='\(.*\)'/\1/p" | head -n 1); \
	UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$index}" \
	  $(BIN)/uv pip install --python $(BIN)/python --overrides configs/cpu.txt --editable '.[cpu,test]'
	touch $@
	@echo "$$TYPED"

# By pip: uv would choose cuda-python 12.6 for vLLM's flashinfer, whose files overwrite those of cuda-bindings 13.
$(VENV)/installed-cuda: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "$$CHECK"
	@echo "PyTorch, vLLM and DeepSpeed for CUDA are installed into $(VENV), once: several GB, in five to fifteen minutes."
	$(PIP_SHOWN) --editable '.[cuda,test]'
	touch $@
	@echo "$$TYPED"

# What vLLM needs for models with vision.
vision: setup
	$(BIN)/areal install-cpu --vision

clean:
	rm -rf $(VENV) runs build
