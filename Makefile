# `make run` and `make test` each work alone, first, on a fresh clone: Python 3.11 to 3.13, git and make.

# The root must not be on sys.path: its folder vllm_omni is not the package vllm_omni.
export PYTHONSAFEPATH = 1
# The set-up leaves the compiling of modules to their first import. Empty is off, also where an image sets it.
export PYTHONDONTWRITEBYTECODE =
PYTHON ?= python3
VENV_PYTHON = .venv/bin/python
MODEL ?=
PYTEST_ARGS ?=
OMNI ?= 0.28.0
OMNI_TESTS ?= tests/vllm_omni tests/lifecycle tests/faults
# The part of them that `make test` runs: what touches vLLM-Omni's own classes, without its clients and engines.
OMNI_SMOKE = $(addprefix tests/vllm_omni/test_,runner_v1.py talker.py code_predictor.py plugin.py)
TRITONS = 3.6.0 3.9.0
TRITON_TESTS ?= tests/kernels -k golden
# Alone, for its kernels' file: what it depends on pins other versions of torch and the rest.
BENCH_PEER = sglang-omni==0.1.9

.PHONY: setup run test test-omni test-pythons test-triton test-compiled test-gpu lint types bench soak sanitize

setup:
	@$(PYTHON) tools/setup.py

run: setup
	$(VENV_PYTHON) examples/serve.py $(if $(MODEL),--model $(MODEL))

test: setup lint types
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(MAKE) test-omni OMNI_TESTS='$(OMNI_SMOKE) -k "not real_size and not loads_it_before"')

# The same tests on another release of vLLM-Omni that rowseed supports.
test-omni:
	@$(PYTHON) tools/setup.py --omni $(OMNI)
	[ ! -d .venv-$(OMNI) ] || .venv-$(OMNI)/bin/python -m pytest $(OMNI_TESTS) $(PYTEST_ARGS)

# Every Python that is accepted: its own environment, the golden rows, one served request.
test-pythons:
	$(PYTHON) tools/pythons.py

# The golden rows on the oldest and the newest release of Triton, each in its own environment.
test-triton:
	@set -e; for release in $(TRITONS); do \
	  $(PYTHON) tools/setup.py --triton $$release; \
	  .venv-triton-$$release/bin/python -m pytest $(TRITON_TESTS) $(PYTEST_ARGS); \
	done

# The sampler as Triton compiles it for GPUs that are not here, executed; no GPU.
test-compiled: setup
	TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(VENV_PYTHON) tests/compiled/run.py

test-gpu: setup
	$(VENV_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: setup
	$(VENV_PYTHON) -m ruff check .

types: setup
	$(VENV_PYTHON) -m mypy

bench: setup
	@$(VENV_PYTHON) -m pip install -qq --no-deps $(BENCH_PEER) || echo "no $(BENCH_PEER): its kernels are skipped"
	$(VENV_PYTHON) bench/all.py $(if $(QUICK),--quick) $(if $(MODEL),--model $(MODEL))

soak: setup
	$(VENV_PYTHON) tests/load/soak.py

# Needs a GPU and NVIDIA's compute-sanitizer. Without torch's cache of memory every tensor has its own bounds.
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1
SANITIZED = -m pytest tests/kernels tests/faults/test_public_reports.py -k "triton or gpu"

sanitize: setup
	$(SANITIZE) --tool memcheck $(VENV_PYTHON) $(SANITIZED)
	$(SANITIZE) --tool racecheck $(VENV_PYTHON) $(SANITIZED)
