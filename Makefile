# Two commands matter: `make run` and `make test`. Each makes its own virtual environment first.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
# Processes that run the tests; `make test JOBS=0` for one, as under a debugger. Each takes tests in their order, so that
# what a module shares is made once, and steals from the end of another's list when its own is done.
JOBS ?= auto

.PHONY: run test lint format screenshots pictures wheel clean

run: .venv/.installed
	.venv/bin/workbench run quickstart

test: .venv-test/.installed
	.venv-test/bin/python -m pytest -m "not gpu" -n $(JOBS) --dist worksteal $(ARGS)

lint: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy -p workbench

format: .venv-test/.installed
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .

# The dashboard's pictures, docs/images/dashboard-*.png: of two fresh quickstart runs, or of RUNS=folder.
RUNS ?= build/screenshots
screenshots: .venv-test/.installed
	test "$(RUNS)" != build/screenshots || { rm -rf build/screenshots && mkdir -p build && \
	    .venv-test/bin/workbench run quickstart --no-report --out build/screenshots/first && \
	    .venv-test/bin/workbench run quickstart --no-report --out build/screenshots/second && \
	    .venv-test/bin/workbench demo --out build/screenshots/demo; }
	.venv-test/bin/python tests/dashboards/take_screenshots.py "$(RUNS)"

# The pictures of recorded runs, docs/images/six-signals.png and ladder.png: from what `workbench demo` unpacks.
pictures: .venv-test/.installed
	.venv-test/bin/python tests/docs/take_pictures.py

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
