# `make demo` and `make test` need nothing but Python >= 3.10; they make .venv if it is missing.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: env demo gpt nodes train test check lint bench

env:
	@$(PYTHON) scripts/environment.py

demo: env
	@$(RUN) -m distlab.demo

# the closing run of phase 2: tensor parallel 2 x pipeline 2, beside one process
gpt: env
	@OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node 4 \
		-m solutions.phase2_advanced.train_gpt --tensor 2 --pipeline 2 --steps 200 \
		--device cpu --compare --plot .distlab/gpt.png

# the closing run of phase 3: two nodes on this machine, as root or where users may make namespaces
nodes: env
	@$(RUN) -m distlab cluster run --nodes 2 --ranks-per-node 2 --rate 20mbit -- \
		python -m solutions.phase3_multi_node.train_two_nodes --plot .distlab/nodes.png

# the closing run of phase 4: the digits as a folder of images, from the beginning, with a report
train: env
	@$(RUN) -m solutions.phase4_production.digits_folder .distlab/digits
	@rm -rf .distlab/train
	@NPROC_PER_NODE=2 ./launch_training.sh --config configs/digits.yaml --device cpu

# the templates are the learner's: nothing written there fails the project's own tests
LINT := $(RUN) -m ruff check . --extend-exclude 'phase*/template_*.py'
PYTEST := $(RUN) -m pytest -q -p distlab.suite -n auto --maxprocesses 5 --dist loadgroup \
	--no-loadscope-reorder

test: env
	@$(LINT)
	@$(PYTEST) --durations 30

# under a minute, for the one who edits: lint, types, templates in step, the quick tests of the
# toolkit, and one wrong implementation per exercise
QUICK := course diagnose environment ledger memory suite timeline training_report virtual \
	virtual_time warm
check: env
	@$(LINT)
	@$(RUN) -m mypy
	@$(PYTEST) --one-each tests/mutants $(QUICK:%=tests/distlab/test_%.py)

lint: env
	@$(RUN) -m ruff check .

bench: env
	@$(RUN) -m benchmarks.run
