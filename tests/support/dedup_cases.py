"""Trains sequence collections that send each id once beside collections that send every occurrence."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import Case, Table, usual_plan
from sharded_training import batches, collection_of, shard
from torch import Tensor
from torchrec import JaggedTensor

from torchrec_dyn.table.table import DynamicTable

# Counts of received ids of a table without scores, and counts that depend on graphs or the order of
# insertion.
OF_ARRIVALS = {"ids_seen", "hits", "unseen"}
OF_CHANCE = {"bytes", "withheld", "late_grads", "probe_length_mean", "probe_length_max"}


def tables_of(kinds: list[str], world: int, local: int, **options: Any) -> list[Table]:
    """Returns three tables with one, two and two features; the third shares a feature with the first."""
    features, rows = (["a"], ["b", "c"], ["a", "d"]), options.get("rows", 1000)
    return [
        Table(
            f"t{i}", features[i], usual_plan(kinds[i % len(kinds)], 8, world, local, i, rows), **options
        )
        for i in range(3)
    ]  # fmt: skip


def tables_here(model: Any) -> list[DynamicTable]:
    """Returns the tables of this rank."""
    lookups = model.module.collection._lookups
    return [t for lookup in lookups for kernel in lookup._emb_modules for t in kernel.tables]


def exact_grad(output: Tensor, number: int) -> Tensor:
    """Returns small integers: sums of thousands of them are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-4, 5, output.shape, generator=generator).to(output.dtype)


def train_both(
    case: Case, need_indices: bool = False, evaluate_at: int = 1, freeze_at: int | None = None
) -> dict[str, Any]:
    """Trains both sides and asserts that outputs, rows, states and counts are bit-equal.

    Args:
        case: a case with tables "t0", "t1", ...
        need_indices: True if outputs have their ids.
        evaluate_at: the step that only evaluates.
        freeze_at: the first step in which table "t1" is frozen; None: never.

    Returns:
        "rows" on this rank, and the number of ids that this rank received on the sides "once" and "each".
    """
    rank = dist.get_rank()
    sides = {}
    for name in ("each", "once"):
        of_side = dataclasses.replace(case, dedup=name == "once")
        sides[name] = shard(of_side, collection_of(case, need_indices=need_indices))
    arrived = {name: _count_arrivals(model) for name, model in sides.items()}
    for step in range(case.steps):
        mine = batches(case, step)[0][rank]
        for model in sides.values():
            model.train(step != evaluate_at)
            if step == freeze_at:
                model.module.collection.table("t1").freeze()
        outputs = {name: model(mine) for name, model in sides.items()}
        each, once = ({**one} for one in outputs.values())
        assert each.keys() == once.keys()
        for name in each:
            _same_jagged(once[name], each[name], need_indices, f"step {step}, {name}")
        if step != evaluate_at:
            for one in (each, once):
                learning = [o.values() for o in one.values() if o.values().requires_grad]
                grads = [exact_grad(values, number) for number, values in enumerate(learning)]
                torch.autograd.backward(learning, grads)
    each_tables, once_tables = (tables_here(model) for model in sides.values())
    for one, other in zip(once_tables, each_tables, strict=True):
        _same_table(one, other)
    return {"rows": sum(table.num_rows for table in once_tables), **arrived}


def _count_arrivals(model: Any) -> list[int]:
    """Returns a list to which each later lookup on this rank appends its number of ids."""
    seen: list[int] = []
    for lookup in model.module.collection._lookups:
        lookup.register_forward_pre_hook(
            lambda _, arguments: seen.append(arguments[0].values().numel())
        )
    return seen


def _same_jagged(one: JaggedTensor, other: JaggedTensor, need_indices: bool, what: str) -> None:
    assert torch.equal(one.lengths(), other.lengths()), what
    assert one.values().dtype == other.values().dtype, what
    assert torch.equal(one.values(), other.values()), what
    ids, expected = one.weights_or_none(), other.weights_or_none()
    assert (ids is None) == (expected is None) == (not need_indices), what
    if ids is not None and expected is not None:
        assert torch.equal(ids, expected), what


def _same_table(one: DynamicTable, other: DynamicTable) -> None:
    got, expected = one.export_state(), other.export_state()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), f"{one.name}: {name}"
    left_out = OF_CHANCE if one.life is not None else OF_CHANCE | OF_ARRIVALS
    for name, count in other.stats().items():
        assert name in left_out or one.stats()[name] == count, f"{one.name}: {name}"
