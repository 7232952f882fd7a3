# The two commands of the README are `make demo` and `make test`; each sets up all that it needs.
PYTHON ?= python3
VENV   ?= .venv
PIP    := $(VENV)/bin/pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile
PY     := $(VENV)/bin/python
# Python 3.11 has a CPU build of exactly this version; another one may be a CUDA build of gigabytes.
TORCH  ?= torch==2.13.0
STAMP  := $(VENV)/.installed
SOURCES := $(wildcard herald_exec/kernels/*.pyx herald_exec/kernels/csrc/*)

# Where it is set, each of a test run's many processes would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test-emulated demo test lint types imports unit bench-simulator bench-gpu bench-gpu-report clean
test: lint types imports unit          ## everything that CI runs

$(STAMP): pyproject.toml CMakeLists.txt $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/.setup-began
	$(INSTALL) "pip>=25.1" "$(TORCH)"
	$(INSTALL) scikit-build-core cython cython-cmake cmake ninja
	$(INSTALL) --group test
	$(INSTALL) --no-build-isolation --editable ".[exec,calibration,reports]"
	@# pip compiles on one core, tests of other packages included; like pip, it goes on where a file is no valid Python.
	$(PY) -m compileall -qq -j 0 -x '/tests/|/transformers/models/|/lm_eval/tasks/' $(VENV)/lib || true
	@echo "set up in $$(($$(date +%s) - $$(cat $(VENV)/.setup-began))) s (downloads and build)" >&2
	touch $@

# One thread a stream: the streams share the cores, not the libraries within them.
DEMO ?= out/demo
demo: $(STAMP)                         ## measure this machine, run and simulate the same, one page in $(DEMO)/
	@date +%s > $(VENV)/.demo-began
	@echo "measuring this machine" >&2
	OMP_NUM_THREADS=1 $(PY) -m calibration measure --quick --max-spread 0.5 --out $(DEMO)/this-machine.toml
	OMP_NUM_THREADS=1 $(PY) -m calibration reconcile --hardware $(DEMO)/this-machine.toml --out $(DEMO)/runs --again
	@echo "asking the model that ships, with Dense and with HERALD" >&2
	OMP_NUM_THREADS=1 $(PY) -m herald_exec.reference answers --task kv --task hop --task code --task log --task arith \
		--samples 5 --out $(DEMO)/answers.json
	$(PY) -m reports build --runs $(DEMO)/runs --hardware $(DEMO)/runs/profile.toml --answers $(DEMO)/answers.json \
		--out $(DEMO)/report.html
	@echo "took $$(($$(date +%s) - $$(cat $(VENV)/.demo-began))) s after set-up; open $(DEMO)/report.html" >&2

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
types: $(STAMP)
	$(VENV)/bin/mypy --num-workers 2
imports: $(STAMP)
	$(VENV)/bin/lint-imports
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadgroup

bench-simulator:                       ## event and fast mode as an installed wheel runs them, in a venv of its own
	test -x build/bench/bin/python || $(PYTHON) -m venv build/bench
	build/bench/bin/pip --disable-pip-version-check install --quiet --force-reinstall .
	OMP_NUM_THREADS=1 build/bench/bin/python benchmarks/bench_simulator.py

bench-gpu:                             ## needs a CUDA device and a CUDA build of PyTorch; resumes where it stopped
	$(PYTHON) -m benchmarks.gpu --plan all

NAME ?= this-machine
RESULTS = benchmarks/results/$(NAME)
bench-gpu-report:                      ## measure this machine, predict, run, compare: docs/repeat-on-your-gpu.md
	test -f profiles/$(NAME).toml || $(PYTHON) -m calibration measure --device cuda --model llada2-mini --name $(NAME) --out profiles/$(NAME).toml
	test -f $(RESULTS)/predictions.json || $(PYTHON) -m calibration interventions --hardware profiles/$(NAME).toml --out $(RESULTS)/predictions.json
	$(PYTHON) -m benchmarks.gpu --plan final --hardware profiles/$(NAME).toml --out $(RESULTS) --minutes 9
	$(PYTHON) -m calibration reconcile --hardware profiles/$(NAME).toml --model llada2-mini --measured $(RESULTS)
	$(PYTHON) -m calibration interventions --predictions $(RESULTS)/predictions.json --measured $(RESULTS)
	$(PYTHON) -m calibration ceilings --hardware profiles/$(NAME).toml --measured $(RESULTS)

test-emulated: $(STAMP)                ## the kernels on older and newer processors than this one; minutes; needs qemu-user
	PYTHON=$(abspath $(PY)) tests/kernels/emulated.sh

clean:
	rm -rf $(VENV) build dist
