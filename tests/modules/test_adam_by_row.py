"""ADAM with `use_rowwise_bias_correction`: each row is corrected by the number of its own updates."""

import pytest
import torch
from table_cases import make_group, make_table

from torchrec_dyn.initializers import Normal
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

POOL = torch.arange(12) * 7919 - 1000
HYPER = {"learning_rate": 0.02, "eps": 0.01, "beta1": 0.8, "beta2": 0.95}
BY_ROW = {"optimizer": "ADAM", "use_rowwise_bias_correction": True, **HYPER}


def read(fused_params):
    return RowOptimizer.from_fused_params(fused_params, "table 't'")


@pytest.mark.parametrize("dim", [3, 16, 300])
@pytest.mark.usefixtures("device")
def test_every_row_is_as_under_an_optimizer_of_its_own(dim):
    """Oracle: torch.optim.Adam over each row alone, which steps when a batch has the row's id."""
    table = make_table(
        optimizer=read(BY_ROW), embedding_dim=dim, initializer=Normal(0.0, 0.5), seed=3
    )
    table.find_or_insert(POOL)
    rows = [torch.nn.Parameter(row.double()) for row in table.lookup(POOL)[0].cpu()]
    options = {"lr": 0.02, "eps": 0.01, "betas": (0.8, 0.95)}
    own = [torch.optim.Adam([row], **options) for row in rows]
    group, draw = make_group(table, pooling="none"), torch.Generator().manual_seed(dim)
    updates = torch.zeros(len(POOL))
    for step in range(25):
        seen = torch.randperm(min(len(POOL), 1 + step), generator=draw)[:5]  # later rows begin late
        grad = torch.randn(len(seen), dim, generator=draw)
        group(POOL[seen], torch.tensor([0, len(seen)]), training=True).backward(grad)
        for number, of_row in zip(seen.tolist(), grad.double(), strict=True):
            rows[number].grad = of_row
            own[number].step()
        updates[seen] += 1
    torch.testing.assert_close(
        table.lookup(POOL)[0].cpu().double(), torch.stack(rows).detach(), rtol=1e-5, atol=1e-6
    )
    state = table.export_state()
    places = ((state["ids"].cpu() + 1000) // 7919).tolist()
    assert state["row_counter"].flatten().tolist() == updates[places].tolist()


def test_a_row_that_begins_late_moves_as_far_as_one_that_began_early():
    """The first step of a row is the learning rate in every column; by the table's step it is shorter."""
    moved = {}
    for by_row in (True, False):
        rule = read(BY_ROW | {"use_rowwise_bias_correction": by_row, "eps": 1e-8})
        table = make_table(optimizer=rule, embedding_dim=4)
        table.find_or_insert(POOL)
        group, one = make_group(table, pooling="none"), torch.tensor([0, 1])
        for number in [0] * 9 + [1]:
            before = table.lookup(POOL[[1]])[0]
            group(POOL[[number]], one, training=True).backward(torch.ones(1, 4))
        moved[by_row] = (before - table.lookup(POOL[[1]])[0]).abs().max().item()
    assert moved[True] == pytest.approx(0.02, rel=1e-5)
    assert moved[False] < 0.015


def test_the_key_of_fbgemm():
    assert read(BY_ROW) == RowOptimizer(OptimizerKind.ADAM_BY_ROW, **HYPER)
    assert read(BY_ROW | {"use_rowwise_bias_correction": False}).kind == OptimizerKind.ADAM
    for optimizer in ("EXACT_SGD", "ADAMW", "LAMB"):
        with pytest.raises(
            ValueError, match=f"use_rowwise_bias_correction with ADAM, .*{optimizer}"
        ):
            read({"optimizer": optimizer, "use_rowwise_bias_correction": True})
    with pytest.raises(
        ValueError, match="use_rowwise_bias_correction with ADAM, got it with EXACT_SGD"
    ):
        read({"use_rowwise_bias_correction": True})
