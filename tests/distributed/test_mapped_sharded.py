"""Sharded tables in mapped files: every plan, checkpoints into and out of memory, moved tables, pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import checkpoint_cases
import pytest
import torch.distributed as dist
import workers
from checkpoint_cases import (
    OPTIMIZERS,
    Setup,
    held,
    kinds_on,
    load,
    new,
    plan_of,
    run_on,
    same_bits,
    save,
    tables_of,
    train,
)
from mapped_cases import SHARED_MEMORY, are_mapped, small_files
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import drain, make_pipeline, results_of

import torchrec_dyn as dyn
from torchrec_dyn.lookup import TableGroup, rows_ahead
from torchrec_dyn.storage import RowStore


def check_same(got: Any, expected: Any) -> None:
    assert len(got) and got.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(got[name], value), name


@contextmanager
def tables_in_files(directory: str = SHARED_MEMORY) -> Iterator[None]:
    """Puts the tables of `checkpoint_cases` that are made inside into mapped files."""
    storage = dyn.MappedFiles(directory)
    tables: Any = [
        (name, dtype, replace(config or dyn.DynamicTableConfig(), storage=storage))
        for name, dtype, config in checkpoint_cases.TABLES
    ]
    with mock.patch.object(checkpoint_cases, "TABLES", tables):
        yield


def in_files(setup: Setup) -> Any:
    with tables_in_files(), small_files():
        return new(setup)


def check_mapped(model: Any) -> None:
    assert all(are_mapped(table) for table in tables_of(model) if table.num_rows)


def train_in_both(setup: Setup) -> int:
    mapped, plain = in_files(setup), new(setup)
    for one in (mapped, plain):
        train(one, setup, range(4))
    check_same(held(mapped), held(plain))
    check_mapped(mapped)
    return sum(table.num_rows for table in tables_of(mapped))


PLANS = [
    *(Setup(2, kinds_on(2, True), optimizer=name) for name in OPTIMIZERS),
    Setup(2, ("table_wise", "row_wise", "column_wise"), pooled=False, optimizer="ADAM"),
]


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    "setup", PLANS, ids=lambda setup: f"{setup.optimizer}-{'bags' if setup.pooled else 'sequences'}"
)
def test_plans_train_the_bits_of_tables_in_memory(setup: Setup) -> None:
    assert min(run_on(setup, train_in_both)) > 20


def check_load_across(setup: Setup, folder: str) -> None:
    mapped, plain = in_files(setup), new(setup)
    for name, one in (("mapped", mapped), ("plain", plain)):
        train(one, setup, range(3))
        save(one, f"{folder}/{name}")
    if dist.is_initialized():
        dist.barrier()
    loaded = load(in_files(setup), f"{folder}/plain")
    check_mapped(loaded)
    for one in (loaded, load(new(setup), f"{folder}/mapped")):
        check_same(held(one), held(plain))
    train(loaded, setup, range(4, 6))
    train(plain, setup, range(4, 6))
    check_same(held(loaded), held(plain))


@pytest.mark.parametrize(
    "setup",
    [
        Setup(0, optimizer="ADAM"),
        Setup(2, kinds_on(2, True), optimizer="EXACT_ROWWISE_ADAGRAD", tables=4),
    ],
    ids=["unsharded", "sharded"],
)
def test_checkpoints_cross_between_files_and_memory(setup: Setup, tmp_path: Path) -> None:
    run_on(setup, check_load_across, str(tmp_path))


def check_move_in_both(setup: Setup) -> None:
    models = [in_files(setup), new(setup)]
    changed = {
        table.name: plan_of(kind, 2, 2, turn + 1, True)
        for turn, (table, kind) in enumerate(
            zip(setup.case().tables, ("row_wise", "column_wise", "table_wise") * 2, strict=False)
        )
    }
    for one in models:
        train(one, setup, range(3))
        one.sharders[0].reshard(one.module.collection, changed, one._env, one.device)
        train(one, setup, range(3, 5))
    check_same(held(models[0]), held(models[1]))
    check_mapped(models[0])


def test_moved_tables_stay_in_files() -> None:
    run_on(Setup(2, kinds_on(2, True), optimizer="ADAM", tables=4), check_move_in_both)


def run_pipeline(name: str, storage: Any) -> dict[str, Any]:
    """Trains in a pipeline; returns its results, and the calls of the tables in their order."""
    run = Run(["table_wise", "row_wise"], ["row_wise"], lives=[{"storage": storage}], steps=5)
    calls: list[str] = []
    ahead, look_up = TableGroup.ask_ahead, TableGroup._look_up

    def ask_ahead(group: TableGroup, ids: Any, training: bool) -> None:
        calls.append("ahead" if training else "ahead of evaluation")
        ahead(group, ids, training)

    def look(group: TableGroup, *args: Any) -> Any:
        calls.append("look up")
        return look_up(group, *args)

    model = sharded_model(run)
    with (
        mock.patch.object(TableGroup, "ask_ahead", ask_ahead),
        mock.patch.object(TableGroup, "_look_up", look),
    ):
        if name == "loop":
            outputs: Any = []
            for batch in batches(run):
                loss, output = model(batch)
                loss.backward()
                outputs.append(output)
        else:
            outputs = drain(make_pipeline(run, name, model), batches(run))
    return results_of(run, model, outputs) | {"calls": calls}


@pytest.mark.parametrize("world", [1, 2])
def test_a_pipeline_asks_for_the_rows_of_the_next_batch(world: int) -> None:
    name, local = "sparse_dist", world
    files, memory = (
        workers.run(run_pipeline, name, storage, world_size=world, local_size=local)
        for storage in (dyn.MappedFiles(SHARED_MEMORY), None)
    )
    for mapped, plain in zip(files, memory, strict=True):
        assert mapped["losses"] == plain["losses"]
        for table, state in plain["states"].items():
            check_same(mapped["states"][table], state)
        calls = mapped["calls"]
        groups = calls.count("look up") // 5
        assert calls.count("ahead") == 5 * groups and set(calls) == {"ahead", "look up"}
        assert calls[: 2 * groups] == ["ahead"] * 2 * groups  # the second batch before the first
        assert "ahead" not in plain["calls"]
    (loop, *_) = workers.run(
        run_pipeline, "loop", dyn.MappedFiles(SHARED_MEMORY), world_size=world, local_size=local
    )
    assert set(loop["calls"]) == {"look up"}  # its forward asks


def ask_for_rows_here(storage: Any) -> list[int]:
    """Returns how many of a rank's own ids have a row here, as it asks for them ahead."""
    run = Run(["table_wise"], ["row_wise"], lives=[{"storage": storage}], steps=3)
    model = sharded_model(run)
    for batch in batches(run):
        loss, _ = model(batch)
        loss.backward()
    found: list[int] = []
    with mock.patch.object(
        RowStore, "ask_for", lambda _, rows: found.append(int((rows >= 0).sum()))
    ):
        for name in ("pooled", "sequences"):
            collection = getattr(model.module, name)
            features = batches(run)[-1].features
            for lookup in collection._lookups:
                for kernel in lookup._emb_modules:
                    kernel.ask_ahead(features)
                    assert rows_ahead._asking is not None and rows_ahead._asking._last is not None
                    rows_ahead._asking._last.result(10)
    return found


def test_a_rank_asks_for_those_of_its_ids_that_it_owns() -> None:
    """Other ranks send the rest with the batch."""
    of_ranks = workers.run(
        ask_for_rows_here, dyn.MappedFiles(SHARED_MEMORY), world_size=2, local_size=2
    )
    assert all(sum(found) > 0 for found in of_ranks)
