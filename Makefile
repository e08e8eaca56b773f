# The commands of a working day. `make setup` first; PYTHON and EXTRA can be given: make setup EXTRA=cu12
PYTHON ?= python
EXTRA ?=
comma := ,
FAST = tests/api tests/cli tests/ir tests/trace tests/rewrite tests/plan tests/engines/test_numpy.py tests/torch/test_rules.py \
       tests/torch/test_fuse.py tests/tools/test_layering.py tests/tools/test_docs.py

.PHONY: setup lint test test-fast gpu bench docs

setup:  ## install the checkout, its tests' requirements and the commit hooks
	$(PYTHON) -m pip install -c constraints.txt -e ".[test$(if $(EXTRA),$(comma)$(EXTRA))]" pre-commit
	$(PYTHON) -m pre_commit install

lint:  ## ruff and mypy, as before each commit
	ruff check .
	ruff format --check .
	mypy

test:  ## everything this machine can run
	$(PYTHON) -m pytest -n auto

test-fast:  ## under two minutes: no kernels compiled for the CPU, no mutants
	CUPYFUSE_EXAMPLES=200 $(PYTHON) -m pytest -n auto -k "not host and not cuda" $(FAST)

gpu:  ## on a GPU: its tests, the self-test with its page, and compute-sanitizer
	$(PYTHON) -m pytest -n 8 -m gpu
	$(PYTHON) -m cupyfuse selftest --engine cuda --markdown docs/measured-errors.md
	$(PYTHON) tests/tools/sanitize.py

bench:  ## on a GPU: the heads, rows, products and models
	for name in heads rows gemm models; do $(PYTHON) -m benchmarks $$name || exit 1; done
	$(PYTHON) docs/scripts/readme.py

docs:  ## the generated pages, then the site in build/site
	$(PYTHON) docs/scripts/supported.py
	$(PYTHON) docs/scripts/readme.py
	$(PYTHON) -m mkdocs build
