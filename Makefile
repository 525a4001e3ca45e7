# Every target installs what it needs into .venv first, and does nothing there the second time.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
SETUP_ARGS ?=

.PHONY: docs setup setup-test setup-clients serve test test-all bench bench-peers bench-splits bench-table fuzz soak fmt check lock clean

setup:
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) is not installed; on Debian: apt-get install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) setup/install.py $(SETUP_ARGS)
	@$(BIN)/tandem demo-model >/dev/null

setup-test: setup
	@$(PYTHON) setup/install.py --test $(SETUP_ARGS)

# Official clients for tests/clients, in an environment of their own: their pins are not ours.
setup-clients: .venv-clients/complete .venv-gateway/complete .venv-guidellm/complete
	@command -v javac >/dev/null || { echo "setup: the Java client needs a JDK; on Debian: apt-get install openjdk-17-jdk-headless" >&2; exit 2; }

.venv-clients/complete: locks/clients.txt
	@$(PYTHON) -m venv --clear .venv-clients
	@.venv-clients/bin/pip install --quiet --no-input --require-hashes -r locks/clients.txt
	@touch $@

.venv-gateway/complete: locks/gateway.txt
	@$(PYTHON) -m venv --clear .venv-gateway
	@.venv-gateway/bin/pip install --quiet --no-input --require-hashes -r locks/gateway.txt
	@touch $@

# Its torch only holds data here: the pin of our own, which is a CPU build where one is at hand.
.venv-guidellm/complete: locks/guidellm.txt locks/torch.txt
	@$(PYTHON) -m venv --clear .venv-guidellm
	@.venv-guidellm/bin/pip install --quiet --no-input --require-hashes --no-deps -r locks/guidellm.txt
	@.venv-guidellm/bin/pip install --quiet --no-input --no-deps $$(grep '^torch==' locks/torch.txt)
	@touch $@

.venv-fuzz/complete: locks/fuzz.txt
	@$(PYTHON) -m venv --clear .venv-fuzz
	@.venv-fuzz/bin/pip install --quiet --no-input --require-hashes -r locks/fuzz.txt
	@touch $@

# A minute of coverage-guided fuzzing for each reader of foreign bytes.
fuzz: .venv-fuzz/complete
	.venv-fuzz/bin/python -m tests.faults.fuzz wire -max_total_time=60 $(ARGS)
	.venv-fuzz/bin/python -m tests.faults.fuzz json -max_total_time=60 $(ARGS)

serve: setup
	@$(BIN)/tandem serve $(ARGS)

test: setup-test
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: setup-test setup-clients
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

bench: setup-test
	$(BIN)/python -m bench $(ARGS)

bench-peers: setup-test
	$(BIN)/python -m bench.peers

# The published comparison with legacy serving: published, simulated and measured side by side.
bench-table: setup-test
	$(BIN)/python -m bench.table $(ARGS)

# Llama-3-70B on eight GPUs: goodput of every split into roles and ranks, simulated.
bench-splits: setup-test
	$(BIN)/python -m bench.splits bench/results/splits.md

# Faults on real processes, and thousands of requests while workers are killed: half an hour or so.
soak: setup-test
	$(BIN)/python -m tests.faults.cells
	$(BIN)/python -m pytest tests/faults tests/system/test_faults.py
	$(BIN)/python -m tests.faults.real_matrix
	$(BIN)/python -m bench.soak $(ARGS)

fmt: setup-test
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

check: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The parts of docs/ that are made from the code.
docs: setup
	$(BIN)/python -m setup.write_docs

lock:
	setup/lock.sh

clean:
	rm -rf .venv .venv-clients .venv-fuzz .venv-gateway .venv-guidellm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
