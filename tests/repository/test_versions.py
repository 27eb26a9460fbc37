"""Versions that belong together: the same in the check at import, README, Makefile and metadata."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_dyn.versions import REPORT, TRIOS, check_versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Shows importlib.metadata these packages and no others."""
    monkeypatch.delenv("TORCHREC_DYN_ANY_VERSION", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(**versions: str | None) -> Path:
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            if version is not None:
                shown = name.replace("_cpu", "-cpu")  # as fbgemm writes its name
                text = f"Metadata-Version: 2.1\nName: {shown}\nVersion: {version}\n"
                (folder / "METADATA").write_text(text)
        return tmp_path

    return install


TOGETHER = {
    "1.7": {"torch": "2.12.1", "torchrec": "1.7.0", "fbgemm_gpu": "1.7.0"},
    "1.8": {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm_gpu_cpu": "1.8.0"},
    "1.9": {"torch": "2.14.1+cu130", "torchrec": "1.9.2", "fbgemm_gpu": "1.9.0.post1+cu130"},
    "leftover": {
        **{"torch": "2.13.0", "torchrec": "1.8.0"},
        **{"fbgemm_gpu": "1.8.0", "fbgemm_gpu_cpu": "1.7.0"},
    },
    "torch from source": {"torch": "2.15.0a0+git12ab", "torchrec": "1.9.2", "fbgemm_gpu": "1.9.0"},
    "container": {
        "torch": "2.10.0a0+b4e4ee81d3.nv25.12",
        "torchrec": "1.8.0",
        "fbgemm_gpu": "1.8.0",
    },
    "torch nightly": {"torch": "2.15.0.dev20261120", "torchrec": "1.9.2", "fbgemm_gpu": "1.9.0"},
    "fbgemm nightly": {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm_gpu": "2026.11.20"},
    "fbgemm nightly, another name": {
        **{"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm_gpu_nightly": "2026.11.20"},
    },
    "fbgemm from source": {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm_gpu": "1.10.0+git12ab"},
    "fbgemm from source, and a leftover": {
        **{"torch": "2.14.1", "torchrec": "1.9.2"},
        **{"fbgemm_gpu": "1.10.0+git12ab", "fbgemm_gpu_cpu": "1.8.0"},
    },
    "release candidate": {"torch": "2.14.1", "torchrec": "1.10.0rc1", "fbgemm_gpu": "1.9.0"},
    "fbgemm without metadata": {"torch": "2.13.0", "torchrec": "1.8.0"},
    "fbgemm with damaged metadata": {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm_gpu": None},
    "no metadata at all": {},
}


@pytest.mark.parametrize("versions", TOGETHER.values(), ids=TOGETHER)
def test_versions_that_belong_together_or_are_no_releases_are_accepted(install, versions):
    install(**versions)
    check_versions()


# What is installed, and the minor version of torchrec of the trio that the error names.
APART = [
    ({"torch": "2.15.0", "torchrec": "1.9.2", "fbgemm_gpu": "1.9.0"}, "1.9"),
    ({"torch": "2.13.0", "torchrec": "1.9.2", "fbgemm_gpu_cpu": "1.8.0+cpu"}, "1.8"),
    ({"torch": "2.12.1", "torchrec": "1.7.0", "fbgemm_gpu": "1.9.0"}, "1.7"),
    ({"torch": "2.14.1+cu130", "torchrec": "1.8.0.post1"}, "1.9"),
    ({"torch": "2.11.0", "torchrec": "1.6.0", "fbgemm_gpu": "1.6.0"}, "1.9"),
    ({"torch": "2.14.0a0", "torchrec": "1.9.0", "fbgemm_gpu": "1.10.0"}, "1.9"),
]


@pytest.mark.parametrize(("versions", "named"), APART)
def test_versions_apart_are_refused_and_a_trio_is_named(install, versions, named):
    install(**versions)
    with pytest.raises(ImportError) as refused:
        check_versions()
    (torch,) = (trio["torch"] for trio in TRIOS if trio["torchrec"] == named)
    got = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())
    assert str(refused.value) == (
        f"torchrec_dyn: expected torch, torchrec and fbgemm-gpu that belong together, got {got}. "
        f"Install torch {torch}.*, torchrec {named}.* and fbgemm-gpu {named}.* (for the CPU "
        "fbgemm-gpu-cpu), or set TORCHREC_DYN_ANY_VERSION=1 to skip this check. "
        f"{REPORT}"
    )


def test_the_check_comes_before_torch_and_torchrec(install):
    folder = install(torch="2.15.0")
    program = """if True:
        import sys
        try:
            import torchrec_dyn
        except ImportError as refused:
            assert "torch 2.15.0" in str(refused), refused
        assert not {"torch", "torchrec", "fbgemm_gpu"} & {*sys.modules}
    """
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_readme_makefile_and_metadata_name_the_same_trios():
    trios = {(trio["torchrec"], trio["torch"], trio["fbgemm"]) for trio in TRIOS}
    minor = r"(\d+\.\d+)\.\d+"
    row = rf"^\| {minor} \| {minor} \| {minor} \|"
    for page in ("README.md", "docs/guide/start/install.md"):
        assert {*re.findall(row, (ROOT / page).read_text(), re.M)} == trios
    made = rf"^TRIO_\S+ := torchrec=={minor} torch=={minor} {minor}$"
    assert {*re.findall(made, (ROOT / "Makefile").read_text(), re.M)} == trios
    metadata = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "torchrec"):
        minors = sorted(int(trio[name].split(".")[1]) for trio in TRIOS)
        major = TRIOS[0][name].split(".")[0]
        assert f'"{name}>={major}.{minors[0]},<{major}.{minors[-1] + 1}"' in metadata
    records = {path.stem for path in ROOT.glob("tests/repository/torchrec_seams/*.txt")}
    assert records == {trio["torchrec"] for trio in TRIOS}
