"""Rows of a state dict of only_to_save are summed while TableWriter writes them, to the same checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import quietly, state_dict_of, tables_of
from checkpoint_damage import items_of
from checkpoint_small import AGED, COUNTED, case, on_one, read, sharded, step
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint import (
    Checkpoints,
    LoadPlanner,
    TableWriter,
    only_to_load,
    only_to_save,
)
from torchrec_dyn.checkpoint_format import saved_tensor

ERRORS = (CheckpointException, RuntimeError)
SUMS = "torchrec_dyn.state_dict.saving.sums_of_shard"
KINDS = ("row_wise", "table_wise", "three_columns")


def trained(kind: str, world: int = 2, **options: Any) -> Any:
    model = sharded(case(world, kind, rows=4000, **options))
    for ids in (range(0, 900, 3), range(600)):
        step(model, list(ids))
    return model


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saved_tensor, "CHUNK_BYTES", 1 << 11)
    patch.setattr(saved_tensor, "_KEPT_BYTES", 1 << 9)


def state_to_save(model: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, only_to_save():
        patch.setattr(SUMS, None)  # no row is summed
        return state_dict_of(model)


def contents(folder: str) -> list[tuple[str, Any]]:
    return sorted((one.key, one.numbers.tolist()) for one in items_of(Path(folder)))


def saves_every_plan(path: str) -> None:
    cases = [(kind, None) for kind in KINDS]
    cases += [("row_wise", COUNTED), ("three_columns", AGED)]
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        for kind, config in cases:
            folder = f"{path}/{kind} {config}"
            model = trained(kind, config=config, optimizer="ADAM")
            quietly(dcp.save, state_dict_of(model), checkpoint_id=f"{folder} plain")
            state = state_to_save(model)
            for threads in (1, 1, 3):  # a second save of the same state dict, too
                writer = TableWriter(folder, thread_count=threads)
                quietly(dcp.save, state, storage_writer=writer)
                if dist.get_rank() == 0:
                    assert contents(folder) == contents(f"{folder} plain"), (kind, config, threads)
            loaded = trained(kind, config=config, optimizer="ADAM")
            step(loaded, [5])
            with only_to_load():
                into = state_dict_of(loaded)
            quietly(dcp.load, into, checkpoint_id=folder, planner=LoadPlanner(path=folder))
            loaded.load_state_dict(into["model"])
            loaded.fused_optimizer.load_state_dict(into["optimizer"])
            for one, other in zip(tables_of(model), tables_of(loaded), strict=True):
                a, b = one.export_state(), other.export_state()
                assert all(a[name].equal(b[name]) for name in a)


def test_the_checkpoint_is_that_of_a_state_dict_that_is_summed_before(tmp_path: Path) -> None:
    workers.run(saves_every_plan, str(tmp_path), world_size=2, timeout=300)


def one_rank_alone(path: str) -> None:
    model = trained("row_wise")
    quietly(dcp.save, state_dict_of(model), checkpoint_id=f"{path} plain")
    state = state_to_save(model) if dist.get_rank() == 1 else None
    # state_dict is collective: the other rank calls it now
    if state is None:
        state = state_dict_of(model)
    quietly(dcp.save, state, storage_writer=TableWriter(path))
    if dist.get_rank() == 0:
        assert contents(path) == contents(f"{path} plain")


def test_ranks_that_have_summed_and_ranks_that_have_not_save_together(tmp_path: Path) -> None:
    workers.run(one_rank_alone, str(tmp_path / "saved"), world_size=2)


def refuses(path: str) -> bool:
    model, other = trained("table_wise", 1), trained("table_wise", 1)
    state = state_to_save(model)
    uses = {
        "another writer": lambda: dcp.save(state, checkpoint_id=f"{path} 1"),
        "a copy": lambda: copy.deepcopy(state),
        "a load": lambda: other.load_state_dict(state["model"]),
    }
    for name, use in uses.items():
        with pytest.raises(ERRORS, match="made in a block of only_to_save"):
            quietly(use)
            pytest.fail(name)
    with pytest.raises(ValueError, match="use_collectives=True"):
        writer = TableWriter(f"{path} 2")
        quietly(dcp.save, state, storage_writer=writer, use_collectives=False)
    quietly(dcp.save, state, storage_writer=TableWriter(path))  # none of these has spoiled it
    assert all(one.export_state()["ids"].numel() for one in tables_of(other))
    step(model, [5000])
    with pytest.raises(CheckpointException, match="got a table that was trained"):
        quietly(dcp.save, state_to_save_then_train(model), storage_writer=TableWriter(f"{path} 3"))
    return True


def state_to_save_then_train(model: Any) -> dict[str, Any]:
    state = state_to_save(model)
    step(model, [6000])
    return state


def test_other_uses_are_errors_that_leave_the_state_dict_as_it_was(tmp_path: Path) -> None:
    assert on_one(refuses, tmp_path)


def damaged_while_written(path: str) -> bool:
    """A number that changes between its sum and the file is found by the load."""
    model = trained("row_wise", 1)
    state = state_to_save(model)
    real = saved_tensor.SavedTensor.__get_tensor_shard__

    def damaged(self: Any, index: Any) -> torch.Tensor:
        block = real(self, index)
        if index.fqn.endswith(".weight"):
            block[0, 0] += 1
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensor.SavedTensor, "__get_tensor_shard__", damaged)
        quietly(dcp.save, state, storage_writer=TableWriter(path))
    loaded = trained("row_wise", 1)
    with pytest.raises(ValueError, match="expected weight with content sum"):
        loaded.load_state_dict(read(state_dict_of(loaded), path)["model"])
    return True


def test_the_sum_is_of_the_rows_of_the_table_not_of_what_was_written(tmp_path: Path) -> None:
    assert on_one(damaged_while_written, tmp_path)


def saves_checkpoints(path: str) -> None:
    model = trained("row_wise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SUMS, None)
        folder = Checkpoints(path, full_every=1)
        entry = folder.save(model, model.fused_optimizer, step=3)
        folder.close()
    state = state_dict_of(model)
    quietly(dcp.save, state, checkpoint_id=f"{path} plain")
    if dist.get_rank() == 0:
        assert contents(str(entry.tables)) == contents(f"{path} plain")
    words = state["model"][next(key for key in state["model"] if key.endswith(".checksum"))]
    (sums,) = entry.sums.values()  # on every rank
    assert int(sums.split()[0], 16) == int(words.local()[0][1][0]) % 2**64
    loaded = trained("row_wise")
    step(loaded, [5])
    folder = Checkpoints(path, full_every=1)
    assert folder.restore(loaded, loaded.fused_optimizer).step == 3
    folder.close()
    for one, other in zip(tables_of(model), tables_of(loaded), strict=True):
        a, b = one.export_state(), other.export_state()
        assert all(a[name].equal(b[name]) for name in a)


def test_checkpoints_sum_the_rows_of_a_full_save_while_they_are_written(tmp_path: Path) -> None:
    workers.run(saves_checkpoints, str(tmp_path / "saved"), world_size=2)
