"""The script that wrote the files in this folder, at commit 24c9c85, in two processes:

    cd tests/support; torchrun --nproc-per-node 2 -m saved_by_24c9c85.write saved_by_24c9c85

It is kept to show the contents of the files, and to write such files in a later format to another folder. Do
not run it over these files. It uses public names only.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from saved_by_24c9c85.models import (
    EXTREMES,
    FUSED,
    Alone,
    Shared,
    answers,
    features,
    life,
    read_plain,
    save,
    served_answers,
    shard,
)
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

import torchrec_dyn as dyn
from torchrec_dyn import checkpoint, serving

SERVED_AS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
SAVED_PLANS = {
    "wide": column_wise(ranks=[0, 1], **FUSED),
    "spread": row_wise(**FUSED),
    "whole": table_wise(rank=1, **FUSED),
    "news": row_wise(**FUSED),
}


def batch(names: tuple[str, ...], step: int, rank: int) -> KeyedJaggedTensor:
    """Returns four bags of up to three ids per feature, with extreme ids at step 0; "empty" gets no id."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    pool = [*EXTREMES, *range(100, 104), *range(10 * step, 10 * step + 4)]
    first = [EXTREMES[:2], EXTREMES[2:]] if step == 0 else [[], []]
    chosen = {}
    for name in names:
        sizes = torch.randint(0, 4, (4,), generator=draw).tolist()
        picks = [torch.randint(len(pool), (size,), generator=draw).tolist() for size in sizes]
        bags = [*first, *([pool[one] for one in some] for some in picks)]
        chosen[name] = [[] for _ in bags] if name == "empty" else bags
    return features(chosen)


def train(model: Any, steps: range, rank: int) -> None:
    inside = getattr(model, "module", model)
    for step in steps:
        if hasattr(inside, "words"):
            inside.words.set_time(40 * step)
        outputs = model(batch(inside.names, step, rank))
        parts = [outputs[name].float() for name in sorted(outputs)]
        sum((one.square() + one / 3).sum() for one in parts).backward()


def as_text(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tensors as text, dtype, shape and bytes in hex: "float32 2,4 0000803f..."."""
    told: dict[str, Any] = {}
    for key, one in found.items():
        if isinstance(one, Mapping):
            told[key] = as_text(one)
        else:
            shape = ",".join(map(str, one.shape))
            numbers = one.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            told[key] = f"{str(one.dtype).removeprefix('torch.')} {shape} {numbers.hex()}"
    return told


def fingerprints(path: Path) -> dict[str, list[str]]:
    """Returns the fingerprints of rows and optimizer state of each table, as `inspect` shows them."""
    tables = checkpoint.open_checkpoint(path).tables
    return {
        key: [
            " -> ".join(f"{one.fingerprint(when, of):016x}" for when in moments)
            for moments in [("base", "result") if one.is_delta else ("checksum",)]
            for of in (False, True)
        ]
        for key, one in sorted(tables.items())
    }


def serve(folder: Path, other: Path) -> dict[str, Any]:
    """Builds the served directories; returns their outputs, before and after the delta."""
    found: dict[str, Any] = {}
    for name, dtype in SERVED_AS.items():
        one = folder / f"served_{name}"
        serving.build(folder / "saved_by_2_ranks", one, rows=dtype)
        found[name] = served_answers(one)
        found[f"{name} initial"] = served_answers(one, "initial")
        later = (folder if name == "int8" else other) / f"served_{name}_after_delta"
        serving.build(folder / "saved_by_2_ranks", later, rows=dtype)
        serving.apply_delta(later, folder / "delta")
        found[f"{name} later"] = served_answers(later)
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    temporary = [tempfile.mkdtemp()]
    dist.broadcast_object_list(temporary)
    model = shard(Shared(), SAVED_PLANS)
    train(model, range(4), rank)
    marker = checkpoint.mark(model)
    save(model, folder / "saved_by_2_ranks")
    checkpoint.export_rows(model.module.bags, "spread", folder / "spread.safetensors")
    expected: dict[str, Any] = {"answers": answers(model), "life": life(model)}

    train(model, range(4, 6), rank)
    mine = torch.tensor([[0, 101], [-1, 40]][rank])
    dyn.erase_rows(model.module.bags, "spread", mine)
    dyn.assign_rows(model.module.bags, "wide", mine, torch.full((2, 8), 0.75 + rank))
    checkpoint.export_delta(model, folder / "delta", since=marker)
    save(model, Path(temporary[0], "later"))
    expected |= {"answers later": answers(model), "life later": life(model)}

    if rank == 0:
        alone = Alone()
        train(alone, range(4), 0)
        save(alone, folder / "saved_by_1_process")
        expected["answers alone"] = answers(alone)
        expected["served"] = serve(folder, Path(temporary[0]))
        for name in ("saved_by_2_ranks", "saved_by_1_process", "delta"):
            expected[name] = read_plain(folder / name)
        expected["later"] = read_plain(Path(temporary[0], "later"))
        text = as_text(expected)
        for name in ("saved_by_2_ranks", "saved_by_1_process", "delta"):
            text[f"fingerprints of {name}"] = fingerprints(folder / name)
        (folder / "expected.json").write_text(json.dumps(text, indent=0, sort_keys=True) + "\n")
    dist.barrier()
    del model, marker
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
