"""Saving and loading hold little beside the table: chunks, never a second copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import workers
from another_process import call
from checkpoint_cases import quietly
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, shard
from system_memory import peak_of

import torchrec_dyn as dyn

MIB = 1 << 20
BOUND = 256 * MIB
DIM = 64


def model_of(rows: int) -> object:
    plan = usual_plan("table_wise", DIM, 1, 1, rows=2 * rows)
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    case = Case([Table("t", ["f"], plan, DIM, rows=2 * rows)], fused_params=fused)
    return shard(case, collection_of(case))


def measure(rows: int, folder: str) -> tuple[int, int, int]:
    """Peaks of saving and of loading into a new model, and the bytes of the loaded table."""
    import gc

    from checkpoint_cases import load, save

    model = model_of(rows)
    for start in range(0, rows, 50_000):
        ids = torch.arange(start, min(rows, start + 50_000))
        dyn.assign_rows(model.module.collection, "t", ids, ids[:, None].expand(-1, DIM).float())
    warm = model_of(10)
    save(warm, f"{folder}/warm")
    load(warm, f"{folder}/warm")
    saving = peak_of(lambda: save(model, f"{folder}/saved"))
    del model, warm
    gc.collect()
    model = model_of(rows)
    loading = peak_of(lambda: load(model, f"{folder}/saved"))
    assert dyn.read_num_rows(model.module.collection, "t") == rows
    return saving, loading, dyn.read_stats(model.module.collection, "t")["bytes"]


def check(rows: int, folder: Path, bound: int) -> None:
    pool = workers._Pool(1, 1, 60.0)  # a process of its own: the others' memory has a history
    try:
        ((saving, loading, contents),) = pool.run(measure, (rows, str(folder)), 600.0)
    finally:
        pool.kill()
    told = (
        f"saving {saving / MIB:.0f}, loading {loading / MIB:.0f}, contents {contents / MIB:.0f} MiB"
    )
    print(told)
    assert contents > rows * DIM * 8, told
    assert saving < bound, told
    assert loading < contents + bound, told


def test_a_table_is_saved_and_loaded_in_chunks(tmp_path: Path) -> None:
    check(400_000, tmp_path, 160 * MIB)  # 200 MB: a second copy would show


@pytest.mark.deep
def test_a_larger_table_takes_no_more(tmp_path: Path) -> None:
    check(1_200_000, tmp_path, BOUND)


def peak_of_a_copy() -> int:
    return peak_of(lambda: quietly(torch.ones, 100 * MIB // 4))


def test_the_peak_of_a_copy_is_seen() -> None:
    # In a process of its own: here garbage of other tests may be freed on the way to the peak.
    assert 90 * MIB < call(peak_of_a_copy) < 200 * MIB
