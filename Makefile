# A newcomer needs only `make demo` and `make test`. Each target creates .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# The index of PyTorch's CPU wheels, for `make test TORCH_INDEX=URL`: 2.0 GB instead of 5.8 GB. pip
# prefers its build to the one of the package index. `make test TORCH=none` needs no PyTorch.
TORCH_INDEX ?=
TORCH ?= default
DEV := $(if $(filter none,$(TORCH)),.venv/.dev-lite,.venv/.dev)
SOURCES := proto common server client lab
CODE := proto common server client lab tests benchmarks docker docs k8s scripts examples

.PHONY: docs reference demo test test-slow test-containers lint format proto pins bench dist clean \
	images image-server image-client image-client-lite image-client-cuda

.venv/bin/python:
	$(PYTHON) -m venv .venv

# One stamp per set of extras, so that a second `make` installs nothing.
.venv/.demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[server,lab]'
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	@touch $@ .venv/.dev-lite .venv/.demo

.venv/.dev-lite: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev-lite]'
	@touch $@ .venv/.demo

# The linter of the manifests needs other versions than the project, so it has its own environment.
.checkov/.installed: k8s/checkov.txt
	$(PYTHON) -m venv .checkov
	.checkov/bin/pip install --quiet --disable-pip-version-check -c k8s/checkov.txt checkov
	@touch $@

# So has the protobuf compiler: it generates stubs for protobuf 6, and programs run with protobuf 7.
.protogen/.installed: proto/generate-requirements.txt
	$(PYTHON) -m venv .protogen
	.protogen/bin/pip install --quiet --disable-pip-version-check -r proto/generate-requirements.txt
	@touch $@

demo: .venv/.demo  ## train with a real server and ten real clients; about a minute
	$(BIN)/fairfleet demo

test: $(DEV) .protogen/.installed  ## run the tests; under five minutes on two cores
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not containers'

test-slow: $(DEV)  ## run the tests that take minutes
	$(BIN)/pytest -n 2 --dist loadfile -m slow

test-containers: .venv/.dev  ## build the images and run the compose federation; skipped without a container engine
	$(BIN)/pytest -m containers tests/containers

lint: .venv/.dev .checkov/.installed  ## check Python, Dockerfile, compose file and manifests; needs kubectl
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(SOURCES:%=-p fairfleet.%)
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker-compose.yml examples/five-machines/compose.yaml
	$(BIN)/python k8s/lint.py .checkov/bin/checkov

docs: .venv/.dev  ## build the documentation site in dist/docs; every warning is an error
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet docs dist/docs
	@echo 'open dist/docs/index.html'

reference: .venv/.dev  ## write the reference pages that follow from the code
	$(BIN)/python -m docs.generate

format: .venv/.dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

proto: .protogen/.installed  ## generate the protobuf stubs from the .proto files
	.protogen/bin/python proto/generate.py

# The versions first, then an environment that has them, then the hashes of what is installed there.
pins: .venv/.dev  ## renew all pinned versions and hashes from the package index; PyTorch's stays
	$(BIN)/python scripts/renew_pins.py
	$(MAKE) .venv/.dev
	$(BIN)/python docker/hashes.py

dist: $(DEV)  ## build a wheel and an sdist in dist/, with the version in pyproject.toml
	rm -rf dist
	$(BIN)/hatchling build --directory dist

# The images, tagged with the version. BUILD has further arguments of `docker build`, such as
# --platform linux/arm64, --build-arg BASE=… or --secret ….
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION := $(shell git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null)
SOURCE := $(shell git remote get-url origin 2>/dev/null | sed -n 's,^https://\(.*@\)*,https://,p')
BUILD :=
IMAGE = docker build --file docker/Dockerfile --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	--build-arg SOURCE=$(SOURCE) $(BUILD)

images: image-server image-client-lite image-client  ## build the three container images

image-server:
	$(IMAGE) --target server --tag fairfleet-server:$(VERSION) .

image-client-lite:  ## for tasks in numpy
	$(IMAGE) --target client --build-arg TORCH=none --tag fairfleet-client-lite:$(VERSION) .

image-client:  ## for tasks in torch
	$(IMAGE) --target client --build-arg TORCH=cpu --tag fairfleet-client:$(VERSION) .

image-client-cuda:  ## for tasks in torch on NVIDIA's cards: several GB, so not among `images`
	$(IMAGE) --target client --build-arg TORCH=cuda --tag fairfleet-client-cuda:$(VERSION) .

bench: .venv/.dev
	$(BIN)/python benchmarks/transport.py --clients 4 --params 1000000 --rounds 20 --json
	$(BIN)/python benchmarks/transport.py --clients 4 --params 10000000 --rounds 8 --json
	$(BIN)/python benchmarks/aggregation.py --clients 10 --params 10000000 --json
	$(BIN)/python benchmarks/aggregation.py --clients 100 --params 1000000 --json
	$(BIN)/python benchmarks/aggregation.py --finite --json
	$(BIN)/python benchmarks/aggregation_memory.py --json
	$(BIN)/python benchmarks/history.py --json
	$(BIN)/python benchmarks/simulation.py --json
	$(BIN)/python benchmarks/telemetry.py --json
	$(BIN)/python benchmarks/client_cost.py --json

clean:
	rm -rf .venv .checkov .protogen .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
