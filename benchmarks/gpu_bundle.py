"""Packs what the tests need on a machine with a GPU and without a network: `benchmarks/gpu_side.sh` runs them there.

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d wheels \
        fbgemm-gpu==1.6.0 fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0 tensordict==0.15.3 pyvers==0.2.3
    python benchmarks/gpu_bundle.py wheels bundle

That machine has torch 2.11 for CUDA 13 and the usual tools (pytest, hypothesis, nvcc). torchrec 1.8.0 wants the Python
files of fbgemm 1.8.0; the libraries that load beside torch 2.11 are those of 1.6.0. All libraries are 440 MB packed;
those with the ops that TorchRec's dists and the tests call are 8 MB as .xz. TBE is not among them.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import zipfile
from pathlib import Path

# In the order in which they are loaded; each before those that link it.
LIBRARIES = ("asmjit", "fbgemm", "fbgemm_gpu_config", "fbgemm_gpu_sparse_async_cumsum", "fbgemm_gpu_tbe_utils", "fbgemm_gpu_py")
# Ops that Python files of fbgemm and torchrec name at import, of libraries that are left out. Nobody calls them.
UNCALLED = ()

INIT = '''"""Stands for fbgemm_gpu/__init__.py: loads the libraries of the bundle (benchmarks/gpu_bundle.py)."""

from pathlib import Path

import torch

open_source = True
__target__ = __variant__ = __version__ = "INTERNAL"
for _name in {libraries}:
    torch.ops.load_library(str(Path(__file__).with_name(_name + ".so")))
_fragment = torch.library.Library("fbgemm", "FRAGMENT")
for _op in {uncalled}:
    if not hasattr(torch.ops.fbgemm, _op):
        _fragment.define(_op + "() -> ()")
from . import sparse_ops
'''
