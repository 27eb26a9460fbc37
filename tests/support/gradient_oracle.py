"""Trains a sharded collection beside dense rows whose gradients are reduced over ranks by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import Case, Table
from sharded_training import batches, collection_of, outputs_by_name, shard
from torchrec import KeyedJaggedTensor
from torchrec.distributed import comm_ops

MODES = ["mean_over_ranks", "mean_over_senders", "sum"]
RATE = 0.1


def reduce_by_hand(mode: str, grads: list[torch.Tensor], sent: list[torch.Tensor]) -> torch.Tensor:
    """Returns the reduced gradient of each row, [M, D]."""
    total = torch.stack(grads).sum(0)
    if mode == "sum":
        return total
    if mode == "mean_over_ranks":
        return total / len(grads)
    return total / torch.stack(sent).sum(0).clamp(min=1)[:, None]


def output_grad(name: str, shape: torch.Size, rank: int) -> torch.Tensor:
    """Returns a gradient that differs by output, column and rank."""
    number = sum(map(ord, name)) % 7 + 1
    return torch.linspace(-1, 1, shape[1]).expand(shape) * number * (rank + 1)


class DenseRows:
    """A table as dense rows [M, D] of all ids in the batches."""

    def __init__(self, table: Table, ids: torch.Tensor, start: float) -> None:
        self.table, self.ids = table, ids
        self.rows = torch.full((ids.numel(), table.dim), start)

    def grads_of(
        self, case: Case, features: KeyedJaggedTensor, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradient [M, D] of one rank's batch, and a mask [M] of its ids."""
        rows = self.rows.clone().requires_grad_()
        seen = torch.zeros(self.ids.numel(), dtype=torch.bool)
        for name in self.table.features:
            jagged = features[name]
            places = torch.searchsorted(self.ids, jagged.values())
            seen[places] = True
            if case.pooled:
                # With inverse indices a bag is the output of as many examples as point to it.
                pooled = torch.nn.functional.embedding_bag(
                    places, rows, jagged.offsets()[:-1], mode=self.table.pooling.lower(),
                    per_sample_weights=jagged.weights_or_none() if case.weighted else None,
                )  # fmt: skip
                if case.variable:
                    keys, inverse = features.inverse_indices()
                    pooled = pooled[inverse[keys.index(name)]]
                output = pooled
            else:
                output = rows[places]
            output.backward(output_grad(name, output.shape, rank))
        grad = rows.grad if rows.grad is not None else torch.zeros_like(rows)
        return grad, seen


def check_trains_as_dense(case: Case, start: float = 0.5, divides: bool = True) -> None:
    """Asserts that the rows of every shard are trained with the reduction of their table's config."""
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = [batches(case, step)[0] for step in range(case.steps)]
    dense = [_dense(table, steps, start) for table in case.tables]
    comm_ops.set_gradient_division(divides)
    try:
        sharded = shard(case, collection_of(case, fused_params=case.fused_params))
        for per_rank in steps:
            got = outputs_by_name(case, sharded(per_rank[rank]))
            torch.autograd.backward(
                list(got.values()), [output_grad(n, v.shape, rank) for n, v in got.items()]
            )
            for one in dense:
                parts = [one.grads_of(case, per_rank[r], r) for r in range(world)]
                mode = one.table.config.gradient if one.table.config else "mean_over_ranks"
                if mode == "mean_over_ranks" and not divides:
                    mode = "sum"  # as the users of TorchRec then expect of all tables
                grad = reduce_by_hand(mode, [g for g, _ in parts], [s for _, s in parts])
                one.rows -= RATE * grad
    finally:
        comm_ops.set_gradient_division(True)
    for one in dense:
        handle: Any = sharded.module.collection.table(one.table.name)
        ids = handle.ids()
        expected = one.rows[torch.searchsorted(one.ids, ids)]
        if handle.columns:
            columns = torch.cat([torch.arange(c, c + n) for c, n in handle.columns])
            torch.testing.assert_close(
                handle.lookup(ids)[0], expected[:, columns], rtol=1e-5, atol=1e-5
            )
        counts = torch.tensor([ids.numel() * sum(n for _, n in handle.columns)])
        dist.all_reduce(counts)
        assert int(counts) == one.ids.numel() * one.table.dim


def _dense(table: Table, steps: list[Any], start: float) -> DenseRows:
    ids = [kjt[name].values() for per_rank in steps for kjt in per_rank for name in table.features]
    return DenseRows(table, torch.cat(ids).unique(), start)
