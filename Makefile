# Each target is all that a bare clone needs, with Python 3.11 or newer. Another Python: make PYTHON=python3.12 …
PYTHON ?= python3
ARGS ?=
FUZZ_S ?= 60
FAULTS ?= 1000
MINUTES ?= 0
OUTSIDE ?= 3000

.PHONY: help demo test test-all soak faults attacks bouncer fuzz planted mutants lint format setup docs diagrams site screenshots wheel sbom clean

help:
	@echo "make demo     run the example project, with a worker, and show its jobs (ONCE=1: end by itself)"
	@echo "make test     run the unit and contract tests on SQLite, PostgreSQL and MariaDB (ARGS='tests/store -x': some)"
	@echo "make test-all run every test on each database, those that kill, soak and wait too (COVERAGE=1: measure it)"
	@echo "make soak     the tests that kill and wait, at full size (MINUTES=60: watch for leaks for an hour)"
	@echo "make faults   kill servers, workers and PostgreSQL, harm wires, and count the jobs (FAULTS=5000: more)"
	@echo "make attacks  send each verb its costliest inputs, measure a good client (ARGS='--only Push --database sqlite': some)"
	@echo "make bouncer  the tests that have a database, through a PgBouncer; then with Django's own pool"
	@echo "make fuzz     let a fuzzer attack the protocol for a minute (FUZZ_S=600: ten); Linux on x86-64"
	@echo "make planted  insert one defect after the other; a test must detect each (ARGS='--sample 3': some)"
	@echo "make mutants  change core/ and store/ in many small ways; prints what no test detects (ARGS='django_faktory.core.cron*')"
	@echo "make lint     formatting, ruff, mypy, import contracts, house rules, spelling, migrations, secrets, known holes"
	@echo "make format   format the code"
	@echo "make wheel    build wheel and sdist twice, compare, and use the wheel in empty environments and new projects"
	@echo "make sbom     list what pip installs with the package and all its extras, as CycloneDX, in dist/"
	@echo "make setup    make .venv and install what the other targets need"
	@echo "make docs     write the parts of the reference that come from the code, and the licences"
	@echo "make diagrams draw the diagrams of the documentation; needs npm"
	@echo "make site     build the documentation into build/site; a warning is an error"
	@echo "make screenshots  take the pictures of docs/screens.md"
	@echo "make clean    remove what was made here, .venv too"

setup:
	@$(PYTHON) scripts/bootstrap.py --node --browser

demo:
	@$(PYTHON) scripts/bootstrap.py --example
	@.venv/bin/python scripts/demo.py $(if $(filter 1,$(ONCE)),--once)

test: setup
	@.venv/bin/python scripts/test.py $(ARGS)

test-all: setup
	@.venv/bin/python scripts/test.py --all $(if $(filter 1,$(COVERAGE)),--coverage) $(ARGS)

soak: setup
	@FAKTORY_SOAK_KILLS=200 FAKTORY_SOAK_BATCHES=200 FAKTORY_SOAK_RESTARTS=5 FAKTORY_SOAK_ROWS=1000000 FAKTORY_SOAK_MINUTES=$(MINUTES) \
		FAKTORY_MODEL_STEPS=50000 FAKTORY_TEST_TEXTS=7 FAKTORY_DEPLOYS=2000 FAKTORY_PLANS_JOBS=2000000 FAKTORY_TEST_PAIRS=300 \
		FAKTORY_OUTSIDE=$(OUTSIDE) .venv/bin/python scripts/test.py tests/soak tests/store/model tests/plans tests/deadlocks \
		tests/outside tests/faults tests/browser/test_hostile.py tests/deploys/test_two_versions.py $(ARGS)

faults: setup
	@FAKTORY_FAULTS=$(FAULTS) bash scripts/faults $(ARGS)

attacks: setup
	@.venv/bin/python -m tests.attacks $(ARGS)

bouncer: setup
	@.venv/bin/python -m tests.bouncer $(ARGS)
	@.venv/bin/python -m tests.bouncer --pool $(ARGS)

planted: setup
	@.venv/bin/python scripts/planted.py $(ARGS)

mutants:
	@$(PYTHON) scripts/bootstrap.py --also mutants
	@FAKTORY_TEST_EXAMPLES=quick .venv/bin/mutmut run $(ARGS)
	@.venv/bin/mutmut results

fuzz:
	@$(PYTHON) scripts/bootstrap.py --also fuzz
	@mkdir -p .fuzz
	@.venv/bin/python fuzz/fuzz_server_connection.py -max_total_time=$(FUZZ_S) -max_len=4096 -artifact_prefix=.fuzz/ \
		-close_fd_mask=1 -verbosity=0 -print_final_stats=1 .fuzz fuzz/corpus

lint:
	@$(PYTHON) scripts/bootstrap.py
	@bash scripts/lint

format:
	@$(PYTHON) scripts/bootstrap.py
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

wheel: setup
	@.venv/bin/python scripts/try_wheel.py $(ARGS)

sbom: setup
	@.venv/bin/python scripts/try_wheel.py --sbom dist

docs:
	@$(PYTHON) scripts/bootstrap.py
	@.venv/bin/python scripts/reference.py
	@.venv/bin/python scripts/licences.py

diagrams: setup
	@cd scripts/node && npm install --silent --no-audit --no-fund --ignore-scripts
	@.venv/bin/python scripts/diagrams.py

screenshots: setup
	@.venv/bin/python scripts/screenshots.py

site:
	@$(PYTHON) scripts/bootstrap.py
	@.venv/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/site
	@.venv/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs -t design docs/adr build/site/design
	@echo "build/site/index.html"

clean:
	rm -rf .venv .venv-django* .venv-peers .demo .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .fuzz .nox mutants .import_linter_cache build/site tests/*/node/node_modules scripts/node/node_modules example_project/db.sqlite3*
