"""Layouts that plans define. More refused plans are in tests/distributed/test_plans_refused.py."""

import pytest
from sharded_cases import shard_by_hand
from torchrec import EmbeddingBagConfig
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torchrec_dyn.ranks import SHARDING_TRAITS, TableLayout, checked_plan, table_layouts
from torchrec_dyn.ranks.layout import Piece

Pieces = list[tuple[list[int], int, int]]


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def layout(plan: ParameterSharding, rows: int = 1000) -> TableLayout:
    """Returns the layout of a table of 8 columns on four ranks."""
    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=rows, feature_names=["f"])
    env = ShardingEnv.from_local(4, 0)
    return table_layouts([config], {"t": plan}, env, list(SHARDING_TRAITS), "here")["t"]


@pytest.mark.parametrize(
    ("kind", "pieces", "expected"),
    [
        ("table_wise", [([2], 0, 8)], [(0, 8, (2,))]),
        # The order of the shards in a plan has no effect.
        ("column_wise", [([3], 6, 2), ([1], 0, 6)], [(0, 6, (1,)), (6, 2, (3,))]),
        ("row_wise", [([3, 1, 0, 2], 0, 8)], [(0, 8, (0, 1, 2, 3))]),
        ("table_row_wise", [([2, 3], 0, 8)], [(0, 8, (2, 3))]),
        ("table_column_wise", [([2], 4, 4), ([3], 0, 4)], [(0, 4, (3,)), (4, 4, (2,))]),
        ("grid_shard", [([2, 3], 4, 4), ([0, 1], 0, 4)], [(0, 4, (0, 1)), (4, 4, (2, 3))]),
    ],
)
def test_pieces_of_each_sharding_type(
    kind: str, pieces: Pieces, expected: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    found = layout(shard_by_hand(kind, pieces))
    assert found.pieces == tuple(Piece(*of_piece) for of_piece in expected)
    assert found.row_ranks == len(expected[0][2])
    assert found.rows_are_spread == (found.row_ranks > 1)


def test_ranks_may_have_no_rows_of_a_small_table() -> None:
    """Two rows on four ranks: TorchRec's planner makes shards without rows. Their begin has no effect."""
    plan = shard_by_hand("row_wise", [([0, 1, 2, 3], 0, 8)], rows=2)
    assert layout(plan, rows=2).row_ranks == 4
    plan.sharding_spec.shards[3].shard_offsets = [9, 0]  # type: ignore[union-attr]
    assert layout(plan, rows=2).row_ranks == 4


@pytest.mark.parametrize(
    ("kind", "pieces", "said"),
    [
        ("table_row_wise", [([1, 2], 0, 8)], r"ranks of one node in order, got ranks \[1, 2\]"),
        ("grid_shard", [([0, 1], 0, 4), ([1, 2], 4, 4)], r"in order, got ranks \[1, 2\]"),
        ("table_wise", [([4], 0, 8)], r"ranks from 0 to 3, got \[4\]"),
        (
            "table_column_wise",
            [([0], 0, 4), ([1], 4, 3)],
            r"columns 0 to 8 once, got shards of \(begin, size\) \[\(0, 4\), \(4, 3\)\]",
        ),
    ],
)
def test_ranks_and_columns_are_checked(kind: str, pieces: Pieces, said: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^here\(table='t'\): expected .*{said}\. [MT]"
    ) as caught:
        layout(shard_by_hand(kind, pieces))
    assert ("LOCAL_WORLD_SIZE must be the same" in str(caught.value)) == ("in order" in said)


def test_a_checked_plan_is_a_copy() -> None:
    """The user may shard another model with the same plan."""
    plan = {"t": shard_by_hand("table_wise", [([0], 0, 8)])}
    checked = checked_plan(plan, "here")
    assert (plan["t"].compute_kernel, checked["t"].compute_kernel) == ("fused", "customized_kernel")
    assert checked_plan(checked, "here") == checked
    plan["t"].compute_kernel = "dense"
    with pytest.raises(
        ValueError, match=r"table='t'\): expected compute kernel 'fused', .*, got 'dense'"
    ):
        checked_plan(plan, "here")
