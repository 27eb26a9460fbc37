r"""Packs what gpu_side.sh needs on a machine with a GPU and without a network.

    pip download --no-deps --only-binary=:all: -d wheels \
        --python-version 3.12 --platform manylinux_2_28_x86_64 \
        fbgemm-gpu==1.6.0 fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0 tensordict==0.15.3 pyvers==0.2.3
    python benchmarks/gpu_bundle.py wheels bundle

That machine has torch 2.11 for CUDA 13 and the usual tools (pytest, hypothesis, nvcc). torchrec 1.8.0
wants the Python files of fbgemm 1.8.0; the libraries that load beside torch 2.11 are those of 1.6.0. All of
them are 440 MB packed. Two files are written, with kernels for one kind of GPU (--gpu):

- site.tar.xz: packages, and the libraries with the ops that TorchRec's dists and the tests call; 6 MB.
- tbe.tar.xz: the libraries of FBGEMM's TBE, to which bench_gpu.py compares; 45 MB.
"""

from __future__ import annotations

import argparse
import io
import lzma
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpu_kernels import kernels_for

# The loaded ones find the others beside them.
LIBRARIES = ("asmjit", "fbgemm", "fbgemm_gpu_sparse_async_cumsum")
LOADED = ("fbgemm_gpu_config", "fbgemm_gpu_tbe_utils", "fbgemm_gpu_py")
TBE_LIBRARIES = ("fbgemm_gpu_tbe_common",)
TBE_LOADED = (
    "fbgemm_gpu_tbe_cache",
    "fbgemm_gpu_tbe_training_forward",
    "fbgemm_gpu_tbe_training_backward",
    "fbgemm_gpu_tbe_training_backward_pt2",
    "fbgemm_gpu_tbe_training_backward_split_host",
    "fbgemm_gpu_tbe_index_select",
)
# Takes the place of fbgemm_gpu/__init__.py, which would load all libraries. sparse_ops names ops of those
# that are left out, which nothing here calls: they get a schema.
INIT = """
import re
from pathlib import Path

import torch

open_source = True
__target__ = __variant__ = __version__ = "INTERNAL"
folder = Path(__file__).parent
for name in {loaded}:
    if (folder / (name + ".so")).exists():
        torch.ops.load_library(str(folder / (name + ".so")))
declared = torch._C._dispatch_get_all_op_names()
fragment = torch.library.Library("fbgemm", "FRAGMENT")
for op in sorted(set(re.findall(r'"(fbgemm::\\w+)"', (folder / "sparse_ops.py").read_text()))):
    if op not in declared:
        fragment.define(op.split("::")[1] + "() -> ()")
from fbgemm_gpu import sparse_ops
"""
# Similar kernels are further apart than the 8 MiB of the default dictionary.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}]


def wheel(folder: Path, package: str) -> zipfile.ZipFile:
    """Opens the one wheel of a package."""
    found = sorted(folder.glob(f"{package}-*.whl"))
    if len(found) != 1:
        names = [path.name for path in found]
        raise SystemExit(f"gpu_bundle: expected one wheel of {package} in {folder}, got {names}.")
    return zipfile.ZipFile(found[0])


def python_files(folder: Path) -> dict[str, bytes]:
    """Returns the Python packages of the bundle, by name of the file.

    Args:
        folder: folder of the wheels.
    """
    files = {}
    for package in ("torchrec", "tensordict", "pyvers"):
        with wheel(folder, package) as packed:
            files |= {name: packed.read(name) for name in packed.namelist() if "info/" not in name}
    with wheel(folder, "fbgemm_gpu_cpu") as packed:
        python = [name for name in packed.namelist() if name.endswith(".py")]
        files |= {name: packed.read(name) for name in python if "/docs/target." not in name}
    loaded = (*LOADED[:-1], *TBE_LOADED, LOADED[-1])  # in the order of FBGEMM's own __init__.py
    files["fbgemm_gpu/__init__.py"] = INIT.format(loaded=loaded).encode()
    return files


def libraries(folder: Path, package: str, names: Sequence[str], gpu: str) -> dict[str, bytes]:
    """Returns libraries of fbgemm by name of the file.

    Args:
        folder: folder of the wheels.
        package: the package whose libraries are taken.
        names: names of the libraries.
        gpu: the GPU whose kernels are kept, for example "9.0".
    """
    with wheel(folder, package) as packed:
        paths = [f"fbgemm_gpu/{name}.so" for name in names]
        return {path: kernels_for(packed.read(path), gpu) for path in paths}


def write(path: Path, files: dict[str, bytes]) -> None:
    """Writes a .tar.xz and prints its size."""
    with (
        lzma.open(path, "wb", filters=FILTERS) as packer,
        tarfile.open(None, "w", packer) as packed,
    ):
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            packed.addfile(member, io.BytesIO(content))
    print(f"{path}: {len(files)} files, {path.stat().st_size / 2**20:.1f} MiB")


def main(words: list[str] | None = None) -> None:
    """Writes <out>/site.tar.xz and <out>/tbe.tar.xz."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--gpu", default="9.0", help="compute capability (default: an H100 or H200)"
    )
    parser.add_argument(
        "--libraries-of",
        default="fbgemm_gpu",
        choices=("fbgemm_gpu", "fbgemm_gpu_cpu"),
        help="fbgemm_gpu_cpu: to try the bundle without a GPU",
    )
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    source = (arguments.wheels, arguments.libraries_of)
    site = libraries(*source, (*LIBRARIES, *LOADED), arguments.gpu)
    write(arguments.out / "site.tar.xz", python_files(arguments.wheels) | site)
    tbe = libraries(*source, (*TBE_LIBRARIES, *TBE_LOADED), arguments.gpu)
    write(arguments.out / "tbe.tar.xz", tbe)


if __name__ == "__main__":
    main()
