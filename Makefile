# Two commands matter: `make demo` shows it working, `make test` proves it. Both set up what they need.
.PHONY: demo test lint unit integration fuzz bench proto clean

PYTHON ?= $(shell command -v python3.13 || command -v python3.12 || command -v python3.11 || command -v python3)
BIN := .venv/bin

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/pip install -q -e . --group dev --group fuzz
	touch $@

proto: .venv/.ready
	$(BIN)/python -m grpc_tools.protoc -I ocihook/criu/proto --include_imports \
	    --descriptor_set_out=ocihook/criu/proto/criu.protoset ocihook/criu/proto/*.proto

lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: .venv/.ready
	$(BIN)/pytest tests
