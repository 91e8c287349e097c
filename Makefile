# make quickstart   environment, then the main job on an embedded default
# make test         environment, then the fast tests (under 15 minutes on 2 cores)
# make test-all     the slow tier too (under 60 minutes)
# make nightly      kills, damage, cycles and fuzzing by the thousands (MINUTES=480); JSON in runs/
# make lint         ruff, pyright, layers (import-linter), shellcheck, hadolint, known vulnerabilities
# make docs         the docs site into build/site, every link checked
# make bench        what everything costs on the CPU, as ratios (docs/performance.md); JSON in runs/
# make bench-gpu    the same on a GPU, at the size of a 3B model

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= runs/quickstart
MINUTES ?= 480
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# two test processes with one thread each: faster on two cores than one process with two
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: env quickstart test test-all nightly lint docs bench bench-gpu clean

env: $(READY)

# torch first, by its exact version, so that no other package chooses a build for it
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

quickstart: env
	$(BIN)/dualsft quickstart --out $(OUT)

test: env
	$(PYTEST) -m "not slow and not gpu"

test-all: env
	$(PYTEST) --no-loadscope-reorder -m "not gpu"

nightly: env
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[fuzz]"
	OMP_NUM_THREADS=1 $(BIN)/python tests/nightly.py --minutes $(MINUTES)

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/shellcheck .ci/run examples/*.sbatch
	$(BIN)/hadolint Dockerfile
	$(BIN)/python .ci/audit.py

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: env
	$(BIN)/python -m benchmarks --device cpu --out runs/bench_cpu.json

bench-gpu: env
	$(BIN)/python -m benchmarks --device cuda --out runs/bench_gpu.json

clean:
	rm -rf $(VENV) build dist src/*.egg-info
