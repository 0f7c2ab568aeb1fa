# `make train` and `make test` are all a new machine needs: each makes .venv and installs requirements.txt once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: train test quick lint campaign clean

# The four settings are accelerate's defaults for one process; unsaid, it prints a paragraph about them.
train: $(STAMP)
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no train.py $(ARGS)

# Two workers of one thread each: tiny models gain little from a second thread, and many tests wait for processes of their own.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Hours, not minutes: several seeds of the default recipe, and peers side by side. Results go to bench/results/.
campaign: $(STAMP)
	$(BIN)/python bench/campaign.py $(ARGS)

clean:
	rm -rf .venv runs

# One pip call; the stamp is written last, so an interrupted install is done again and a finished one never.
$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "a C++ compiler is needed (Debian: apt-get install g++)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
