"""With its path a checkpoint is read by rows, without DCP's reader; the rows are those that DCP reads."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import quietly, save, state_dict_of, tables_of
from checkpoint_damage import flips_in_numbers
from checkpoint_small import AGED, COUNTED, LRU, case, read, sharded, step
from sharded_cases import usual_plan
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import LoadPlanner
from torchrec_dyn.state_dict import staged_table
from torchrec_dyn.storage import CanonicalRows

IDS = list(range(0, 2700, 3))
PLANS = ("row_wise", "table_wise", "three_columns")


def trained(kind: str, ids: list[int] = IDS, **options: Any) -> Any:
    model = sharded(case(2, kind, rows=4000, **options))
    for _ in range(2):
        step(model, ids)
    return model


def load_into(model: Any, path: str, planner: Any) -> None:
    state = state_dict_of(model)
    quietly(dcp.load, state, checkpoint_id=path, planner=planner)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])


def alike(one: Any, other: Any) -> bool:
    both = zip(tables_of(one), tables_of(other), strict=True)
    states = [(a.export_state(), b.export_state()) for a, b in both]
    return all(a.keys() == b.keys() for a, b in states) and all(
        a[name].equal(b[name]) for a, b in states for name in a
    )


def small_pieces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(knobs, "SAVED_CHUNK_BYTES", 1 << 13)
    patch.setattr(knobs, "LAST_CHUNK_BYTES", 1 << 9)
    patch.setattr(staged_table, "_CHUNK_BYTES", 1 << 9)


def check_loads_every_plan(path: str) -> None:
    cases = [(saved, kind, None) for saved in PLANS[::2] for kind in PLANS]
    cases += [("row_wise", "row_wise", AGED), ("row_wise", "table_wise", COUNTED)]
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        folders: dict[tuple[str, Any], str] = {}
        for saved, kind, config in cases:
            if (saved, config) not in folders:
                folders[saved, config] = f"{path}/{len(folders)}"
                save(trained(saved, config=config), folders[saved, config])
            check_load(folders[saved, config], kind, config)


def check_load(folder: str, kind: str, config: Any) -> None:
    loaded = [trained(kind, [5, 6, 7], config=config) for _ in range(2)]
    load_into(loaded[0], folder, LoadPlanner(path=folder))
    load_into(loaded[1], folder, LoadPlanner())
    assert alike(*loaded)
    step(loaded[0], [IDS[dist.get_rank()]])


def test_rows_read_straight_are_those_that_dcp_reads(tmp_path: Path) -> None:
    workers.run(check_loads_every_plan, str(tmp_path), world_size=2, timeout=300)


def check_loads_without_policies(path: str) -> None:
    for number, config in enumerate((AGED, COUNTED)):
        model = trained("row_wise", config=config)
        save(model, f"{path}/{number}")
        for planner in (LoadPlanner(path=f"{path}/{number}"), LoadPlanner()):
            other = trained("row_wise", [5, 6, 7], config=None)
            load_into(other, f"{path}/{number}", planner)
            for before, after in zip(tables_of(model), tables_of(other), strict=True):
                assert after.ids().equal(before.ids())
                assert after.life is None and before.life is not None


def test_a_table_without_policies_loads_what_one_with_policies_saved(tmp_path: Path) -> None:
    workers.run(check_loads_without_policies, str(tmp_path), world_size=2)


def test_a_flipped_bit_of_a_row_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    workers.run(_save, path, world_size=2)
    chance = random.Random(1)
    for name in ("weight", "momentum1", "ids"):
        (damage,) = flips_in_numbers(tmp_path / "saved", chance, 1, f".{name}")[:1]
        blob = Path(path, damage.file).read_bytes()
        damage.do(path)
        workers.run(_refuses, path, world_size=2)
        Path(path, damage.file).write_bytes(blob)


def _save(path: str) -> None:
    save(trained("row_wise"), path)


def _refuses(path: str) -> None:
    model = trained("row_wise", [5, 6])
    before = [one.export_state() for one in tables_of(model)]
    with pytest.raises(
        (CheckpointException, ValueError, RuntimeError), match=r"damaged|content sum"
    ):
        load_into(model, path, LoadPlanner(path=path))
    after = [one.export_state() for one in tables_of(model)]
    assert all(a[name].equal(b[name]) for a, b in zip(before, after, strict=True) for name in a)


def loads_twice(path: str) -> None:
    """Reads into a state dict with the path of a checkpoint, then others without: a whole, a damaged one."""
    first, whole, damaged = (f"{path}/{name}" for name in ("first", "whole", "damaged"))
    model = trained("table_wise")
    save(model, first)
    step(model, IDS)
    save(model, whole)  # as many rows
    if dist.get_rank() == 0:
        shutil.copytree(whole, damaged)
        for damage in flips_in_numbers(Path(damaged), random.Random(2), 1, ".weight")[:1]:
            damage.do(damaged)
    dist.barrier()

    def read_both(before: str, then: str) -> Any:
        other = trained("table_wise", [5])
        state = state_dict_of(other)
        quietly(dcp.load, state, checkpoint_id=before, planner=LoadPlanner(path=before))
        quietly(dcp.load, state, checkpoint_id=then, planner=LoadPlanner())
        other.load_state_dict(state["model"])
        other.fused_optimizer.load_state_dict(state["optimizer"])
        return other

    assert alike(read_both(first, whole), model)
    with pytest.raises(ValueError, match="expected weight with content sum"):
        read_both(whole, damaged)


def test_a_state_dict_that_is_read_into_again_forgets_the_first_sums(tmp_path: Path) -> None:
    """A whole checkpoint was refused, and a damaged one was loaded."""
    workers.run(loads_twice, str(tmp_path), world_size=2)


def check_only_loads(path: str) -> None:
    model = trained("row_wise", config=COUNTED)
    step(model, [3001 + dist.get_rank()])
    save(model, path)
    read_by_dcp = []
    real = FileSystemReader.read_data

    def read_data(reader: Any, plan: Any, planner: Any) -> Any:
        read_by_dcp.extend(item.dest_index.fqn.rpartition(".")[2] for item in plan.items)
        return real(reader, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", read_data)
        patch.setattr(CanonicalRows, "read", None)  # state_dict() reads no row
        state = state_dict_of(model)
        quietly(dcp.load, state, checkpoint_id=path, planner=LoadPlanner(path=path))
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["optimizer"])
    assert not {"ids", "weight", "momentum1", "waiting", "config"} & {*read_by_dcp}
    save(model, f"{path} again")


def test_a_state_dict_reads_no_rows_and_dcp_reads_none_into_it(tmp_path: Path) -> None:
    workers.run(check_only_loads, str(tmp_path / "saved"), world_size=2)


def one_rank_without_rows(path: str) -> list[int]:
    of = case(2, "row_wise", config=LRU, rows=4000)
    model, ids = sharded(of), torch.arange(100)
    mine = ids[dyn.owner_ranks(model.module.collection, "t", ids)[:, 0] == 0][:6]
    for one in mine.tolist():
        step(model, [one])
    save(model, path)
    model = sharded(of)
    state = {"model": model.state_dict()}
    quietly(dcp.load, state, checkpoint_id=path, planner=LoadPlanner(path=path))
    model.load_state_dict(state["model"])
    (sharder,), collection = model.sharders, model.module.collection
    moved = {"t": usual_plan("table_wise", 8, 2, 2, rows=4000)}
    sharder.reshard(collection, moved, model._env, model.device)
    optimizer = read({"optimizer": model.fused_optimizer.state_dict()}, path)["optimizer"]
    model.fused_optimizer.load_state_dict(optimizer)
    return collection.table("t").read_last_seen(mine).tolist()


def test_scores_stay_if_a_rank_reads_no_row(tmp_path: Path) -> None:
    """Such a rank once said that the table was loaded without scores, and a reshard told all ranks."""
    found = workers.run(one_rank_without_rows, str(tmp_path / "saved"), world_size=2)
    assert found == [[1, 2, 3, 4, 5, 6]] * 2
