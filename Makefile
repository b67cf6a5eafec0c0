# TRIME Lab. `make run` and `make test` do everything on a fresh machine; `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
SIZE   ?= paper
PAPER  := $(filter paper,$(SIZE))
$(if $(filter-out paper small tiny,$(SIZE)),$(error SIZE=$(SIZE): choose paper, small or tiny))
ARGS   ?=
# faiss-gpu where there is a CUDA device, else faiss-cpu: they must never be installed together.
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
RUN    := $(VENV)/bin/python cli.py

.DEFAULT_GOAL := help
.PHONY: help install install-dev run test lint type docs pages pictures test-slow test-versions torture test-gpu wikitext103 enwik8 tables bench bench-gpu gpu report clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.run-$(EXTRA) ## .venv with what a run needs, pinned (EXTRA=cpu|gpu chooses FAISS)

install-dev: $(VENV)/.dev-$(EXTRA) ## and with what tests, pages, benchmarks and every optional part need

PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# Another TORCH= is another file, so that it is installed; without one, whatever is there stays.
INSTALLED := $(if $(filter file,$(origin TORCH)),$(firstword $(wildcard $(VENV)/.torch-*)))
INSTALLED := $(or $(INSTALLED),$(VENV)/.torch-$(shell printf %s '$(TORCH)' | cksum | cut -d' ' -f1))
$(INSTALLED):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	rm -f $(VENV)/.torch-*
	touch $@

$(VENV)/bin/uv: | $(INSTALLED)
	$(PIP) uv || touch $@

# uv takes seconds where pip takes minutes; pip does it where uv cannot, as behind a proxy that only pip knows.
define into_venv
$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python -c requirements.txt -e ".[$(EXTRAS)]" || $(PIP) -c requirements.txt -e ".[$(EXTRAS)]"
touch $@
endef

$(VENV)/.run-%: EXTRAS = $*,lab
$(VENV)/.run-%: pyproject.toml requirements.txt $(INSTALLED) | $(VENV)/bin/uv
	$(into_venv)

$(VENV)/.dev-%: EXTRAS = $*,lab,dev
$(VENV)/.dev-%: pyproject.toml requirements.txt $(INSTALLED) | $(VENV)/bin/uv
	$(into_venv)
	@echo "installed: make test, or $(RUN) --help"

run: install ## does a memory help? a plain model, memories at test, and training for them, on the built-in corpus, in some 5 minutes on 2 cores
	$(RUN) table=first

# One thread each: tests are small, and threads that wait for one another take what the other process needs.
test: install-dev ## ruff, mypy, the pages and all tests but the slow ones, in random order, by two processes
	$(MAKE) --no-print-directory -j 2 lint type docs
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal

lint: install-dev ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

type: install-dev ## mypy
	$(VENV)/bin/mypy

docs: install-dev ## the pages of docs/ and the reference of the Python API, into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

pages: install-dev ## README.md and the pages with measurements, from docs/templates and benchmarks/results; names results older than their code
	$(VENV)/bin/python -m benchmarks.pages
	$(VENV)/bin/python -m benchmarks.older

pictures: install-dev ## the pictures of docs/findings, from benchmarks/results
	$(VENV)/bin/python -m benchmarks.pictures

test-slow: install-dev ## the tests that take minutes
	$(VENV)/bin/python -m pytest -m slow

# torch comes by pip, from wherever that finds it (TORCH_FROM="--index-url …"); all else in its newest version, without pins.
VERSIONS ?= 4.57.1 5.18.0 latest
PYTHONS ?= python3.11
DOORS := tests/text_memory tests/kv/test_evicting_cache.py tests/serving
test-versions: $(VENV)/bin/uv ## the tests of memories and EvictingCache with other versions of transformers and Python (VERSIONS="5.18.0 latest" PYTHONS="python3.13")
	for python in $(PYTHONS); do for version in $(VERSIONS); do \
	  env=.versions/$$(basename $$python)-$$version; \
	  test -x $$env/bin/python || { $(VENV)/bin/uv venv --quiet --seed --python $$python $$env && $$env/bin/python -m pip install --quiet $(TORCH) $(TORCH_FROM); } || exit 1; \
	  $(VENV)/bin/uv pip install --quiet --upgrade --python $$env/bin/python -e ".[cpu,decoder,lab,serve]" accelerate beartype hypothesis openai peft pytest pytest-randomly pytest-xdist \
	    transformers$$(test $$version = latest || echo ==$$version) $(TORCH) || exit 1; \
	  $$env/bin/python -c "import sys, transformers; print('Python', sys.version.split()[0], 'transformers', transformers.__version__)"; \
	  OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $$env/bin/python -m pytest -q -n 2 $(DOORS) || exit 1; \
	done; done

torture: install-dev ## malformed settings, damaged files, hostile text, two at once, kills: counts of each outcome (hours; ARGS="files --count 50")
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(VENV)/bin/python -m scripts.torture $(ARGS)

test-gpu: install-dev ## the tests that need a CUDA device
	$(VENV)/bin/python -m pytest -m gpu tests/test_gpu.py

wikitext103: install ## TrimeLM_ext on WikiText-103 as TRIME Table 2 (SIZE=tiny: the same path in minutes; ARGS=dataset.path=DIR)
	$(RUN) $(if $(PAPER),experiment=reproduce/table2/trime_ext,experiment=trime_ext size=$(SIZE) dataset=wikitext103 dataset.documents=100) $(ARGS)

enwik8: install ## TrimeLM_long on enwik8 as TRIME Table 4 (SIZE=tiny, ARGS=dataset.path=FILE)
	$(RUN) $(if $(PAPER),experiment=reproduce/table4/trime_long,experiment=trime_long size=$(SIZE) dataset=enwik8) $(ARGS)

KEPT ?= outputs/tables
tables: SIZE := $(if $(filter command line,$(origin SIZE)),$(SIZE),small)
tables: RUN += $(if $(filter cpu,$(EXTRA)),trainer.precision=bf16-mixed) # as the kept ones, on any processor
ABLATIONS := $(filter-out memory_size,$(notdir $(basename $(wildcard conf/experiment/ablation/*.yaml))))
BUDGET := evaluate.tokens=80k seed=0,1,2
tables: install ## the papers' tables in small (SIZE=small, three seeds; each resumes), their results.json in outputs/tables
	for name in main test_memory segment_length trained_for; do \
	  $(RUN) -m table=$$name size=$(SIZE) $(BUDGET) report.keep=$(KEPT)/$$name $(ARGS) || exit 1; done
	$(RUN) experiment=ablation/memory_size size=$(SIZE) report.name=memory_size report.keep=$(KEPT)/memory_size $(ARGS)
	for name in $(ABLATIONS); do \
	  $(RUN) experiment=ablation/$$name size=$(SIZE) $(BUDGET) report.name=$$name report.keep=$(KEPT)/$$name $(ARGS) || exit 1; done
	$(RUN) table=domain size=$(SIZE) $(BUDGET) report.keep=$(KEPT)/domain dataset@evaluate.dataset=folder_code \
	  evaluate.dataset.path=$$($(VENV)/bin/python -c 'import networkx; print(networkx.__path__[0])') $(ARGS)

BENCHMARKS := objective step packing external datastore startup memorizing attendre mixture
bench: install-dev ## every claim of speed, side by side, into benchmarks/results (35 minutes on 2 cores)
	for name in $(BENCHMARKS); do $(VENV)/bin/python -m benchmarks $$name --device cpu || exit 1; done

bench-gpu: install-dev ## the same on the CUDA device
	for name in $(BENCHMARKS); do \
	  $(VENV)/bin/python -m benchmarks $$name --device cuda --json benchmarks/results/gpu/$$name.json || exit 1; done

gpu: install-dev ## minutes on a CUDA device: tests, benchmarks, trainings, each of 3 minutes at most, and it goes on where it was (TEXT=DIR of novels, MINUTES=12, MODEL=DIR)
	$(VENV)/bin/python -m benchmarks.on_device --text $(or $(TEXT),$(error TEXT=DIR: name a folder of text to train on)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

report: install ## one table of all runs under outputs/
	$(RUN) stages=[report] report.runs='outputs/runs/**'

clean: ## caches (not data/ and outputs/)
	rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -exec rm -rf {} +
