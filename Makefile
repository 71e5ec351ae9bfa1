# The commands a newcomer needs. Everything happens in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

# The tests start hundreds of Pythons. Where bytecode may not be written, each of them compiles all of toolcell again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check docs bench lint clean

demo: $(VENV)/.runtime
	$(BIN)/toolcell demo

# Some tests wait for something, so more of them run at once than two processors; each process imports all of them first.
# Neighbours stay together, and a process that has nothing left to do takes tests from another one.
TOGETHER ?= -n 3 --dist worksteal
PYTEST   ?= $(BIN)/pytest

# What is marked `quick`: the plain claims of every subject. CONTRIBUTING.md has the rule.
test: $(VENV)/.test
	$(PYTEST) -q $(TOGETHER) -m quick $(TESTS)

test-all: $(VENV)/.dev
	$(PYTEST) -q $(TOGETHER) $(TESTS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q $(TOGETHER) -m quick $(TESTS)

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --json benchmarks/results.json

lint: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .site

# One stamp per set of dependencies, so that a first `make demo` installs no test tools.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "toolcell needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.test

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable '.[dev,bench]'
	@touch $@
