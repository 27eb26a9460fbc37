"""The libraries that are packed for a machine with a GPU, and gpu_side.sh, which runs there."""

import re
import shutil
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu_side.sh"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def fat_binary(entries: list[tuple[int, int, bytes]]) -> bytes:
    """Entries: kind (1: PTX, 2: machine code), GPU, contents."""
    packed = b""
    for kind, gpu, content in entries:
        content += bytes(-len(content) % 8)
        packed += struct.pack("<HHIQ12xI32x", kind, 257, 64, len(content), gpu) + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed


def library(fat: bytes) -> bytes:
    """An ELF file with sections: none, data, .nv_fatbin, names."""
    names = b"\0.data\0.nv_fatbin\0.shstrtab\0"
    contents = {".data": struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8), ".nv_fatbin": fat}
    body, headers = b"", [bytes(64)]
    for name, content in {**contents, ".shstrtab": names}.items():
        at = names.index(name.encode())
        headers.append(struct.pack("<II16xQQ24x", at, 1, 64 + len(body), len(content)))
        body += content
    elf = b"\x7fELF" + bytes(36) + struct.pack("<Q10xHHH", 64 + len(body), 64, 4, 3)
    assert len(elf) == 64
    return elf + body + b"".join(headers)


def test_a_library_keeps_the_kernels_of_one_gpu():
    from gpu_kernels import kernels_for

    kernels = [(2, 80, b"eighty"), (2, 90, b"ninety and more"), (1, 90, b"text"), (2, 100, b"x")]
    more = [(2, 100, b"y" * 50), (2, 90, b"z")]
    gap = bytes(24)
    whole = library(fat_binary(kernels) + gap + fat_binary(more))
    thin = kernels_for(whole, "9.0")
    first, last = fat_binary([kernels[1]]), fat_binary([more[1]])
    rest = [
        bytes(len(fat_binary(each)) - len(kept)) for each, kept in ((kernels, first), (more, last))
    ]
    assert thin == library(first + rest[0] + gap + last + rest[1])
    assert kernels_for(thin, "9.0") == thin
    with pytest.raises(ValueError, match=r"expected kernels for 75, got \{"):
        kernels_for(whole, "7.5")
    assert kernels_for(library(b""), "9.0") == library(b"")


def test_the_bundle_holds_what_torchrec_and_tbe_load(tmp_path):
    """With files of this test in place of the wheels."""
    import gpu_bundle

    names = [f"fbgemm_gpu/{name}.so" for name in (*gpu_bundle.LIBRARIES, *gpu_bundle.LOADED)]
    tbe = [f"fbgemm_gpu/{name}.so" for name in (*gpu_bundle.TBE_LIBRARIES, *gpu_bundle.TBE_LOADED)]
    wheels = {
        "torchrec-1.8.0-py3": ["torchrec/__init__.py", "torchrec-1.8.0.dist-info/METADATA"],
        "tensordict-0.15.3-py3": ["tensordict/__init__.py"],
        "pyvers-0.2.3-py3": ["pyvers/__init__.py"],
        "fbgemm_gpu_cpu-1.8.0-cp312": [
            "fbgemm_gpu/__init__.py",
            "fbgemm_gpu/docs/target.default.json.py",
        ],
        "fbgemm_gpu-1.6.0-cp312": [*names, *tbe, "fbgemm_gpu/fbgemm_gpu_tbe_inference.so"],
    }
    for wheel, files in wheels.items():
        with zipfile.ZipFile(tmp_path / f"{wheel}.whl", "w") as packed:
            for name in files:
                kernels = fat_binary([(2, 80, b"of an A100"), (2, 90, b"of an H100")])
                packed.writestr(name, library(kernels))
    gpu_bundle.main([str(tmp_path), str(tmp_path / "out")])
    with tarfile.open(tmp_path / "out/site.tar.xz") as packed:
        init = packed.extractfile("fbgemm_gpu/__init__.py").read().decode()
        ours = {"torchrec/__init__.py", "tensordict/__init__.py", "pyvers/__init__.py"}
        assert set(packed.getnames()) == ours | {"fbgemm_gpu/__init__.py", *names}
    with tarfile.open(tmp_path / "out/tbe.tar.xz") as packed:
        assert packed.getnames() == sorted(tbe)
        kept = packed.extractfile(tbe[0]).read()
        assert b"of an A100" not in kept and b"of an H100" in kept
    compile(init, "fbgemm_gpu/__init__.py", "exec")
    loaded = re.search(r"for name in (\(.*\)):", init)[1]
    assert loaded.index("tbe_utils") < loaded.index("tbe_training") < loaded.index("fbgemm_gpu_py")
    (tmp_path / "torchrec-1.8.0-py3.whl").unlink()
    with pytest.raises(SystemExit, match=r"expected one wheel of torchrec in .*, got \[\]"):
        gpu_bundle.main([str(tmp_path), str(tmp_path / "out")])


@pytest.fixture
def side(tmp_path):
    """Runs the script in a folder of its own, with programs of this test in place of the real ones."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(SCRIPT, tmp_path / "benchmarks")
    for name in ("site", "tbe"):
        with tarfile.open(tmp_path / f"{name}.tar.xz", "w:xz") as packed:
            packed.add(__file__, f"{name}.py")
    programs = tmp_path / "bin"
    programs.mkdir()
    table = "tables rows MB AUC NE\nfull 9 1 0.70 0.9\nblock 9 1 0.7 0.9\nmult 9 1 0.7 0.9"

    def results(auc: str, rows: int) -> str:
        return f'{{\\n "auc": {auc},\\n "rows_per_table": {{\\n  "C1": {rows}\\n }}\\n}}'

    def run(
        *steps: str,
        bundle: str = str(tmp_path),
        refused: str = "nothing",
        table_of_cuda: str = table,
        auc_of_cuda: str = "0.8",
        rows_of_cuda: int = 5,
    ):
        fake = f"""#!/bin/bash
case "$*" in
  *{refused}*) exit 1;;
  *train_dlrm.py*"--device cpu"*) echo -e '{results("0.8", 5)}' > "${{@: -1}}"; exit;;
  *train_dlrm.py*) echo -e '{results(auc_of_cuda, rows_of_cuda)}' > "${{@: -1}}"; exit;;
  *"--device cpu"*) echo "{table}"; exit;;
  *"--device cuda"*) echo "{table_of_cuda}"; exit;;
esac
echo "$*"
"""
        for name in ("python3", "compute-sanitizer", "nvidia-smi"):
            (programs / name).write_text(fake)
            (programs / name).chmod(0o755)
        command = ["bash", str(tmp_path / "benchmarks/gpu_side.sh"), bundle, "out", *steps]
        path = {"PATH": f"{programs}:/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=path)

    return run


def test_the_script_runs_every_step_and_names_those_that_failed(side, tmp_path):
    done = side()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(": all steps passed")
    logs = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    steps = {
        "build",
        "golden",
        "first",
        "tests",
        "real",
        "memcheck",
        "memcheck_tables",
        "initcheck",
        "racecheck",
    }
    assert set(logs) == steps | {"train", "bench", "bench_train"}
    assert logs["tests"].count("-m needs_cuda") == 2 and "--tool initcheck" in logs["initcheck"]
    assert "--tool memcheck" in logs["memcheck_tables"]
    (chosen,) = re.findall(r"-k (\w+) (tests/\w+)", logs["memcheck_tables"])
    assert any(chosen[0] in path.read_text() for path in (ROOT / chosen[1]).glob("*.py"))
    assert {path.name for path in (tmp_path / "build/gpu_site").iterdir()} == {"site.py", "tbe.py"}
    done = side(refused='"-m pytest"')
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith(
        ": failed: golden first tests real memcheck memcheck_tables initcheck racecheck"
    )
    assert "bench_gpu.py" in (tmp_path / "out/bench.log").read_text()
    assert "bench_gpu_train.py" in (tmp_path / "out/bench_train.log").read_text()


def test_the_script_names_files_that_exist():
    named = set(re.findall(r"(?:tests|examples|benchmarks)/[\w/]+(?:\.\w+)?", SCRIPT.read_text()))
    assert len(named) > 20 and {name for name in named if not (ROOT / name).exists()} == set()


def test_the_script_compares_training_on_both_devices(side):
    lines = ["tables rows MB AUC NE", "full 9 1 0.70 0.9", "block 9 1 0.7 0.9", "mult 9 1 0.7 0.9"]
    for changed in ("full 8 1 0.70 0.9", "full 9 1 0.60 0.9", ""):
        other = "\n".join([lines[0], changed, *lines[2:]] if changed else lines[:1])
        done = side("train", table_of_cuda=other)
        assert done.returncode == 1 and done.stdout.splitlines()[-1].endswith(": failed: train")


def test_the_script_compares_sharded_training_on_both_devices(side):
    assert side("train").returncode == 0
    assert side("train", auc_of_cuda="0.805").returncode == 0
    for changed in ({"auc_of_cuda": "0.82"}, {"rows_of_cuda": 6}, {"refused": "train_dlrm"}):
        done = side("train", **changed)
        assert done.returncode == 1 and done.stdout.splitlines()[-1].endswith(": failed: train")


def test_the_script_refuses_words_that_are_no_steps(side):
    done = side("bench", "all")
    assert done.returncode == 2 and "expected steps of build golden" in done.stderr
    assert "got all" in done.stderr


def test_the_script_needs_no_bundle_where_the_packages_are_installed(side, tmp_path):
    assert side("bench", bundle="installed").returncode == 0
    assert not (tmp_path / "build").exists()
    assert side("bench", bundle="missing").returncode == 2
