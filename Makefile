# make run | test | test-all | test-slow | test-lowest | bench | soak | docs | check | format | clean; ARGS="..." is passed on.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: run test test-all test-slow test-lowest gpu-bundle gpu-check bench soak docs check format clean
.DEFAULT_GOAL := run

# Installs with uv into the environment $(1) with the options $(2), from the indexes that pip is configured with.
define install
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is older: make PYTHON=...")'
$(PYTHON) -m venv $(1)
@command -v uv > /dev/null || $(1)/bin/python -m pip install --quiet uv
@config=$$($(1)/bin/python -m pip config list); \
for setting in UV_DEFAULT_INDEX:index-url UV_INDEX:extra-index-url UV_FIND_LINKS:find-links UV_INSECURE_HOST:trusted-host SSL_CERT_FILE:cert; do \
  value=$$(echo "$$config" | sed -nE "s/^[^.]*\.$${setting#*:}='(.*)'$$/\1/; T; s/\\\\n/ /g; p; q"); \
  [ -z "$$value" ] || [ -n "$$(printenv $${setting%:*})" ] || export $${setting%:*}="$$value"; \
done; \
PATH="$$PATH:$(1)/bin" uv pip install --compile-bytecode --python $(1)/bin/python --index-strategy unsafe-best-match $(2)
@touch $@
endef

.venv/.runtime: pyproject.toml constraints.txt
	@echo "Installing into .venv: up to 3.2 GB to download; UV_TORCH_BACKEND=cpu makes it less, without CUDA"
	$(call install,.venv,--constraint constraints.txt --editable .)

.venv/.installed: .venv/.runtime
	$(call install,.venv,--constraint constraints.txt --editable '.[dev]')

.venv-lowest/.installed: pyproject.toml
	$(call install,.venv-lowest,--resolution lowest-direct --editable '.[dev]')

run: .venv/.runtime  ## the default experiment, or make run ARGS="method=fedavg rounds=5"
	$(BIN)/python launch.py $(ARGS)

PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

test: .venv/.installed  ## the tests that decide whether results are right
	$(PYTEST) -m "not slow" $(ARGS)

test-all: .venv/.installed  ## all tests
	$(PYTEST) $(ARGS)

test-slow: .venv/.installed  ## what `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-lowest: .venv-lowest/.installed  ## the tests of `make test` with the lowest versions that pyproject.toml admits
	.venv-lowest/bin/python -m pytest --numprocesses auto --dist loadgroup -m "not slow" -W ignore $(ARGS)

gpu-bundle: .venv/.installed  ## what benchmarks/gpu_check.sh needs on a machine without network, into gpu-bundle/
	PYTHON=$(BIN)/python bash benchmarks/gpu_bundle.sh

gpu-check: .venv/.installed  ## check a GPU of this machine: docs/gpu.md
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

bench: .venv/.installed  ## how fast it is, into docs/performance.md: make bench ARGS="--root DIR --cases mlp-20,cnn-20"
	$(BIN)/python -m benchmarks $(ARGS)

soak: .venv/.installed  ## 300 rounds with processes killed at random, the result must be the same: make soak ARGS="--seed 1 --page"
	$(BIN)/python -m benchmarks.tools.soak $(ARGS)

docs: .venv/.installed  ## writes docs/reference.md from signatures and docstrings, and the site into docs/_build/html
	$(BIN)/python docs/make_reference.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d docs/_build/doctrees docs docs/_build/html

check: .venv/.installed  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-lowest build dist docs/_build docs/generated *.egg-info .pytest_cache .ruff_cache .hypothesis
