"""Builds the one extension, torchrec_dyn._C; everything else is said in pyproject.toml."""

import math
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
# TORCHREC_DYN_BUILD=cpu leaves the CUDA half out, `here` does where torch sees no GPU. simt and ptx make a
# library for tests (csrc/simt.h), no extension: simt has the kernels of g++, ptx those of nvcc, with an
# emulator of PTX (tests/csrc/ptx).
BUILD = os.environ.get("TORCHREC_DYN_BUILD", "")
CUDA_BIN = f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
NVCC = shutil.which("nvcc", path=CUDA_BIN) or shutil.which("nvcc")
if BUILD in ("cpu", "simt") or (BUILD == "here" and not torch.cuda.is_available()):
    NVCC = None
NAMED_ARCHITECTURES = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()


def _architectures() -> list[str]:
    """Returns TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), else what this machine's GPUs are, else 9.0.

    What nobody has named has its PTX, too: the ptx build tests it as it is in these objects.
    """
    if NAMED_ARCHITECTURES:
        return NAMED_ARCHITECTURES
    gpus = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    *others, last = [f"{major}.{minor}" for major, minor in sorted(gpus)] or ["9.0"]
    return [*others, f"{last}+PTX"]


def _sources() -> list[str]:
    """Returns the C++ files of this build, relative to ROOT."""
    every = {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp")}
    device = {path for path in every if path.endswith("_cuda.cpp")}
    if BUILD == "simt":
        return sorted({*device, "csrc/library.cpp"})
    if BUILD == "ptx":
        emulator = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/csrc/ptx/*.cpp")}
        emulator -= {"tests/csrc/ptx/test_library.cpp"}  # for the emulator's own tests
        host_half = {*device, "csrc/library.cpp"}
        return [_one_file_of(host_half, "host_half"), _one_file_of(emulator, "emulator")]
    return sorted(every if NVCC else every - device)


def _one_file_of(sources: set[str], name: str) -> str:
    """Writes a file that includes others: headers are read once, in a third of the time."""
    path = ROOT / f"build/objects-ptx/{name}.cpp"
    text = "".join(f'#include "{ROOT / one}"\n' for one in sorted(sources))
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path.relative_to(ROOT))


# A wheel built anywhere runs on any x86-64 or aarch64: no -march. Threads come from torch's
# parallel_for: no OpenMP flag of ours. The stable ABI of torch 2.11 (torch/csrc/stable/version.h)
# and the limited API of Python 3.10 make one wheel serve all later versions of both.
COMPILE_ARGS = [
    "-O3",
    "-fno-math-errno",  # sqrt is one instruction, with the same bits
    "-g1",  # Python's own -g takes a third of the time of compiling; this keeps lines for a backtrace
    "-std=c++20",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits on every machine, whether it has fused multiply-add or not
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    *(["-DTORCHREC_DYN_SIMT"] if BUILD in ("simt", "ptx") else []),
    *(["-DTORCHREC_DYN_PTX", "-O1", "-g0"] if BUILD == "ptx" else []),
]

# The same rules for the bits: no fused multiply-add; IEEE division and square root are nvcc's default.
CUDA_ARGS = ["-O3", "-std=c++20", "-fmad=false", "-Xcompiler=-fPIC"]
CUDA_ARGS += ["-Xcompiler=-fvisibility=hidden", "-Xcompiler=-ffp-contract=off"]
# A kernel that spills registers to memory, or keeps an array there, is an error. Kernels of CUB are as NVIDIA
# tuned them: one of its sort spills for 10.0 and 12.0.
CUDA_ARGS += ["-Xptxas=--warn-on-spills", "-Xptxas=--warn-on-local-memory-usage"]
OWN_CUDA_ARGS = ["-Xptxas=--warning-as-error"]
FILE_OF_CUB = "simt_sort.cu"
# So is a function of the host that a kernel calls, constexpr (20013, 20015) or not: nvcc only warns. With
# --expt-relaxed-constexpr it would not even warn, and drop the host's builtins in such a function: then
# std::countr_zero of any word is 32.
CUDA_ARGS += ["-Werror=cross-execution-space-call", "--diag-error=20013,20015"]
if not NAMED_ARCHITECTURES or BUILD == "ptx":
    CUDA_ARGS += ["--no-compress"]  # the emulator reads PTX as a text


def _code_of(architecture: str) -> str:
    """Returns nvcc's argument for one architecture, such as "9.0" or "12.0+PTX"."""
    number = architecture.removesuffix("+PTX").replace(".", "")
    code = f"[sm_{number},compute_{number}]" if architecture.endswith("+PTX") else f"sm_{number}"
    if BUILD == "ptx" and NAMED_ARCHITECTURES:
        code = f"compute_{number}"
    return f"-gencode=arch=compute_{number},code={code}"


def _said_by_nvcc(pattern: str) -> str:
    """Returns a folder of nvcc's. What is called nvcc may be a script that starts nvcc."""
    call = subprocess.run([str(NVCC), "--dryrun", "x.cu"], capture_output=True, text=True)
    return re.search(pattern, call.stderr)[1]


def _compile_cuda(folder: Path) -> list[str]:
    """Compiles every csrc/**/*.cu whose object is older than what it includes; returns the objects."""
    codes = map(_code_of, _architectures())
    command = [str(NVCC), *CUDA_ARGS, *codes, f"-I{ROOT / 'csrc'}"]

    def compiled(source: Path) -> str:
        target = folder / source.relative_to(ROOT).with_suffix(".cu.o")
        made_by = target.with_suffix(".command")
        target.parent.mkdir(parents=True, exist_ok=True)
        needs = target.with_suffix(".d")
        own = [] if source.name == FILE_OF_CUB else OWN_CUDA_ARGS
        call = [*command, *own, "-MD", "-MF", str(needs), "-c", str(source), "-o", str(target)]
        if target.exists() and made_by.exists() and made_by.read_text() == " ".join(call):
            inputs = needs.read_text().partition(":")[2].replace("\\\n", " ").split()
            times = [os.path.getmtime(one) if os.path.exists(one) else math.inf for one in inputs]
            if max(times) <= target.stat().st_mtime:
                return str(target)
        made_by.unlink(missing_ok=True)
        subprocess.run(call, check=True)
        made_by.write_text(" ".join(call))
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, sorted(ROOT.glob("csrc/**/*.cu"))))


# PyPI shows the README without the files beside it: no pictures, links as plain text.
README = re.sub(r"!\[[^]]+\]\((?!https://)[^)]+\)\n\n", "", (ROOT / "README.md").read_text())
README = re.sub(r"\[([^]]+)\]\((?!https://)[^)]+\)", r"\1", README)


class BuildCore(BuildExtension):
    """Keeps one folder of objects for editable installs and wheels: each compiles what changed."""

    def initialize_options(self) -> None:
        """Names the folder, which setuptools else makes anew for every editable install."""
        super().initialize_options()
        self.build_temp = f"build/objects-{BUILD}" if BUILD in ("simt", "ptx") else "build/objects"

    def build_extensions(self) -> None:
        """Compiles the CUDA half first, if there is a compiler for it."""
        [extension] = self.extensions
        if BUILD == "ptx":
            if NVCC is None:
                raise SystemExit(
                    "setup.py: expected nvcc for the ptx build, got none. Set CUDA_HOME."
                )
            # The objects of the extension itself; those of a named architecture are another compilation.
            folder = f"objects-ptx/{NAMED_ARCHITECTURES[0]}" if NAMED_ARCHITECTURES else "objects"
            extension.extra_objects += _compile_cuda(ROOT / "build" / folder)
            extension.include_dirs.append(_said_by_nvcc(r'INCLUDES="-I([^"]+)"'))
            # The emulator's functions of CUDA are all there are: one that is missing is an error here.
            extension.extra_link_args.append("-Wl,-z,defs")
        elif NVCC:
            extension.extra_objects += _compile_cuda(ROOT / self.build_temp)
            extension.library_dirs.append(_said_by_nvcc(r"TOP=(\S+)") + "/lib64")
            extension.libraries += ["cudart_static", "dl", "rt", "pthread"]
        elif not BUILD:
            print("torchrec_dyn: found no nvcc, so there are no CUDA kernels. Set CUDA_HOME.")
        super().build_extensions()


setup(
    long_description=README,
    long_description_content_type="text/markdown",
    ext_modules=[
        CppExtension(
            f"torchrec_dyn_{BUILD}" if BUILD in ("simt", "ptx") else "torchrec_dyn._C",
            _sources(),
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": COMPILE_ARGS},  # torch adds -DPy_LIMITED_API=0x030A0000
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
