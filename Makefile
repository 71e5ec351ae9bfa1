# The commands a newcomer needs. Everything happens in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test check bench lint clean

demo: $(VENV)/.runtime
	$(BIN)/toolcell demo

# Most tests wait for something, so more of them run at once than there are processors. A file stays in one process.
TOGETHER ?= -n 4 --dist loadscope

test: $(VENV)/.dev
	$(BIN)/pytest -q $(TOGETHER)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q $(TOGETHER) $(TESTS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --json benchmarks/results.json

lint: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp per set of dependencies, so that a first `make demo` installs no test tools.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "toolcell needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable '.[dev,bench]'
	@touch $@
