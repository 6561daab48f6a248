# Two commands do everything on a fresh machine:  make demo  ·  make test
# Both make their own virtual environment in .venv and are quick when nothing changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SAY := @printf '\033[1m%s\033[0m\n'

.PHONY: help demo test test-all lint types tests browser docs images format clean
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## the main job: train a small GPT over two lanes, and see its timeline
	@$(BIN)/penstock demo

test: lint types tests ## all checks: lint, types, tests
	$(SAY) "All checks passed."

test-all: test ## the same, and thousands of random models (hours)
	$(SAY) "Random models"
	@$(BIN)/python tests/fuzzing/run.py --cases 5000

lint: $(VENV)/.installed-dev ## style, with ruff
	$(SAY) "Lint"
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## types, strictly, with mypy
	$(SAY) "Types"
	@$(BIN)/mypy

tests: $(VENV)/.installed-dev browser ## tests, on all cores
	$(SAY) "Tests"
	@$(BIN)/pytest -n auto --dist loadgroup -q

browser: ## find or install Chromium, for the tests of the timeline page
	@scripts/need_browser

docs: $(VENV)/.installed-dev ## the site, in build/site; every warning is an error
	$(SAY) "Site"
	@$(BIN)/sphinx-build -q -W -n --keep-going -j auto -d build/doctrees -c docs . build/site
	$(SAY) "Open build/site/docs/index.html"

images: $(VENV)/.installed-dev browser ## the pictures of the README and the docs, anew
	@$(BIN)/python scripts/make_images

format: $(VENV)/.installed-dev ## put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@scripts/need_python $(PYTHON)
	$(SAY) "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(SAY) "Installing Penstock and what it needs into $(VENV) (a minute or two, once)"
	@$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[hf]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(SAY) "Installing Penstock and its development tools into $(VENV) (a few minutes, once)"
	@$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[dev,exact]'
	@touch $@ $(VENV)/.installed
