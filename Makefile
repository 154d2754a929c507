# The two commands: `make demo` and `make test`. `make fast` is its quick part;
# `make demo-learn` and `make learn` watch and check that a policy learns.
#
#   PYTHON           the Python 3.11 or 3.12 to use, if not the first one found
#   WORKDIR          where the demo's run goes; the same one again resumes
#   SESA_JAX_ASSETS  where models and texts go, ~/.cache/sesa_jax by default

VENV := .venv
COMPILERS := $(VENV)/compilers
WORKDIR ?= runs/demo
PY := $(VENV)/bin/python
SUITABLE := import sys, venv, ensurepip; \
  sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

.PHONY: demo demo-learn learn test plan fast lint assets clean

demo: assets
	$(PY) -m sesa_jax.main --config=configs/smollm2_135m.py --workdir=$(WORKDIR)

# Needs no assets: the world, its tokenizer and the policy are made here.
demo-learn: export JAX_PLATFORMS = cpu
demo-learn: $(VENV)/installed
	$(PY) -m benchmarks.demo_learn

# Does a change break learning? One run beside recorded bands.
learn: export JAX_PLATFORMS = cpu
learn: $(VENV)/installed
	$(PY) -m benchmarks.learn

test: export JAX_PLATFORMS = cpu
test: assets lint $(COMPILERS)/installed
	$(PY) third_party/fetch.py --set=tokenizers
	$(PY) -m pytest -m 'not compiles'
	$(COMPILERS)/bin/python -m pytest -m compiles

# The part of the tests that compiles for hardware that is not here.
plan: export JAX_PLATFORMS = cpu
plan: $(COMPILERS)/installed
	$(COMPILERS)/bin/python -m pytest -m compiles

fast: export JAX_PLATFORMS = cpu
fast: lint
	$(PY) -m pytest -m 'not slow'

lint: $(VENV)/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

assets: $(VENV)/installed
	$(PY) third_party/fetch.py --set=demo

# Done again only when one of these files changed.
$(VENV)/installed: setup.py requirements.txt constraints.txt
	@found=; $(PY) -c '$(SUITABLE)' 2>/dev/null && test -x $(VENV)/bin/pip || { \
	  for python in $(or $(PYTHON),python3 python3.12 python3.11); do \
	    $$python -c '$(SUITABLE)' 2>/dev/null && found=$$python && break; \
	  done; \
	  test "$$found" || { echo "make: $(or $(PYTHON),python3) is no Python 3.11\
	 or 3.12 with venv and pip. Install one, or name one: make PYTHON=/path/to/it\
	 $(MAKECMDGOALS)" >&2; exit 1; }; \
	  $$found -m venv --clear $(VENV); }
	@echo "Installing into $(VENV): minutes the first time."
	$(PY) -m pip install --disable-pip-version-check -qq \
	  --editable '.[dev]' --constraint constraints.txt
	@touch $@

# Compilers for hardware that is not here, over the packages of $(VENV). In one
# of their own, because jax reports a CUDA without a GPU at each start.
$(COMPILERS)/installed: $(VENV)/installed
	@echo "Installing compilers for TPU and CUDA into $(COMPILERS)."
	$(PY) -m venv --clear $(COMPILERS)
	$(PY) -c 'import sysconfig; p = sysconfig.get_path("purelib"); \
	  print(f"import site; site.addsitedir({p!r})")' > \
	  $$($(COMPILERS)/bin/python -c 'import sysconfig; \
	  print(sysconfig.get_path("purelib"))')/packages.pth
	$(COMPILERS)/bin/python -m pip install --disable-pip-version-check -qq \
	  --editable '.[plan]' --constraint constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find sesa_jax configs tests third_party -name __pycache__ -prune \
	  -exec rm -rf {} +
