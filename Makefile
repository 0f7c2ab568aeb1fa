# `make train` and `make test` are all a new machine needs: each makes .venv once. `make train` installs
# requirements.txt, the other targets also the extra `dev`, all in the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
DEV_STAMP := .venv/installed-dev
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Without bytecode each process compiles rl/ again (0.6 s) and each test session all tests (15 s).
unexport PYTHONDONTWRITEBYTECODE
# A test may call make itself (a page's block does): it must not inherit ARGS.
MAKEOVERRIDES :=
unexport ARGS

.PHONY: train test slow test-all durations lint campaign clean

# The four settings are accelerate's defaults for one process; without them, accelerate prints a paragraph about its defaults.
train: $(STAMP)
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no train.py $(ARGS)

# Two workers of one thread each: tiny models gain little from a second thread, and many tests wait for processes of their own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# 13 to 17 minutes on two CPU cores: every test that takes seconds.
test: $(DEV_STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

# The tests that train models or start many processes: 22 to 42 minutes.
slow: $(DEV_STAMP)
	$(PYTEST) -m slow --durations=30 $(ARGS)

test-all: test slow

# Seconds of each test file, for the order in which the files begin.
durations: $(DEV_STAMP)
	WHETSTONE_WRITE_DURATIONS=1 $(PYTEST) -m "" $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Hours, not minutes: several seeds of the default recipe, and peers side by side. Results go to bench/results/.
campaign: $(DEV_STAMP)
	$(BIN)/python bench/campaign.py $(ARGS)

clean:
	rm -rf .venv runs

# A stamp is written last, so an interrupted install is done again and a finished one never.
$(STAMP): requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || [ -n "$$CXX" ] || echo "No C++ compiler: sampling on the CPU uses torch operations, which take 1.1 to 1.6 times as long. Install a compiler, on Debian with apt-get install g++"
	$(PYTHON) -m venv .venv
	@$(BIN)/python -c 'from importlib.metadata import version; print("Installing requirements.txt into .venv beside torch", version("torch") + ": a download of at most 0.2 GB.")' 2>/dev/null \
		|| { echo "Installing requirements.txt into .venv: 90 packages. On Linux x86-64 they are a download of 2.9 GB if pip chooses a torch for CUDA,"; \
		echo "and of 0.4 GB with a torch for the CPU; on a Mac 0.2 GB. docs/install.md says how to choose the torch."; }
	$(INSTALL) -r requirements.txt
	@touch $@

$(DEV_STAMP): $(STAMP) pyproject.toml
	@echo "Installing the tools of the tests (the extra dev) into .venv: a download of 30 MB, and of 0.2 GB for triton beside a torch for the CPU"
	$(INSTALL) -e ".[dev]"
	@touch $@
