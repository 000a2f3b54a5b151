# Two commands matter: `make run` and `make test`. Each makes its own virtual environment first.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check

.PHONY: run test lint format docs wheel clean

run: .venv/.installed
	.venv/bin/workbench run quickstart

test: .venv-test/.installed
	.venv-test/bin/python -m pytest -m "not gpu" $(ARGS)

lint: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy -p workbench

format: .venv-test/.installed
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .

wheel: .venv-test/.installed
	rm -rf build dist decode_workbench.egg-info
	.venv-test/bin/python -m pip wheel $(PIP_FLAGS) --no-deps --wheel-dir dist .

.venv/.installed: pyproject.toml constraints-cpu.txt
	$(call environment,.venv,decode)

.venv-test/.installed: pyproject.toml constraints-cpu.txt
	$(call environment,.venv-test,dev)

define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than Python 3.11; use make PYTHON=python3.11 (or newer)" >&2; exit 2; }
$(PYTHON) -m venv $(1)
@echo "installing into $(1) (once; PyTorch is large)" >&2
$(1)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints-cpu.txt --editable '.[$(2)]'
@touch $@
endef

clean:
	rm -rf .venv .venv-test build dist decode_workbench.egg-info
