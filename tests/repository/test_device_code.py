"""Device code calls nothing that only the host has: nvcc may drop such a call (csrc/both_devices.h)."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")

CONSTEXPR_OF_THE_HOST = """
#include <algorithm>
#include <bit>
__global__ void scan_bits(unsigned* word) { *word = std::countr_zero(*word); }
__global__ void count_bits(unsigned* word) { *word = std::bit_width(*word); }
__global__ void round_up(unsigned* word) { *word = std::bit_ceil(*word); }
__global__ void take_larger(int* words) { words[0] = std::max(words[0], words[1]); }
"""
# nvcc looks for these when it has found none of the others.
OF_THE_HOST = """
int of_the_host(int number) { return number; }
__global__ void scan_by_builtin(unsigned* word) { *word = __builtin_ctz(*word); }
__global__ void call_the_host(int* word) { *word = of_the_host(*word); }
"""


def nvcc_arguments() -> list[str]:
    """Returns CUDA_ARGS of setup.py, which cannot be imported."""
    arguments: list[str] = []
    for line in ast.parse((ROOT / "setup.py").read_text()).body:
        target = getattr(line, "targets", [getattr(line, "target", None)])[0]
        if getattr(target, "id", None) == "CUDA_ARGS":
            arguments += ast.literal_eval(line.value)
    assert arguments
    return arguments


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(
    ("text", "called"),
    [
        (CONSTEXPR_OF_THE_HOST, {"countr_zero", "bit_width", "bit_ceil", "max"}),
        (OF_THE_HOST, {"__builtin_ctz", "of_the_host"}),
    ],
)
def test_a_call_of_the_host_is_an_error_of_nvcc(text: str, called: set[str], tmp_path: Path):
    source = tmp_path / "of_the_host.cu"
    source.write_text(text)
    command = [str(NVCC), *nvcc_arguments(), "-arch=compute_90", "-ptx", str(source)]
    done = subprocess.run([*command, "-o", tmp_path / "ptx"], capture_output=True, text=True)
    assert done.returncode != 0
    assert set(re.findall(r'error: calling a [^(]*\("(\w+)', done.stderr)) == called, done.stderr
