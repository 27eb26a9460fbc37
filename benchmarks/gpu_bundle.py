r"""Packs what the tests need on a machine with a GPU and without a network, where gpu_side.sh runs them.

    pip download --no-deps --only-binary=:all: -d wheels \
        --python-version 3.12 --platform manylinux_2_28_x86_64 \
        fbgemm-gpu==1.6.0 fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0 tensordict==0.15.3 pyvers==0.2.3
    python benchmarks/gpu_bundle.py wheels bundle

That machine has torch 2.11 for CUDA 13 and the usual tools (pytest, hypothesis, nvcc). torchrec 1.8.0
wants the Python files of fbgemm 1.8.0; the libraries that load beside torch 2.11 are those of 1.6.0. All of
them are 440 MB packed. Those with the ops that TorchRec's dists and the tests call take 7 MB as .xz. TBE is
not among them.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import zipfile
from pathlib import Path

# The last three are loaded; each finds the libraries that it needs beside it.
LIBRARIES = ("asmjit", "fbgemm", "fbgemm_gpu_sparse_async_cumsum")
LOADED = ("fbgemm_gpu_config", "fbgemm_gpu_tbe_utils", "fbgemm_gpu_py")
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
    torch.ops.load_library(str(folder / (name + ".so")))
declared = torch._C._dispatch_get_all_op_names()
fragment = torch.library.Library("fbgemm", "FRAGMENT")
for op in sorted(set(re.findall(r'"(fbgemm::\\w+)"', (folder / "sparse_ops.py").read_text()))):
    if op not in declared:
        fragment.define(op.split("::")[1] + "() -> ()")
from fbgemm_gpu import sparse_ops
"""


def wheel(folder: Path, package: str) -> zipfile.ZipFile:
    """Opens the one wheel of a package."""
    found = sorted(folder.glob(f"{package}-*.whl"))
    if len(found) != 1:
        names = [path.name for path in found]
        raise SystemExit(f"gpu_bundle: expected one wheel of {package} in {folder}, got {names}.")
    return zipfile.ZipFile(found[0])


def files_of(folder: Path, libraries: str) -> dict[str, bytes]:
    """Returns the files of the bundle by name.

    Args:
        folder: folder of the wheels.
        libraries: the package whose libraries are taken.
    """
    files = {}
    for package in ("torchrec", "tensordict", "pyvers"):
        with wheel(folder, package) as packed:
            files |= {name: packed.read(name) for name in packed.namelist() if "info/" not in name}
    with wheel(folder, "fbgemm_gpu_cpu") as packed:
        python = [name for name in packed.namelist() if name.endswith(".py")]
        files |= {name: packed.read(name) for name in python if "/docs/target." not in name}
    files["fbgemm_gpu/__init__.py"] = INIT.format(loaded=LOADED).encode()
    with wheel(folder, libraries) as packed:
        for name in (*LIBRARIES, *LOADED):
            files[f"fbgemm_gpu/{name}.so"] = packed.read(f"fbgemm_gpu/{name}.so")
    return files


def main(words: list[str] | None = None) -> None:
    """Writes <out>/site.tar.xz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--libraries-of",
        default="fbgemm_gpu",
        choices=("fbgemm_gpu", "fbgemm_gpu_cpu"),
        help="fbgemm_gpu_cpu: to try the bundle without a GPU",
    )
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "site.tar.xz"
    files = files_of(arguments.wheels, arguments.libraries_of)
    with tarfile.open(path, "w:xz") as packed:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            packed.addfile(member, io.BytesIO(content))
    print(f"{path}: {len(files)} files, {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
