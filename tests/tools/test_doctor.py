"""The report for bug reports is right, and is printed where the package cannot be imported, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import torchrec_dyn
from torchrec_dyn import __main__ as command_line
from torchrec_dyn.ops import has_cuda_kernels
from torchrec_dyn.tools import doctor

PACKAGE = Path(torchrec_dyn.__file__).parent


def read(text: str) -> dict[str, list[str]]:
    """The lines of a report by name."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        lines.setdefault(name, []).append(value.strip())
    return lines


def run_by_path(package: Path, *more: Path) -> tuple[int, dict[str, list[str]]]:
    """Runs the file; returns its exit status and the report."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, more))}
    environment.pop("TORCHREC_DYN_ANY_VERSION", None)
    done = subprocess.run(
        [sys.executable, package / "tools/doctor.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert not done.stderr
    return done.returncode, read(done.stdout)


def test_a_report_of_what_is_installed() -> None:
    status, report = run_by_path(PACKAGE)
    assert (status, report["wrong"]) == (0, ["nothing was found"])
    (torch,) = report["torch"]
    assert torch == metadata.version("torch")
    assert report["trio"][0].startswith(f"torch {'.'.join(torch.split('.')[:2])}, torchrec ")
    assert report["extension"][0].endswith("and for CUDA") == has_cuda_kernels()
    assert report["python"][0].startswith(".".join(map(str, sys.version_info[:3])))
    assert " of torch, " in report["threads"][0] and "unknown" not in str(report)


def test_an_extension_that_does_not_load(tmp_path: Path) -> None:
    """The package is a copy whose extension is cut off."""
    copied = tmp_path / "torchrec_dyn"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (copied / "_C.abi3.so").write_bytes(b"cut off, of .nv_fatbin\0")
    status, report = run_by_path(copied)
    assert status == 1 and report["package"] == [str(copied)]
    assert report["extension"] == ["_C.abi3.so, 23 bytes, kernels for the CPU and for CUDA"]
    (wrong,) = report["wrong"]
    assert wrong.startswith(
        "ImportError: torchrec_dyn: expected its compiled extension, got ImportE"
    )
    assert wrong.endswith(
        "_C.abi3.so: file too short. Build it with the installed torch (make build), or install a wheel."
    )


def test_versions_apart_and_a_torch_that_does_not_load(tmp_path: Path) -> None:
    apart = tmp_path / "torch-2.15.0.dist-info"
    apart.mkdir()
    (apart / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n")
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot\\nopen')")
    package = tmp_path / "torchrec_dyn"
    (package / "tools").mkdir(parents=True)
    for name in ("tools/doctor.py", "versions.py"):
        shutil.copy(PACKAGE / name, package / name)
    status, report = run_by_path(package, tmp_path)
    assert status == 1 and report["torch"] == ["2.15.0"]
    assert report["trio"] == ["these versions do not belong together"]
    assert report["extension"] == ["not built"]
    versions, torch = report["wrong"]
    assert versions.startswith(
        "ImportError: torchrec_dyn: expected torch, torchrec and fbgemm-gpu that"
    )
    assert "got torch 2.15.0, " in versions and versions.endswith("=1 to skip this check.")
    assert torch == "ImportError: libtorch.so: cannot open"


@pytest.fixture
def probed(monkeypatch):
    """Has the other process run this program instead of the import."""

    def probe(program: str) -> None:
        monkeypatch.setattr(doctor, "_PROBE", program)

    monkeypatch.delenv("TORCHREC_DYN_ANY_VERSION", raising=False)
    return probe


TOLD = """
import json
print(json.dumps({"cuda": "13.0", "capability": "AVX2", "threads": 3, "gpus": ["H9"]}), flush=True)
"""


@pytest.mark.parametrize(
    ("ends", "wrong"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the import ended its process: status -9, []"),
        ("raise SystemExit('no')", "the import ended its process: status 1, ['no']"),
        ("import time; time.sleep(9)", "the import did not end within 0.5 seconds"),
    ],
)
def test_an_import_that_ends_its_process(probed, monkeypatch, capsys, ends, wrong) -> None:
    probed(TOLD + ends)
    if "sleep" in ends:
        monkeypatch.setattr(doctor, "_SECONDS", 0.5)
    assert command_line.main(["doctor"]) == 1
    report = read(capsys.readouterr().out)
    assert report["wrong"] == [wrong]
    if "not end" not in wrong:  # what was told before the end is there
        assert report["gpu of torch"] == ["CUDA 13.0, ['H9']"]


def test_tools_settings_and_folders_of_a_user(probed, monkeypatch, capsys, tmp_path) -> None:
    probed(TOLD + "print(json.dumps({'imported': True, 'has_kernels': False}))")
    for name, says in (
        ("nvcc", "Cuda tools, release 99.1, V99"),
        ("nvidia-smi", "H9, 600, 9 MiB, 9.0"),
    ):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho '{says}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCHREC_DYN_ANY_VERSION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command_line.main(["doctor"]) == 0
    report = read(capsys.readouterr().out)
    assert report["nvcc"] == ["99.1, ~/bin/nvcc"]
    assert report["gpu"] == ["H9, 600, 9 MiB, 9.0"]
    assert report["trio"] == ["not checked, since TORCHREC_DYN_ANY_VERSION is set"]
    assert report["settings"][0].startswith("TORCHREC_DYN_ANY_VERSION=1, CUDA_HOME=")
    assert report["extension"][0].endswith("kernels for the CPU only")


def test_the_command_line_lists_its_commands_with_an_example_of_each(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main([])
    text = capsys.readouterr().err
    parser = command_line._arguments()
    for example in command_line.EXAMPLES:
        assert f"\n  python -m torchrec_dyn {example}\n" in text
        assert callable(parser.parse_args(example.split()).run)
    (commands,) = [action for action in parser._actions if action.choices]
    assert [example.split()[0] for example in command_line.EXAMPLES] == [*commands.choices]
    for name in commands.choices:
        assert f"\n    {name} " in text
