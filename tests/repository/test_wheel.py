"""The wheel that is built here installs and works where there is no compiler."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.deep  # `make release` builds and tries it, too

PROGRAM = """
import shutil, sys
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn

assert torchrec_dyn.__file__.startswith(sys.prefix), torchrec_dyn.__file__
assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang++", "nvcc", "ninja")))
config = EmbeddingBagConfig(
    name="user", embedding_dim=4, num_embeddings=100, feature_names=["user_id"]
)
collection = torchrec_dyn.DynamicEmbeddingBagCollection([config])
ids = torch.tensor([-(2**63), -1, 2**63 - 1])
features = KeyedJaggedTensor.from_lengths_sync(["user_id"], ids, torch.tensor([2, 1]))
print(collection(features).values().shape, collection.table("user").num_rows)
"""


def run(*command: object, **options: object) -> str:
    """Output of a command; what it said on failure becomes the test's failure."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=1200, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for stale in ROOT.glob("build/lib*"):  # setuptools packs what it finds there, deleted files too
        shutil.rmtree(stale)
    folder = tmp_path_factory.mktemp("wheel")
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # ninja
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "--wheel-dir", folder, ROOT, env={**os.environ, "PATH": path})
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_serves_every_python_from_3_10(wheel: Path, tmp_path: Path):
    assert wheel.name.split("-")[2:4] == ["cp310", "abi3"]
    library = zipfile.ZipFile(wheel).extract("torchrec_dyn/_C.abi3.so", tmp_path)
    wanted = run("nm", "--dynamic", "--undefined-only", library)
    assert "torch_library_impl" in wanted  # torch's stable ABI is used,
    assert not re.search(r"_ZNK?(2at|3c10|5torch)", wanted)  # and nothing beside it


def test_wheel_runs_on_other_linux_systems(wheel: Path):
    told = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    assert told["sym_tag"].startswith("manylinux_2_"), told  # the name that `make wheel` gives it


def test_wheel_holds_exactly_the_package(wheel: Path):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if "info/" not in name}
    others = ("_C.abi3.so", "_C.pyi", "py.typed")
    assert packed == {
        *(f"torchrec_dyn/{name}" for name in others),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "torchrec_dyn").rglob("*.py")),
    }


def test_wheel_has_the_metadata_of_a_release(wheel: Path):
    packed = zipfile.ZipFile(wheel)
    folder = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    told = email.message_from_bytes(packed.read(f"{folder}/METADATA"))
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version and told["Version"] == version[1]
    assert told["License-Expression"] == "BSD-3-Clause"
    assert packed.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert told["Requires-Python"] == ">=3.10"
    wanted = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in wanted} == {"torch", "torchrec", "numpy"}
    table = (ROOT / "docs/guide/start/install.md").read_text().split("## Extras")[1]
    extras = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.M))
    assert [*extras] == told.get_all("Provides-Extra")
    assert f"pip install {' '.join(extras.values())}\n" in table
    for extra, package in extras.items():
        assert any(
            re.match(rf"{package}>=.*{extra}", line) for line in told.get_all("Requires-Dist")
        )
    classifiers = told.get_all("Classifier")
    assert "Programming Language :: Python :: 3.10" in classifiers
    assert not [line for line in classifiers if "License ::" in line or "Private" in line]
    assert told["Description-Content-Type"] == "text/markdown"
    shown = told.get_payload()
    assert "Embedding tables for [TorchRec]" in shown and "```python" in shown
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert links and all(link.startswith("https://") for link in links), "PyPI has no files"
    assert not re.search("^!", shown, re.M), "nothing is left of the pictures"


def test_the_source_package_holds_what_a_build_reads(tmp_path: Path):
    build = (
        "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    )
    name = run(sys.executable, "-c", build, tmp_path, cwd=ROOT).splitlines()[-1]
    with tarfile.open(tmp_path / name) as packed:
        held = {one.partition("/")[2] for one in packed.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    folders = ("csrc/", "torchrec_dyn/")
    files = {one for one in tracked if one.startswith(folders)}
    assert {one for one in held if one.startswith(folders) and "." in one} == files
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= held
    assert not [one for one in held if one.startswith(("tests", "build", "examples"))]


def test_wheel_works_without_a_compiler(wheel: Path, tmp_path: Path):
    second = tmp_path / "second"
    run(sys.executable, "-m", "venv", "--without-pip", second)
    pip = (sys.executable, "-m", "pip", "--python", second / "bin/python")
    run(*pip, "install", "--no-index", "--no-deps", "--ignore-installed", wheel)
    # torch and torchrec come from this environment by path, and our editable install does not:
    # a .pth file found by way of another one is not read.
    (packages,) = second.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    bare = {"PATH": str(second / "bin"), "HOME": str(tmp_path), "CC": "false", "CXX": "false"}
    said = run(second / "bin/python", "-c", PROGRAM, cwd=tmp_path, env=bare)
    assert said.strip() == "torch.Size([2, 4]) 3"
