# Each target makes what it needs. Wanted on the machine: Python >= 3.11, make, a C++ compiler.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Tests of the runtime and of whole programs run apart from the others, which change PyTorch's own settings: two at a
# time, as the others do, but for those that bound seconds and processor time. The longest come first.
APART := tests/cluster tests/tools tests/runtime
WATCHED := tests/runtime/test_failures.py tests/tools/test_answer_time.py
# Tests of what `make ecosystem` installs, and of pages that name it.
LIBRARIES := tests/ecosystem tests/option tests/docs
READY := .venv/.ready
# Tests that enter the device, and what they should reach: each fallback by one that says what it is for.
ENTERING := tests/test_autoload.py tests/device tests/option tests/loops tests/opinfo tests/capture/test_decompositions.py
ENTERED := moaic/device/*,moaic/capture/decompositions.py
MEASURES := out/coverage/data
# With what tests alone want. Where torchao is installed, transformers imports it, and it names the files that a PyTorch
# for CPUs cannot load: not what the demo should begin with.
WHOLE := .venv/.whole

# Where byte code may not be kept, each of the hundreds of processes of a run compiles moaic's modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo cluster-demo triton-demo tutorial test exact coverage architectures opinfo check bench docs guide wheel \
	ecosystem oldest newest

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: $(READY) ## train a 20 M Llama for 30 steps on one virtual accelerator made of two workers
	MOAI_FLAVOR=2 $(BIN)/python examples/train_llama2.py --device moai --steps 30 --save out/demo

cluster-demo: $(READY) ## train the demo's Llama on two nodes of Ray, which are network namespaces: needs root
	PYTHONPATH=. $(BIN)/python bench/two_hosts.py --rounds 1

triton-demo: $(WHOLE) ## train a tiny Llama on two GPUs that are not here: their Triton kernels are interpreted
	$(BIN)/python examples/emulated_gpus.py --plan dp=2

tutorial: $(READY) ## prepare text and train the tutorials' Llama 2 on it, on all of this machine
	$(BIN)/python tutorial/prepare_llama2.py
	$(BIN)/python tutorial/train_llama2.py

test: $(WHOLE) ## run every test once, but for the long proofs
	$(BIN)/python -m pytest -n 2 --dist worksteal $(APART:%=--ignore=%)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(APART) $(WATCHED:%=--ignore=%)
	$(BIN)/python -m pytest $(WATCHED)

exact: $(WHOLE) ## prove every plan of every model of tests/models exact, on virtual ranks and on workers; the other long tests
	$(BIN)/python -m pytest tests -m exact --timeout 3600 -n 2 --dist worksteal $(APART:%=--ignore=%) $(LIBRARIES:%=--ignore=%)
	$(BIN)/python -m pytest $(APART) -m exact --timeout 3600

coverage: $(WHOLE) ## say which lines and branches of the device no test enters; an error below 95 %
	rm -rf $(dir $(MEASURES))
	$(BIN)/python -m coverage run --data-file=$(MEASURES) --source=moaic/device,moaic/capture \
		-m pytest -n 2 --dist loadfile $(ENTERING)
	$(BIN)/python -m coverage combine --quiet --data-file=$(MEASURES)
	$(BIN)/python -m coverage report --data-file=$(MEASURES) --include='$(ENTERED)' --show-missing --fail-under=95

architectures: $(WHOLE) ## try the architectures of transformers under plans of every kind, for hours; goes on where it was stopped
	$(BIN)/python -m tests.architectures.sweep $(ONLY)

opinfo: $(WHOLE) ## run PyTorch's own database of ops, modules and optimizers on the device, beside the CPU; goes on where it was stopped
	$(BIN)/python -m tests.opinfo.run

check: $(WHOLE) ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(READY) ## measure moaic beside eager, Inductor, DDP and FSDP2
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-autosave --benchmark-storage=bench/results

docs: $(READY) ## build the documentation into out/site, every warning an error
	$(BIN)/mkdocs build --strict

guide: $(READY) ## predict the tables of the parameter guide anew
	$(BIN)/python docs/parameters.py

wheel: $(READY) ## build a wheel into dist, from the source archive that is put beside it
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

ecosystem: $(WHOLE) ## install the libraries that people use around PyTorch, and train with each of them
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ecosystem]'
	$(BIN)/python -m pytest $(LIBRARIES) -m exact

oldest: ## run every test once with the oldest PyTorch and Triton that pyproject.toml promises, in an environment of some GB
newest: ## run every test once with the newest that there are, in another
oldest: TORCH = $$(sed -nE 's/^ *"(torch|triton)>=([0-9.]+)".*/\1==\2.*/p' pyproject.toml)
newest: TORCH = torch
oldest newest: $(WHOLE)
	$(BIN)/python -m venv out/$@
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > out/$@/constraints.txt
	out/$@/bin/python -m pip install --quiet --upgrade --constraint out/$@/constraints.txt \
		--editable '.[dev,float8]' $(TORCH)
	$(MAKE) test BIN=out/$@/bin

# The environment, made again whenever what it is made from changes.
$(READY): constraints.txt pyproject.toml
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; name one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(WHOLE): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,float8]'
	@touch $@
