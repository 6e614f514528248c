# `make` or `make help` lists the targets. Each of them sets up the virtual environment first, once.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CONSTRAINTS ?=

BIN := $(VENV)/bin
# Empty: what pyproject.toml allows. CONSTRAINTS=constraints.txt: the versions that were tested.
CONSTRAINED = --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
PIP_INSTALL = $(BIN)/python -m pip install $(CONSTRAINED)
# $(call install,...): uv takes about half of pip's time. pip is used where uv is missing or fails, as with an index that
# only pip's settings name.
install = { test -x $(BIN)/uv && $(BIN)/uv pip install --python $(BIN)/python $(CONSTRAINED) $(1) || $(PIP_INSTALL) $(1); }
STAMP := $(VENV)/.installed
# Tests start many processes. Without byte code, each would compile the whole package again.
TEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python
# The tests of a file share what they set up, so they run in one process.
IN_PARALLEL = --numprocesses=2 --dist=loadfile

.DEFAULT_GOAL := help
.PHONY: help run test test-data test-gpu test-slow bench bench-gpu bench-scale bench-peers docs reproduction audit constraints
.PHONY: lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Made again when pyproject.toml changes. The stamp comes last, so an installation that broke off is repeated.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fedexp needs Python 3.11 or later, and '$(PYTHON)' is not: say which, as in  make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes and some GB, most of it PyTorch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) uv || echo "uv cannot be installed; pip is used" >&2
	@$(call install,-e '.[dev]')
	@touch $@

run: $(STAMP) ## the main job; options: make run ARGS="algorithm=fedntd alpha=0.1"
	$(BIN)/fedexp $(ARGS)

test: $(STAMP) ## the tests (no network needed); options: make test ARGS="-k resume"
	$(TEST) -m pytest $(IN_PARALLEL) $(ARGS)

test-data: $(STAMP) ## tests on real data sets below FEDEXP_DATA
	$(TEST) -m pytest -m data $(ARGS)

test-gpu: $(STAMP) ## tests that need a CUDA device
	$(TEST) -m pytest -m gpu $(ARGS)

test-slow: $(STAMP) ## slow variants; the wheel (needs a package index)
	$(TEST) -m pytest -m slow $(IN_PARALLEL) $(ARGS)

bench: $(STAMP) ## speed against plain PyTorch (an hour; idle machine); make bench ARGS=--quick
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(STAMP) ## the figures of a GPU (25 minutes on an H200, estimated)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-scale: $(STAMP) ## 100,000 clients, and 3,000 rounds (ten minutes)
	$(BIN)/python -m benchmarks.scale $(ARGS)

bench-peers: $(STAMP) ## speed against Flower and pfl-research (installs the extra `bench`)
	@$(call install,-e '.[bench]')
	$(BIN)/python -m benchmarks.peers $(ARGS)

docs: $(STAMP) ## the documentation as pages, into site/ (installs the extra `docs`)
	@$(BIN)/python -c 'import material, mkdocs_gen_files, mkdocs_literate_nav' 2>&- || $(call install,-e '.[docs]')
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

reproduction: $(STAMP) ## writes the numbers of REPRODUCTION.md from the committed runs; ARGS=--check only checks them
	$(BIN)/fedexp-papers page $(ARGS)

# --strict: a package that the index does not know is an error. Without it "no known vulnerabilities" may mean that
# none was looked up.
audit: $(STAMP) ## known vulnerabilities of what is installed (needs a network)
	@$(call install,pip-audit)
	@$(BIN)/python -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==' | sed 's/+.*//' >$(VENV)/audited.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r $(VENV)/audited.txt

constraints: $(STAMP) ## writes the versions of this environment to constraints.txt
	@head -n 3 constraints.txt >$(VENV)/constraints.txt
	@$(BIN)/python -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==' \
	  | grep -viE '^(nvidia-|cuda-|triton|fedexp)' >>$(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## lets ruff mend and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## removes the environment, caches and built files; runs and data stay
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
