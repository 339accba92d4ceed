# `make demo` and `make test` need nothing but Python >= 3.10; they make .venv if it is missing.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: env demo test lint bench

env:
	@$(PYTHON) scripts/environment.py

demo: env
	@$(RUN) -m distlab.demo

# the templates are the learner's: nothing written there fails the project's own tests
test: env
	@$(RUN) -m ruff check . --extend-exclude 'phase*/template_*.py'
	@$(RUN) -m pytest -q

lint: env
	@$(RUN) -m ruff check .

bench: env
	@$(RUN) -m benchmarks.run
