# `make report` and `make test` are all the set-up there is: the first call makes .venv and installs into it.
#
#   make report            train, profile, write reports/distmuon.html and the pages it links to; QUICK=1: smallest parameters
#   make compare A=... B=...   two traces, or folders of ranks, side by side: reports/compare.html; RANGE=... RANGE_B=...
#   make test              the tests; SLOW=1 runs the slow ones too        PYTEST_ARGS="-k plan": handed to pytest
#   make batch             a grid of parameters, a folder a run, and runs/index.html; GRID=notebooks/grids/...yaml
#   make site              a static folder, site/, from the latest run of each notebook
#   make lab               JupyterLab, opened on the tour
#   make lint              ruff, mypy, notebooks without outputs           make format: mend what ruff can
#   make setup             just the environment                            PIP_ARGS=...: handed to pip (another build of torch)
#   make clean             remove what the others made, .venv too, but not runs/

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
QUICK ?=
SLOW ?=

BIN := .venv/bin
INSTALLED := .venv/installed
REPORT := reports/distmuon.html
ABLATION := reports/ablation.html
TRACES := reports/traces.html
SCALE := reports/scale.html
TRAINING := reports/training.html
TOUR := reports/tour.html
PROFILE := runs/$(shell date -u +%Y%m%dT%H%M%S)-report
QUICK_PROFILE := -p workload tiny -p steps 1 -p repeats 2
QUICK_ABLATION := -p workload tiny -p timed tiny -p steps 1 -p tokens 16 -p turns 5
QUICK_SCALE := -p workload tiny -p ranks 8 -p ep 4 -p sizes '4, 8' -p layers '1, 2' \
	-p dense qwen3-8b/32 -p dense_sizes '16, 32' -p checked tiny -p turns 1
QUICK_TRAINING := -p steps 8 -p tokens 16 -p every 2
GRID ?= notebooks/grids/packing.yaml
CODE := distmuon scripts tests notebooks

.PHONY: setup report compare batch site test lab lint format clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("distmuon needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

report: $(INSTALLED)
	$(BIN)/python scripts/run_notebook.py notebooks/00_tour.ipynb --html $(TOUR) \
		--link "The published packing profile" $(notdir $(REPORT))
	$(BIN)/python scripts/run_notebook.py notebooks/05_training.ipynb $(if $(QUICK),$(QUICK_TRAINING)) \
		--html $(TRAINING) --link "The published packing profile" $(notdir $(REPORT))
	$(BIN)/python scripts/run_notebook.py notebooks/02_ablation.ipynb $(if $(QUICK),$(QUICK_ABLATION)) \
		--html $(ABLATION) --link "The published packing profile" $(notdir $(REPORT))
	$(BIN)/python scripts/run_notebook.py notebooks/03_scale.ipynb $(if $(QUICK),$(QUICK_SCALE)) \
		--html $(SCALE) --link "The published packing profile" $(notdir $(REPORT))
	$(BIN)/python scripts/run_notebook.py notebooks/01_published_profile.ipynb $(if $(QUICK),$(QUICK_PROFILE)) \
		--out $(PROFILE) --html $(REPORT) --link "A tour" $(notdir $(TOUR)) --link "A switch at a time" $(notdir $(ABLATION)) \
		--link "A trillion parameters, planned" $(notdir $(SCALE)) --link "Two traces side by side" $(notdir $(TRACES)) \
		--link "Training with DistMuon and with AdamW" $(notdir $(TRAINING))
	$(BIN)/python scripts/run_notebook.py notebooks/04_compare_traces.ipynb -p a ../$(PROFILE)/files \
		-p label_a baseline -p range_a 'distmuon.profile/baseline/* > Optimizer.step#DistMuon.step' \
		-p label_b batched -p range_b 'distmuon.profile/batched/* > Optimizer.step#DistMuon.step' \
		--html $(TRACES) --link "The published packing profile" $(notdir $(REPORT))
	@echo "all pages: $(dir $(REPORT)), beginning with $(REPORT)"

# A notebook runs in its own folder.
beside_notebooks = $(if $(filter /%,$(1)),$(1),../$(1))

compare: $(INSTALLED)
	@test -n "$(A)" || { echo "name two traces, or two folders of ranks: make compare A=... B=..." >&2; exit 2; }
	$(BIN)/python scripts/run_notebook.py notebooks/04_compare_traces.ipynb -p a $(call beside_notebooks,$(A)) \
		$(if $(B),-p b $(call beside_notebooks,$(B))) $(if $(RANGE),-p range_a '$(RANGE)') \
		$(if $(RANGE_B),-p range_b '$(RANGE_B)') --html reports/compare.html

test: $(INSTALLED)
	$(BIN)/python -m pytest $(if $(SLOW),,-m "not slow") $(PYTEST_ARGS)

batch: $(INSTALLED)
	$(BIN)/python scripts/run_batch.py $(GRID)

site: $(INSTALLED)
	$(BIN)/python scripts/build_site.py

lab: $(INSTALLED)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_tour.ipynb

lint: $(INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/nbstripout --verify notebooks/*.ipynb
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/nbstripout notebooks/*.ipynb

clean:
	rm -rf .venv build *.egg-info reports site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(CODE) -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
