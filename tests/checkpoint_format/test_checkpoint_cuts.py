"""Row-wise optimizer state on other column cuts: the mean over the columns, weighted by width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import (
    ROW_WISE,
    ROW_WISE_STATES,
    Setup,
    contents,
    load,
    new,
    run_on,
    save,
    train,
)

STATE = "optimizer/state/collection.embedding_bags.plain.weight/plain."


def train_and_save(setup: Setup, path: str) -> None:
    model = new(setup)
    train(model, setup, range(3))
    save(model, path)


def load_and_save(setup: Setup, path: str, again: str) -> None:
    save(load(new(setup), path), again)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("optimizer", ROW_WISE)
def test_other_cuts_take_the_weighted_mean(tmp_path: Path, optimizer: str) -> None:
    def setup(world: int, kind: str) -> Setup:
        return Setup(world, (kind,), optimizer=optimizer, tables=2)

    name = ROW_WISE_STATES[optimizer]
    run_on(setup(2, "three_columns"), train_and_save, str(tmp_path / "three"))  # 0, 3, 8, 12
    three = contents(tmp_path / "three")[STATE + name].double()
    assert three.shape[1] == 3 and bool((three > 0).any(1).all())

    run_on(
        setup(2, "column_wise"), load_and_save, *map(str, (tmp_path / "three", tmp_path / "two"))
    )
    two = contents(tmp_path / "two")
    low = three[:, 0] * 0.5 + three[:, 1] * 0.5
    high = three[:, 1] * (2 / 6) + three[:, 2] * (4 / 6)
    assert torch.equal(two[STATE + name], torch.stack([low, high], 1).float())
    assert bytes(two[STATE + "optimizer_config"].tolist()).count(b'"cuts": [0, 6, 12]') == 1

    for world in (0, 3):
        again = str(tmp_path / f"one {world}")
        run_on(setup(world, "row_wise"), load_and_save, str(tmp_path / "three"), again)
        mean = three @ torch.tensor([3 / 12, 5 / 12, 4 / 12], dtype=torch.float64)
        torch.testing.assert_close(
            contents(again)[STATE + name], mean[:, None].float(), rtol=1e-6, atol=0
        )

    # From fewer cuts to more each column shard begins with the number of the whole.
    run_on(setup(1, "three_columns"), load_and_save, again, str(tmp_path / "again"))
    whole = contents(again)[STATE + name]
    assert torch.equal(contents(tmp_path / "again")[STATE + name], whole.expand(-1, 3))
