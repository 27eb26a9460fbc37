"""CUDA kernels are built twice (docs/dev/decisions/0027); this is what a machine without a GPU can check."""

import re
import subprocess

import pytest
from device_ops import kernels_of

import torchrec_dyn


@pytest.mark.skipif(not kernels_of("cuda"), reason="torchrec_dyn._C was built without nvcc")
def test_both_builds_have_the_same_kernels():
    assert kernels_of("cuda") == kernels_of("simt")


def test_the_extension_needs_no_library_of_cuda():
    """One wheel serves machines with and without a GPU."""
    command = ["readelf", "--dynamic", "--wide", torchrec_dyn._C.__file__]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", said)
    assert "libtorch_cpu.so" in needed
    assert not [library for library in needed if re.search("cuda|nvidia|nvrtc|cub", library)]
