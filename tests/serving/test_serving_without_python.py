"""The C++ program of examples/serve_cpp answers as Python does, and follows deltas."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pages
import pytest
import torch
from compiled_cases import IDS, Scores, built, configs_of, grow
from serving_cases import Plain, batch, save

import torchrec_dyn._C
from torchrec_dyn import serving
from torchrec_dyn.serving.generation import mapped_tensors
from torchrec_dyn.serving.manifest import read_manifest

FOLDER = Path(__file__).parents[2] / "examples" / "serve_cpp"
TORCH = Path(torch.__file__).parent
CORE = Path(torchrec_dyn._C.__file__)
FBGEMM = Path(importlib.util.find_spec("fbgemm_gpu").origin).parent / "fbgemm_gpu_tbe_inference.so"
LIBRARIES = [
    "-L",
    f"{TORCH}/lib",
    f"-Wl,-rpath,{TORCH}/lib",
    "-Wl,--no-as-needed",
    "-ltorch",
    "-ltorch_cpu",
    "-lc10",
]
CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]

LOADS = """
void* dlopen(const char* path, int flags);
char* dlerror(void);
int puts(const char* text);
int main(int argc, char** argv) {
  if (dlopen(argv[1], 2)) return 0;  // RTLD_NOW: every symbol must be there
  puts(dlerror());
  return 1;
}
"""


def test_the_core_loads_without_python(tmp_path):
    (tmp_path / "loads.c").write_text(LOADS)
    command = [CXX, "-x", "c", "loads.c", "-o", "loads", *LIBRARIES]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    done = subprocess.run([tmp_path / "loads", CORE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_program_is_short():
    lines = [line for path in FOLDER.iterdir() for line in path.read_text().splitlines()]
    code = [line for line in lines if line.strip() and not re.match(r"\s*//|#", line)]
    assert {path.name for path in FOLDER.iterdir()} == {"serve.cpp", "served_tables.h"}
    assert len(code) == 71  # as the page says


@pytest.mark.deep  # compiles a program with AOTInductor, and the example
@pytest.mark.parametrize("dtype", [torch.int8])
def test_cpp_answers_as_python_does(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # torch logs a message it cannot format
    served = built(tmp_path, dtype)
    ebc = serving.ServingEmbeddingBagCollection(served, configs_of(), is_weighted=True)
    model = Scores(ebc).eval()
    keys = ["f3", "x", "f2", "f1"]

    def inputs(size, seed):
        features = batch(keys, IDS, size, seed, weighted=True)
        return torch.rand(size, 3), features

    serving.compile_program(model, inputs(6, 0), tmp_path / "program.pt2")
    run = torch._inductor.aoti_load_package(str(tmp_path / "program.pt2"))
    named = mapped_tensors(served, ebc.generation, read_manifest(served, ebc.generation))
    tables = [named[name] for name in run.loader.get_metadata()["tables"].split()]
    for lengths, weights in ([2**62] * 4 + [1] * 16, 16), ([4] * 4 + [0] * 17, 16), ([1] * 16, 15):
        request = [torch.arange(16), torch.tensor(lengths), torch.ones(weights)]
        with pytest.raises(RuntimeError, match="expected as many lengths"):
            run([torch.rand(len(lengths) // 4, 3), *request], tables)
    include = [
        "-isystem",
        f"{TORCH}/include",
        "-isystem",
        f"{TORCH}/include/torch/csrc/api/include",
    ]
    command = [CXX, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", *include]
    command += [FOLDER / "serve.cpp", "-o", tmp_path / "serve", *LIBRARIES]
    subprocess.run(command, check=True, timeout=1800)
    server = subprocess.Popen(
        [tmp_path / "serve", tmp_path / "program.pt2", served, CORE, FBGEMM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def ask(tensors):
        torch.save(tensors, tmp_path / "request.pt")
        server.stdin.write(f"{tmp_path / 'request.pt'} {tmp_path / 'answer.pt'}\n")
        server.stdin.flush()
        generation = server.stdout.readline().strip()
        return generation, torch.load(tmp_path / "answer.pt") if generation else None

    try:
        for seed in range(2):
            for size in (1, 0, 2, 33):
                dense, features = inputs(size, size + seed)
                plain = [dense, features.values(), features.lengths(), features.weights()]
                generation, (scores, pooled) = ask(plain)
                with torch.inference_mode():
                    expected_scores, expected = model(dense, features)
                assert generation == ebc.generation
                assert torch.equal(pooled, expected)
                torch.testing.assert_close(scores, expected_scores, rtol=1e-6, atol=1e-7)
            if not seed:
                grow(served)
                assert ebc.refresh()
        lengths = features.lengths()
        lengths[0] = -1
        generation, _ = ask([dense, features.values(), lengths, features.weights()])
        assert not generation and "expected as many lengths" in server.stderr.read()
        assert server.wait(timeout=60)
        narrow = [Plain("a b", 8), Plain("b", 16), Plain("c", 128)]
        save(tmp_path / "narrow", *narrow)
        serving.build(tmp_path / "narrow", tmp_path / "other", rows=dtype)
        command = [tmp_path / "serve", tmp_path / "program.pt2", tmp_path / "other", CORE, FBGEMM]
        line = f"{tmp_path / 'request.pt'} {tmp_path / 'answer.pt'}"
        ended = subprocess.run(command, input=line, capture_output=True, text=True, timeout=60)
        assert ended.returncode and "expected: 20, but got: 12" in ended.stderr
    finally:
        server.kill()
        server.communicate()


@pytest.mark.deep  # compiles a program with AOTInductor, and the example
def test_the_page_does_what_it_says(tmp_path):
    """Blocks of the page in their order: those of python run every day without those of py and bash."""
    (tmp_path / "examples").symlink_to(FOLDER.parent)
    page = (FOLDER.parents[1] / "docs" / "guide" / "serve" / "cpp.md").read_text()
    blocks = [found for found in pages.BLOCK.findall(page) if found[0] in ("python", "py", "bash")]
    assert [kind for kind, _ in blocks].count("bash") == 2
    lines = ["import subprocess, warnings", "warnings.simplefilter('ignore')"]
    shell = "set -e\n"  # later blocks have the variables of earlier ones
    for kind, code in blocks:
        if kind != "bash":
            lines.append(code)
            continue
        lines.append(f"subprocess.run(['bash', '-c', {shell + code!r}], check=True)")
        shell += "".join(line for line in code.splitlines(True) if re.match("[A-Z]+=", line))
    root = str(FOLDER.parents[1])
    around = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": root}
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env={**os.environ, **around},
        check=True,
        timeout=1800,
    )
