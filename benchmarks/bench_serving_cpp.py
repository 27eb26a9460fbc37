"""Serving without Python: latency of a compiled program beside Python serving and TorchRec's int8.

    python benchmarks/bench_serving_cpp.py [--rounds 9] [--folder /dev/shm]

Rows of int8, one thread, CPU time. Two models: the collection alone, and with a dense part. TorchRec's
quantized static collection gets row numbers: its ids are already mapped. A program is compiled for each
model, which takes a minute, so this benchmark runs only by its name.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from axes import SERVING, Workload, ranks, raw_ids, tiny
from bench_serving import CALLS, REQUESTS, configs, save, static, trained
from interleaved import finish, measure, options, ratio, result, spread, summary
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn._C
from torchrec_dyn import serving

BATCHES = (1, 16, 512)
NUMBERS = 13
HERE = Path(__file__).parent


class Dense(nn.Module):
    """A collection with a dense part: numbers through one layer, then all columns through two."""

    def __init__(self, sparse: nn.Module, columns: int) -> None:
        super().__init__()
        self.sparse = sparse
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(64 + columns, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Returns the logits, [B, 1]."""
        columns = self.sparse(features).values()
        return self.top(torch.cat([self.bottom(numbers), columns], 1))


def plain_requests(
    workload: Workload, batches: Sequence[Tensor], dense: bool
) -> list[list[Tensor]]:
    """Returns requests as plain tensors: numbers, if there is a dense part, then ids and lengths."""
    lengths = torch.full((workload.tables * workload.batch,), workload.bag)
    numbers = [torch.rand(workload.batch, NUMBERS)] if dense else []
    return [[*numbers, values, lengths] for values in batches]


def in_python(
    module: nn.Module, keys: list[str], requests: Sequence[Sequence[Tensor]], calls: int
) -> Callable[[int], None]:
    """Returns a contestant: `calls` requests, each a new KeyedJaggedTensor."""

    def ask(turn: int) -> None:
        with torch.inference_mode():
            for call in range(calls):
                *numbers, values, lengths = requests[(turn + call) % len(requests)]
                module(*numbers, KeyedJaggedTensor(keys, values, lengths=lengths))

    return ask


class InCpp:
    """The program of serving_cpp.cpp in a process of its own: a contestant for each file of requests."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def asking(self, path: Path, calls: int) -> Callable[[int], float]:
        """Returns a contestant: `calls` requests of a file, which returns its own seconds."""

        def ask(_turn: int) -> float:
            return float(self._answer(f"{path} {calls}\n"))

        return ask

    def _answer(self, line: str) -> str:
        said, heard = self._process.stdin, self._process.stdout
        assert said is not None and heard is not None
        said.write(line)
        said.flush()
        return heard.readline()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def executable(folder: Path) -> Path:
    """Compiles serving_cpp.cpp; returns the path of the program."""
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    command: list[str | Path] = ["g++", "-std=c++20", "-O2", HERE / "serving_cpp.cpp"]
    command += ["-o", folder / "serving_cpp", f"-I{include}"]
    command += [f"-I{include}/torch/csrc/api/include", f"-L{torch_folder}/lib"]
    command += [f"-Wl,-rpath,{torch_folder}/lib", "-Wl,--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    return folder / "serving_cpp"


def libraries() -> list[Path]:
    """Returns the libraries of the ops that a program with rows of int8 calls."""
    found = importlib.util.find_spec("fbgemm_gpu")
    assert found is not None and found.origin is not None and torchrec_dyn._C.__file__ is not None
    fbgemm = Path(found.origin).parent / "fbgemm_gpu_tbe_inference.so"
    return [Path(torchrec_dyn._C.__file__), fbgemm]


def latency(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures requests of all sizes on all sides; prints and returns the results."""
    shape = tiny(SERVING[0]) if arguments.quick else SERVING[0]
    keys = [f"f{t}" for t in range(shape.tables)]
    serving.build(save(trained(shape), folder / "checkpoint"), folder / "served", rows=torch.int8)
    program = executable(folder)
    rows: list[dict[str, Any]] = []
    for what in ("collection", "with dense part")[: 1 if arguments.quick else None]:
        ours: nn.Module = serving.ServingEmbeddingBagCollection(folder / "served", configs(shape))
        theirs = static(shape, torch.qint8)
        dense = what == "with dense part"
        if dense:
            columns = shape.tables * shape.dim
            ours, theirs = Dense(ours, columns).eval(), Dense(theirs, columns).eval()
        compiled = folder / f"{'dense' if dense else 'alone'}.pt2"
        first = raw_ids(ranks(replace(shape, batch=4), 1, seed=1)[0])
        [[*numbers, values, lengths]] = plain_requests(replace(shape, batch=4), [first], dense)
        example = KeyedJaggedTensor(keys, values, lengths=lengths)
        serving.compile_program(ours, [*numbers, example], compiled)
        cpp = InCpp([program, compiled, folder / "served", *libraries()])
        for workload in SERVING[: 1 if arguments.quick else None]:
            for size in BATCHES:
                asked = replace(shape, name=workload.name, zipf=workload.zipf, batch=size)
                mapped = ranks(asked, REQUESTS, seed=0)
                raw = plain_requests(asked, [raw_ids(batch) for batch in mapped], dense)
                path = folder / f"{dense}-{workload.name}-{size}.pt"
                torch.save(raw, path)
                calls = 2 if arguments.quick else CALLS.get(size, 100)
                contestants: dict[str, Callable[[int], object]] = {
                    "C++": cpp.asking(path, calls),
                    "Python": in_python(ours, keys, raw, calls),
                    "static int8": in_python(
                        theirs, keys, plain_requests(asked, mapped, dense), calls
                    ),
                }
                seconds = measure(contestants, arguments.rounds, clock="thread")
                numbers_of = summary(seconds, calls)
                line = "".join(f" {n['median_ns'] / 1e3:9.1f}" for n in numbers_of.values())
                seen = ratio(seconds, "static int8", "C++")
                print(f"{what:16} {workload.name:16} {size:4}{line}  {spread(seen)}", flush=True)
                rows.append(
                    result(
                        workload.name, 1, f"{what}, request of {size}", "static int8", seen,
                        ns_per_request=numbers_of,
                    )
                )  # fmt: skip
        cpp.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints one table."""
    parser = options(__doc__, (1,))
    parser.add_argument("--folder", type=Path, help="where to put checkpoint and served tables")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        print(f"{'model':16} workload batch, us a request of C++, Python, static int8")
        finish("serving_cpp", latency(arguments, Path(name)), arguments)


if __name__ == "__main__":
    main()
