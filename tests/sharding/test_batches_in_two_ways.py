"""A batch that can be read in two ways is refused, unsharded and sharded alike; other batches are read alike.

TorchRec reads the first of two equal keys in some places and the last in others, and offsets or lengths by
the plan and the number of ranks.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, outputs_by_name, shard
from torchrec import KeyedJaggedTensor

VARIED = {"stride_per_key_per_rank": [[1], [3]]}
EVERY_LINE = torch.tensor([[0, 0, 0], [0, 1, 2]])

# What a batch of the ids 1 to 4 of the features "f" and "g" says besides, and part of the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys twice": ({"keys": ["f", "f", "g", "g"]}, r"got features \['f', 'g'\] repeatedly in keys"),
    "one key twice": (
        {"keys": ["f", "g", "f"], "values": torch.arange(6), "lengths": torch.ones(6).int()},
        r"each feature once in a batch, got features \['f'\] repeatedly in keys \['f', 'g', 'f'\]",
    ),
    "other offsets": (
        {"offsets": torch.tensor([0, 2, 2, 3, 4])},
        "offsets that begin at 0 and agree",
    ),
    "offsets of other features": (
        {"offsets": torch.tensor([0, 2, 3, 4, 4], dtype=torch.int32)},
        "expected offsets that begin at 0 and agree with the lengths",
    ),
    "fewer offsets": (
        {"offsets": torch.tensor([0, 2, 4]), "stride": 2},
        "expected offsets that begin",
    ),
    "offsets from 1": (
        {"lengths": None, "offsets": torch.tensor([1, 2, 3, 4, 5])},
        "expected offsets that begin at 0",
    ),
    "bags by key": (
        {"stride_per_key": [1, 3]},
        r"one number of bags of each feature, got \[1, 3\] by stride_per_key and \[2, 2\] by stride",
    ),
    "bags by key and by rank": (
        {"stride_per_key": [2, 2], **VARIED, "inverse_indices": (["f", "g"], EVERY_LINE)},
        r"got \[2, 2\] by stride_per_key and \[1, 3\] by stride_per_key_per_rank. Leave stride_per_key",
    ),
    "ids in a matrix": ({"values": torch.ones(2, 2).long()}, r"values \[N\], got .* \[2, 2\]"),
}
# TorchRec's unsharded sequence collection does not read inverse_indices, and ours as it.
REFUSED_POOLED: dict[str, tuple[dict[str, Any], str]] = {
    "samples beside one number of bags": (
        {"inverse_indices": (["f", "g"], torch.tensor([[1, 0], [1, 0]]))},
        r"only with stride_per_key_per_rank, got .* one number of bags, 2, for all features. Pass",
    ),
    "samples of a feature twice": (
        {**VARIED, "inverse_indices": (["f", "g", "g"], torch.cat([EVERY_LINE, EVERY_LINE[:1]]))},
        r"a line for each feature, got \[3, 3\] for features \['f', 'g', 'g'\]",
    ),
    "more lines than features": (
        {**VARIED, "inverse_indices": (["f", "g"], EVERY_LINE.repeat(2, 1))},
        r"a line for each feature, got \[4, 3\] for features \['f', 'g'\]",
    ),
    "a feature without samples": (
        {**VARIED, "inverse_indices": (["g"], EVERY_LINE[1:])},
        r"expected inverse_indices of every feature .* got none of features \['f'\]",
    ),
}
# What a batch may say besides: it is read from its lengths alone. Later batches get the keys of the first.
TAKEN: dict[str, dict[str, Any]] = {
    "sums of lengths": {"length_per_key": [1, 3], "offset_per_key": [0, 1, 4]},
    "another number of bags": {"stride": 9, "stride_per_key": [2, 2]},
    "places of lengths": {"lengths_offset_per_key": [0, 1, 4]},
    "offsets as well": {"offsets": torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)},
    "offsets alone": {"lengths": None, "offsets": torch.tensor([0, 1, 2, 3, 4])},
    "lengths in a matrix": {"lengths": torch.ones(2, 2).long()},
    "weights that are not read": {"weights": torch.ones(3)},
    "a key that no table reads": {
        "keys": ["f", "x", "g", "x"],
        "values": torch.tensor([1, 2, 9, 9, 3, 4, 9, 9]),
        "lengths": torch.ones(8).int(),
    },
}


def batch(**given: Any) -> KeyedJaggedTensor:
    made = {"keys": ["f", "g"], "values": torch.tensor([1, 2, 3, 4])}
    return KeyedJaggedTensor(**{**made, "lengths": torch.ones(4).long(), **given})


def check_is_read_alike(pooled: bool, kinds: tuple[str, str]) -> None:
    world = dist.get_world_size()
    tables = [
        Table(f"t{i}", [feature], usual_plan(kind, 8, world, world, i))
        for i, (feature, kind) in enumerate(zip("fg", kinds, strict=True))
    ]
    case = Case(tables, pooled=pooled)
    unsharded = collection_of(case, fused_params=case.fused_params)
    sharded = shard(case, collection_of(case, fused_params=case.fused_params))
    for given, message in {**REFUSED, **(REFUSED_POOLED if pooled else {})}.values():
        for model in (unsharded, sharded):
            with pytest.raises(ValueError, match="Collection.*" + message):
                model(batch(**given))
    assert unsharded.table("t0").num_rows == 0
    assert sharded.module.collection.table("t0").num_rows == 0
    for given in TAKEN.values():
        of_unsharded = outputs_by_name(case, unsharded(batch(**given)))
        of_sharded = outputs_by_name(case, sharded(batch(**given)))
        for name, output in of_unsharded.items():
            assert torch.equal(of_sharded[name], output)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kinds", [("table_wise", "table_wise"), ("row_wise", "table_wise")])
def test_a_batch_is_read_alike_in_every_plan(pooled: bool, kinds: tuple[str, str]) -> None:
    for ranks in (1, 2):  # with one rank a batch is looked up as it is sent
        workers.run(check_is_read_alike, pooled, kinds, world_size=ranks)
