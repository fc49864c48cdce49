# make demo     a trained model answers on this machine: PROMPT="..." and ARGS="..." override
# make test     lint, types and the whole CPU test suite
# make setup    only the environment of the tests
#
# TORCH is what pip is asked for. 2.13.0 is small where a CPU build of it is at hand; on a machine with
# GPUs take the build that fits its driver, for example: make demo TORCH=torch==2.11.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
PROMPT ?= Explain in two sentences why the sky is blue.
ARGS ?=
WORKERS ?= 2

# Handed over by the environment and not expanded by make, so that any character may stand in it.
override PROMPT := $(value PROMPT)
export PROMPT
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: demo test lint setup clean

demo: $(VENV)/.demo
	@$(BIN)/python -m engine.generate --prompt "$$PROMPT" $(ARGS)

# One thread a worker: the workers are as many as the cores. Files are not split over workers, since some
# share a compiled or converted model.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.dev

# Torch first and alone, so that its build is the one asked for and nothing replaces it later. CPU builds
# do not bring triton; the engine's own requirement does.
$(VENV)/.torch:
	@echo "make: creating $(VENV) with $(TORCH)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "make: installing the engine"
	@$(PIP) install -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "make: installing the engine and its test tools"
	@$(PIP) install -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
