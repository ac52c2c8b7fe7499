# make demo    set up .venv and train the demo on embedded pictures (about 5 minutes on 2 CPU cores)
# make test    the default test suite (under 10 minutes on 2 CPU cores);  make test-all  the long checks too
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all check clean

demo: .venv/installed
	$(BIN)/vision fit --config configs/demo.yaml

test: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not compile" -n 2
	VISION_SHAPE_CHECK=0 $(BIN)/python -m pytest -m "compile and not slow"

test-all: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not compile" -n 2
	VISION_SHAPE_CHECK=0 $(BIN)/python -m pytest -m compile

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv || { echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

.venv/installed-dev: .venv/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
