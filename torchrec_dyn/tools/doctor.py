"""Prints versions, machine and build for a bug report, also where the package cannot be imported.

`python -m torchrec_dyn doctor` imports the package before any command is read. Where that import fails, run
this file by its path, which the error names: `python .../torchrec_dyn/tools/doctor.py`. So it imports only
the standard library, and nothing of ours. What may fail or end the process is tried in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_DISTRIBUTIONS = ("torchrec_dyn", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
_SETTINGS = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
_SECONDS = 300

# Flags in /proc/cpuinfo. The core is compiled for these levels (csrc/simd.h); each contains the next one.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}

# Prints one JSON object a line, so that a crash leaves the lines before it. The package is the one of this
# file, not that of the current directory.
_PROBE = """
import json, sys
sys.path[0] = sys.argv[1]

def report(**facts):
    print("\\n" + json.dumps(facts), flush=True)

try:
    import torch
    report(
        cuda=torch.version.cuda,
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    )
    import torchrec_dyn
    report(imported=True, has_kernels=torchrec_dyn.ops.has_cuda_kernels())
except BaseException as error:
    report(error=f"{type(error).__name__}: {error}")
"""


def print_report() -> int:
    """Prints the report, then what is wrong."""
    facts, import_fault = _probe()
    trio, version_fault = _trio()
    # Where the versions do not belong together, the import fails for the same reason.
    wrong = [fault for fault in dict.fromkeys((version_fault, import_fault)) if fault]
    report = {
        "package": str(_PACKAGE),
        **{name: _version(name) for name in _DISTRIBUTIONS},
        "trio": trio,
        "python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.platform()}, {' '.join(platform.libc_ver())}",
        "cpu": f"{_cpu()}, torch uses {facts.get('capability', 'unknown')}",
        "threads": f"{facts.get('threads', 'unknown')} of torch, {os.cpu_count()} CPUs",
        "nvcc": _nvcc(),
        "gpu": _gpus(),
        "gpu of torch": f"CUDA {facts.get('cuda')}, {facts.get('gpus', 'unknown')}",
        "extension": _extension(facts),
        "settings": _settings(),
    }
    lines = [f"{name + ':':<15} {value}" for name, value in report.items()]
    lines += [f"{'wrong:':<15} {fault}" for fault in wrong or ["nothing was found"]]
    home = str(Path.home())
    print("\n".join(line.replace(f"{home}/", "~/") for line in lines))
    return 1 if wrong else 0


def _probe() -> tuple[dict[str, Any], str]:
    """Imports torch and this package in another process; returns its facts, and its error or ""."""
    facts: dict[str, Any] = {}
    command = [sys.executable, "-c", _PROBE, str(_PACKAGE.parent)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return facts, f"the import did not end within {_SECONDS} seconds"
    for line in ended.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    if "error" in facts:
        return facts, _one_line(facts["error"])
    if "imported" not in facts:
        last = ended.stderr.strip().splitlines()[-1:]
        return facts, f"the import ended its process: status {ended.returncode}, {last}"
    return facts, ""


def _trio() -> tuple[str, str]:
    """Returns the trio that is installed, and the error of the check of versions or ""."""
    try:
        return runpy.run_path(str(_PACKAGE / "versions.py"))["check_versions"](), ""
    except ImportError as error:
        return "these versions do not belong together", _one_line(f"ImportError: {error}")


def _one_line(error: str) -> str:
    """Returns an error without the command that prints this report."""
    return " ".join(error.split()).partition(" For a report,")[0]


def _version(name: str) -> str:
    try:
        return metadata.version(name) or "no version"
    except Exception:  # damaged metadata raise errors of many types
        return "none"


def _cpu() -> str:
    """Returns the name of the CPU and the highest level that the core has code for."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    line = re.search(r"^flags\s*: (.*)$", text, re.M)
    flags = set(line[1].split()) if line else set()
    levels = [level for level, needs in _LEVELS.items() if needs <= flags]
    return f"{name[1] if name else platform.machine()}, level {(*levels, 'baseline')[0]}"


def _nvcc() -> str:
    """Returns version and path of the nvcc that setup.py would take."""
    folder = f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    path = shutil.which("nvcc", path=folder) or shutil.which("nvcc")
    if path is None:
        return "none"
    release = re.search(r"release ([\d.]+)", _output([path, "--version"]))
    return f"{release[1] if release else 'unknown'}, {path}"


def _gpus() -> str:
    """Returns name, driver, memory and compute capability of each GPU, as NVIDIA's driver names them."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return "none (no nvidia-smi)"
    asked = "--query-gpu=name,driver_version,memory.total,compute_cap"
    lines = _output([path, asked, "--format=csv,noheader"]).splitlines()
    return "; ".join(lines) or "none"


def _output(command: Sequence[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def _extension(facts: dict[str, Any]) -> str:
    """Returns the file of the compiled extension and what it has kernels for."""
    library = next(iter(sorted(_PACKAGE.glob("_C*.so"))), None)
    if library is None:
        return "not built"
    # Of a library that does not load: nvcc's code is in this section.
    has_kernels = facts.get("has_kernels", b".nv_fatbin\0" in library.read_bytes())
    kernels = "kernels for the CPU and for CUDA" if has_kernels else "kernels for the CPU only"
    return f"{library.name}, {library.stat().st_size:,} bytes, {kernels}"


def _settings() -> str:
    """Returns the environment variables that change what we do, if they are set."""
    ours = sorted(name for name in os.environ if name.startswith("TORCHREC_DYN_"))
    named = [name for name in (*ours, *_SETTINGS) if name in os.environ]
    return ", ".join(f"{name}={os.environ[name]}" for name in named) or "none"


if __name__ == "__main__":
    sys.exit(print_report())
