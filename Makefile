# Two commands matter: `make demo` shows it working, `make test` proves it. Both install what they need (Debian 12, root).
.PHONY: demo test nightly lint unit fuzz integration vm zdtm bench proto docs deb rpm image requirements clean

PYTHON ?= python3
BIN := .venv/bin
FORKY_ROOT ?= /var/cache/ocihook/forky
IMAGE_PREFIX ?= /opt/ocihook
PACKAGE_ROOTS ?= /var/cache/ocihook/packages
VM_ROOT ?= /var/cache/ocihook/vm
ZDTM_ROOT ?= /var/cache/ocihook/zdtm
TORCH_ROOT ?= /var/cache/ocihook/torch
export OCIHOOK_FORKY_ROOT := $(FORKY_ROOT)
export OCIHOOK_PACKAGE_ROOTS := $(PACKAGE_ROOTS)
export OCIHOOK_TORCH_ROOT := $(TORCH_ROOT)

demo: .venv/.ready
	integration/node-setup trixie
	$(BIN)/ocihook demo

test: lint unit fuzz integration

# All that CI leaves out but CRI-O, the kubelet and GPUs: hours, and some gigabytes of packages.
nightly: export OCIHOOK_NIGHTLY := 1
nightly: unit fuzz integration vm zdtm

.venv/.ready: pyproject.toml
	integration/node-setup base
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/pip install -q -e . --group dev
	touch $@

proto: .venv/.ready
	$(BIN)/python -m grpc_tools.protoc -I ocihook/criu/proto --include_imports \
	    --descriptor_set_out=ocihook/criu/proto/criu.protoset ocihook/criu/proto/*.proto

# Packages come to lie in dist/. They hold what requirements.txt pins by version and hash.
deb: .venv/.ready
	$(BIN)/python packaging/build.py deb dist

rpm: .venv/.ready
	command -v rpmbuild >/dev/null || apt-get install -y --no-install-recommends rpm
	$(BIN)/python packaging/build.py rpm dist

# The installer image of packaging/kustomize; BASE: any image with a shell.
image: .venv/.ready
	rm -rf dist/image
	$(BIN)/python packaging/stage.py dist/image --prefix $(IMAGE_PREFIX)
	podman build $(if $(BASE),--build-arg BASE=$(BASE)) -t ocihook:$(shell git rev-parse --short HEAD) .

requirements: .venv/.ready
	$(BIN)/pip install -q --group packaging
	$(BIN)/uv pip compile pyproject.toml --universal --generate-hashes --only-binary :all: --python-version 3.11 \
	    --upgrade --no-annotate --custom-compile-command 'make requirements' -q -o packaging/requirements.txt

# Man pages, completions and the made parts of docs/, from the program itself; a test fails when they are not the code's.
docs: .venv/.ready
	$(BIN)/python -m ocihook.cli.manual packaging
	$(BIN)/python -m ocihook.cli.handbook docs

lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.waits

unit: .venv/.ready
	$(BIN)/pytest -n auto tests

# Real engines, real runtimes, real CRIU; nothing may be skipped here but CRI-O and the kubelet, which no package has,
# and what `make nightly` and `make vm` run. loadgroup gives a worker one test at a time: some take two minutes.
integration: .venv/.ready
	integration/node-setup trixie
	integration/node-setup documents
	integration/node-setup forky $(FORKY_ROOT)
	integration/node-setup packages $(PACKAGE_ROOTS)
	integration/node-setup torch $(TORCH_ROOT) $(BIN)/python
	OCIHOOK_REQUIRE_INTEGRATION=1 $(BIN)/pytest -n 2 --dist loadgroup integration

# A kernel with soft-dirty bits, huge pages and cgroup2, emulated (x86-64, some ten minutes): nightly.
vm: .venv/.ready
	integration/node-setup trixie
	integration/node-setup forky $(FORKY_ROOT)
	integration/node-setup vm $(VM_ROOT) $(FORKY_ROOT)
	OCIHOOK_VM_ROOT=$(VM_ROOT) $(BIN)/pytest integration/vm

# CRIU's own suite: what passes with CRIU alone passes with ocihook in each mode. Half an hour: nightly.
zdtm: .venv/.ready
	integration/node-setup trixie
	integration/node-setup forky $(FORKY_ROOT)
	integration/node-setup zdtm $(ZDTM_ROOT) $(FORKY_ROOT)
	OCIHOOK_ZDTM_ROOT=$(ZDTM_ROOT) $(BIN)/pytest -n 2 integration/zdtm

fuzz: .venv/.ready
	$(BIN)/python tests/fuzz/fuzz_readers.py --seconds 30

# Takes half an hour and more on an otherwise idle machine with 2 cores and 16 GiB (with less memory some rows are
# missing); each result is printed when it is there, and all go to bench-results.json.
bench: .venv/.ready
	integration/node-setup trixie
	integration/node-setup bench
	integration/node-setup forky $(FORKY_ROOT)
	$(BIN)/python -m tests.bench.run

clean:
	rm -rf .venv .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench-results.json
