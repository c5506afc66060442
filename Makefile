# Two commands on a fresh machine, each makes .venv and installs what it needs:
#   make convergence           the main job: loss curves with and without the overlap, and a verdict
#   make test                  the tests, in ten to twenty minutes on two cores
# and for who changes the code:
#   make test-all PART=3/8     every case of the tests but three quarters of the sweep, the third of eight parts of about one length; all parts without PART
#   make durations             every case, and how long each takes is written down for PART
#   make lint, make package
#   make size                  lines and tokens of each room of the package and of the tests
#   make versions              other versions of Python, torch, DeepSpeed and transformers, each in a venv: an hour or more

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEEPSPEED ?= deepspeed==0.19.8
ARGS ?=

# Of this environment alone: DeepSpeed builds an op at first use, and a build that was killed leaves a lock behind.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions

.PHONY: convergence test test-all durations lint size package versions
convergence: .venv/ready
	.venv/bin/python benchmarks/convergence/run.py $(ARGS)

# Ranks wait for one another: three tests side by side keep two cores busy, where two leave a tenth of them idle.
SIDE_BY_SIDE = --numprocesses=3 --dist=worksteal
PART ?= 1/1
OF_PARTS = $(subst /, ,$(PART))
RECORDED = --durations-path=tests/durations.json

test: .venv/ready
	.venv/bin/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: .venv/ready
	.venv/bin/python -m pytest --all $(SIDE_BY_SIDE) $(RECORDED) --group=$(word 1,$(OF_PARTS)) --splits=$(word 2,$(OF_PARTS)) $(ARGS)

durations: .venv/ready
	.venv/bin/python -m pytest --all $(SIDE_BY_SIDE) $(RECORDED) --store-durations --clean-durations $(ARGS)

lint: .venv/ready
	.venv/bin/ruff check --quiet .
	.venv/bin/ruff format --check --quiet .
	.venv/bin/mypy

size:
	$(PYTHON) -m tests.harness.size .

package: .venv/ready
	.ci/package

versions:
	$(PYTHON) -m tests.harness.versions $(ARGS)

# torch first and no build isolation: a build environment of pip's own would fetch a torch of its own.
.venv/ready: setup.py pyproject.toml tests/constraints.txt
	@echo "1 of 4: making .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet --upgrade pip setuptools wheel
	@echo "2 of 4: installing $(TORCH)"
	@.venv/bin/pip install --quiet $(TORCH)
	@echo "3 of 4: installing $(DEEPSPEED)"
	@DS_BUILD_OPS=0 .venv/bin/pip install --quiet --no-build-isolation $(DEEPSPEED)
	@# Built here, once: else the first training builds it, and one that is killed meanwhile leaves a lock that stops all others.
	@.venv/bin/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" > /dev/null
	@echo "4 of 4: installing this package, and what its tests need"
	@.venv/bin/pip install --quiet --no-build-isolation --constraint tests/constraints.txt --editable ".[test,lint]"
	touch $@
