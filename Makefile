# `make demo` and `make test` need nothing but Python >= 3.10; they make .venv if it is missing.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: env cpu demo gpt nodes train test test-all verdicts test-oldest check lint bench soak lock wheels notebooks \
	site site-serve

# LOCKED=1: exactly the versions of requirements.lock. torch's own index has not all of the others
ifdef LOCKED
export PIP_CONSTRAINT := $(CURDIR)/requirements.lock
export PIP_EXTRA_INDEX_URL := $(or $(PIP_EXTRA_INDEX_URL),$(PIP_INDEX_URL),https://pypi.org/simple)
endif
# WHEELS=FOLDER: from the wheels in a folder alone, without a network
ifdef WHEELS
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELS))
endif

env:
	@$(PYTHON) scripts/environment.py

# the same with torch's build for the CPU: 200 MB instead of 3 GB
cpu:
	@$(PYTHON) scripts/environment.py --cpu

demo: env
	@$(RUN) -m distlab.commands.demo

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
# plugins that other packages bring cost time, and could change what tests do
export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
PYTEST := -m pytest -q -p xdist.plugin -p tests.suite -p tests.verdicts.plugin -n auto \
	--maxprocesses 5 --dist loadscope --no-loadscope-reorder

# a solution or a wrong implementation whose verdict is in tests/verdicts/record.json, and of which
# nothing has changed since, is not graded again, but for a sample
test: env
	@$(LINT)
	@$(RUN) $(PYTEST) --verdicts record --durations 30

# every test: tests/verdicts/record.json is not looked at
test-all: env
	@$(LINT)
	@$(RUN) $(PYTEST) --durations 30

# the verdicts that tests/verdicts/record.json lacks; what it has is kept if this is interrupted
verdicts: env
	@$(RUN) $(PYTEST) --verdicts write $$(grep -rlE '^(@exercise\(|(@|pytestmark = )pytest.mark.verdict)' tests --include='test_*.py')

# with the oldest torch that is supported, in an environment of its own; TESTS chooses, as in
# make test-oldest TESTS=tests/phase1
test-oldest:
	@$(PYTHON) scripts/environment.py --oldest
	@.venv-oldest/bin/python $(PYTEST) $(TESTS)

# under a minute, for the one who edits: lint, types, templates in step, the quick tests of the
# toolkit, and one wrong implementation per exercise
QUICK_TESTS := course diagnose environment ledger memory rooms suite timeline training_report virtual \
	virtual_time warm
check: env
	@$(LINT)
	@$(RUN) -m mypy
	@$(RUN) $(PYTEST) --one-each tests/mutants $(QUICK_TESTS:%=tests/distlab/test_%.py)

lint: env
	@$(RUN) -m ruff check .

# everything, alone on the machine; goes on where it stopped. QUICK=1: what texts claim, five minutes
bench: env
	@$(RUN) -m benchmarks.run $(if $(QUICK),--quick)

# right code graded again and again, idle and loaded; goes on where it stopped. ARGS="--minutes 30"
soak: env
	@$(RUN) -m benchmarks.soak $(ARGS)

# the site, in build/site: it loads nothing from elsewhere, and needs no network once that is installed
site:
	@$(PYTHON) scripts/extras.py site
	@$(RUN) -m scripts.website $(ARGS)

# the same, shown on this machine. ARGS="--port 9000"
site-serve:
	@$(MAKE) --no-print-directory site ARGS="--serve $(ARGS)"

# requirements.lock anew, with the newest versions that pyproject.toml allows
lock: env
	@$(RUN) scripts/lock.py

# all packages as files in wheels/, for a machine without a network; CUDA=1: with NVIDIA's libraries
wheels:
	@$(PYTHON) scripts/wheels.py $(if $(CUDA),--cuda)

# the notebooks again, with what a run of the solutions shows
notebooks: env
	@$(RUN) -m scripts.notebooks $(ARGS)
