# On a fresh machine, two commands are enough:  make demo  ·  make test
# Both create the virtual environment .venv if necessary. They are quick if nothing has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')  # some tests mostly wait
SAY := @printf '\033[1m%s\033[0m\n'

.PHONY: help demo test quick test-all lint types tests browser docs images format clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## the main job: train a small GPT over two lanes, and see its timeline
	@$(BIN)/penstock demo

test: lint types tests ## all checks: lint, types, tests
	$(SAY) "All checks passed."

quick: lint $(VENV)/.installed-dev ## lint, and the tests that a change is most likely to break (two minutes)
	$(SAY) "Quick tests"
	@$(BIN)/pytest -n $(WORKERS) -q --quick

test-all: lint types browser ## all checks with the full grids, and thousands of random models (hours)
	$(SAY) "Tests, full grids"
	@$(BIN)/pytest -n $(WORKERS) -q --full --durations=40
	$(SAY) "Random models"
	@$(BIN)/python tests/fuzzing/run.py --cases 5000

lint: $(VENV)/.installed-dev ## check the style with ruff
	$(SAY) "Lint"
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## check the types with mypy (strict)
	$(SAY) "Types"
	@$(BIN)/mypy

tests: $(VENV)/.installed-dev browser ## run the tests on all cores
	$(SAY) "Tests"
	@$(BIN)/pytest -n $(WORKERS) -q --durations=40

browser: ## find or install Chromium, for the tests of the timeline page
	@scripts/need_browser

docs: $(VENV)/.installed-dev ## build the site in build/site; every warning is an error
	$(SAY) "Site"
	@$(BIN)/sphinx-build -q -W -n --keep-going -j auto -d build/doctrees -c docs . build/site
	$(SAY) "Open build/site/docs/index.html"

images: $(VENV)/.installed-dev browser ## draw the pictures of the README and the docs again
	@$(BIN)/python scripts/make_images

format: $(VENV)/.installed-dev ## format the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@scripts/need_python $(PYTHON)
	$(SAY) "Creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(SAY) "Installing Penstock and its dependencies into $(VENV) (one or two minutes, only once)"
	@$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[hf]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(SAY) "Installing Penstock and its development tools into $(VENV) (a few minutes, only once)"
	@$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[dev,exact]'
	@touch $@ $(VENV)/.installed
