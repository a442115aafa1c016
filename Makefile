# Everything a newcomer needs: `make demo`, `make test`. The first call sets up .venv and builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# AUTO, ON or OFF (docs/building.md). CUDA is empty if the CUDA part is left out. Its conditions are those of
# cmake/Cuda.cmake.
JAX_EP_CUDA ?= AUTO
CUDA_ON := ON
CUDA_AUTO := $(CUDAARCHS)$(wildcard /dev/nvidiactl /dev/dxg)
CUDA := $(CUDA_$(JAX_EP_CUDA))
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(shell find ffi -type f)
# XLA:CPU needs two threads a device, or many launches in flight hang it (docs/sharp_bits.md).
export NPROC ?= 32

.PHONY: demo test test-slow test-frameworks test-gpu test-gpu-processes test-gpu-ranks stress-gpu faults-gpu lint
.PHONY: .frameworks-tested format check-cuda12 sanitize bench docs wheels release environment clean
.NOTPARALLEL:  # two pips cannot install into one environment

demo: $(VENV)/.group-demo $(VENV)/.built
	$(BIN)/python -m jax_ep demo $(ARGS)

# All tests but those with the marker `slow`, which `make test-slow` runs (pyproject.toml describes the markers).
TEST_GROUPS := $(addprefix $(VENV)/.group-,demo test bench examples)
TEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(or $(JOBS),2) --dist worksteal
test: $(TEST_GROUPS) $(VENV)/.built
	$(TEST) -m "not slow" $(ARGS)

test-slow: $(TEST_GROUPS) $(VENV)/.built
	$(TEST) -m slow $(ARGS)

# The examples for MaxText and tunix, whose packages need Python 3.12, an older jax than the newest, and an environment
# of their own.
test-frameworks:
	$(MAKE) .frameworks-tested VENV=.venv-frameworks PYTHON=$(or $(FRAMEWORKS_PYTHON),python3.12)
.frameworks-tested: $(addprefix $(VENV)/.group-,frameworks test) $(VENV)/.built
	$(TEST) -m slow tests/docs/test_frameworks.py $(ARGS)

# The same suite on the GPUs of this host, with the jax, pytest and extension of the Python that is active; then
# what moves rows once more, few tokens the way of many, and by plain loads and stores instead of bulk copies.
# (Not the documentation and the examples, which run on the CPU and need more packages.)
GPU_TEST := JAX_PLATFORMS=cuda,cpu $(PYTHON) -P -m pytest -p no:cacheprovider -p no:benchmark --timeout 60 --ignore tests/docs
test-gpu:
	$(GPU_TEST) -m "not no_gpu and not gpu_processes" -k "not eager" $(ARGS)
	JAX_EP_NO_ARENA=1 $(GPU_TEST) -m moves_rows -k "not eager" $(ARGS)
	JAX_EP_NO_ARENA=1 JAX_EP_PLAIN_COPIES=1 $(GPU_TEST) -m moves_rows -k "not eager" $(ARGS)

lint: $(addprefix $(VENV)/.group-,demo bench lint) $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')

format: $(VENV)/.group-lint
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')

# What communicates, with the GPUs shared among PROCESSES processes, of which several share one if there are fewer;
# and what such processes must do besides.
test-gpu-processes:
	JAX_PLATFORMS=cuda $(PYTHON) -P -m pytest -p no:cacheprovider -p no:benchmark tests/group -m gpu_processes $(ARGS)
	JAX_PLATFORMS=cuda $(PYTHON) tests/support/processes.py $(or $(PROCESSES),2) --ignore tests/docs \
		--ignore tests/commands -m processes -k "not eager" $(ARGS)

# Ops of RANKS ranks, as so many processes that share the GPUs.
test-gpu-ranks:
	$(PYTHON) tests/support/many_gpu_ranks.py $(or $(RANKS),36)

# Random shapes and routings on the GPUs of this host, for minutes; each rank of an op is held up for a random
# time before it enters and before it leaves, and outputs are first filled with a poison pattern. Then layers
# whose communication runs beside products.
stress-gpu:
	JAX_PLATFORMS=cuda,cpu $(PYTHON) tests/support/stress.py $(ARGS)
	JAX_PLATFORMS=cuda,cpu $(PYTHON) tests/support/stress_layers.py

# Ranks that come late, stall, die or call something else: what the others then get (docs/sharp_bits.md).
faults-gpu:
	JAX_PLATFORMS=cuda,cpu $(PYTHON) tests/support/faults.py $(ARGS)

# The CPU handlers under AddressSanitizer + UBSan, and what threads share under ThreadSanitizer.
sanitize: $(VENV)/.group-test $(VENV)/.built
	tests/native/sanitize.sh $(BIN)/python

# Compiles the CUDA part with the headers and the assembler of CUDA 12.9. ARGS are the files of kernels, by default all.
check-cuda12: $(addprefix $(VENV)/.group-,build cuda cuda12)
	tests/native/check_cuda12.sh $(BIN)/python $(ARGS)

# The documentation as a site, in build/site; a warning is an error. Its notebooks run, on the CPU.
docs: $(addprefix $(VENV)/.group-,docs demo bench examples) $(VENV)/.built
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Wheels in dist/, CPU and CUDA in one, each tried in a fresh environment. That of 3.12 serves all newer Pythons.
wheels: $(VENV)/.group-wheels
	BIN=$(BIN) release/wheels.sh $(or $(PYTHONS),python3.11 python3.12)

# What a release publishes, in dist/: the source archive, the wheels built from it, and checksums.
release: $(VENV)/.group-wheels
	@test -z "$$(git status --porcelain)" || { echo "make release: commit or remove what git status lists" >&2; exit 1; }
	rm -rf dist build/release
	$(BIN)/python -m build --sdist --no-isolation --skip-dependency-check --outdir dist
	mkdir -p build/release && tar -xf dist/jax_ep-*.tar.gz -C build/release --strip-components 1
	BIN="$(CURDIR)/$(BIN)" build/release/release/wheels.sh $(or $(PYTHONS),python3.11 python3.12)
	mv build/release/dist/*.whl dist/
	cd dist && sha256sum -- * > SHA256SUMS

# Times the ops on the devices that are here; ARGS=--peers also times implementation="xla" and JAX's collectives.
bench: $(VENV)/.group-bench $(VENV)/.built
	$(BIN)/python -m jax_ep bench $(ARGS)

$(VENV)/.created:
	@echo "Creating the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# Installs one of the dependency groups of pyproject.toml.
$(VENV)/.group-%: $(VENV)/.created pyproject.toml
	@echo "Installing the dependency group $* into $(VENV)"
	@$(BIN)/python -m pip install --quiet --group $*
	@touch $@

# Installs several at once, which takes less time than one after the other.
GROUPS := build cuda cuda12 demo bench examples lint docs test wheels
environment: $(VENV)/.created pyproject.toml
	@$(BIN)/python -m pip install --quiet $(addprefix --group ,$(GROUPS))
	@touch $(addprefix $(VENV)/.group-,$(GROUPS))

# The package itself is linked in, so that edited Python files count at once.
$(VENV)/.built: $(VENV)/.group-build $(if $(CUDA),$(VENV)/.group-cuda) $(SOURCES)
	@echo "Compiling the CPU handlers$(if $(CUDA), and the CUDA kernels (several minutes), (half a minute))"
	@$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps \
		--config-settings=cmake.define.JAX_EP_CUDA=$(JAX_EP_CUDA) --editable .
	@touch $@

clean:
	rm -rf $(VENV) build dist
