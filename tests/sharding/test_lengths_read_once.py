"""The lengths of a batch are read once; wrong ones are one error, and change nothing."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from mock_device import CUDA, MockDevice
from sharded_cases import SPREAD_ROWS, Case, Table, usual_plan
from sharded_twins import ShardedTwins
from table_cases import same_state
from torchrec import KeyedJaggedTensor

from torchrec_dyn import ops
from torchrec_dyn.sharding.batches import BatchCheck

# The plans of one collection. Ids of "two types" are split; tables of "two groups" differ in their pooling.
PLANS: dict[str, list[str]] = {
    "table_wise": ["table_wise", "table_wise"],
    "row_wise": ["row_wise", "row_wise"],
    "column_wise": ["column_wise", "column_wise"],
    "table_row_wise": ["table_row_wise", "table_row_wise"],
    "grid_shard": ["grid_shard", "grid_shard"],
    "two types": ["table_wise", "row_wise"],
    "two groups": ["table_wise", "table_wise"],
}
OF_SEQUENCES = ["table_wise", "row_wise", "column_wise", "two types"]
FEATURES, IDS = ["f0", "f1"], torch.arange(6)
RIGHT = {"lengths": torch.tensor([2, 1, 0, 3])}
SUM, OFFSETS = "negative and add up to the 6 ids", "expected offsets that begin at 0 and agree"
WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "too many": ({"lengths": torch.tensor([2, 1, 0, 4])}, f"{SUM}, got a minimum of 0 and a sum of 7"),
    "too few": ({"lengths": torch.tensor([2, 1, 0, 2])}, f"{SUM}, got a minimum of 0 and a sum of 5"),
    "negative": ({"lengths": torch.tensor([4, -1, 0, 3])}, f"{SUM}, got a minimum of -1 and a sum of 6"),
    "wrapping": ({"lengths": torch.tensor([2**62, 2**62, 2**63 - 1, 7])}, SUM),
    "of other offsets": ({**RIGHT, "offsets": torch.tensor([0, 1, 3, 3, 6])}, OFFSETS),
}  # fmt: skip


def case_of(plan: str, pooled: bool, **options: Any) -> Case:
    world = dist.get_world_size()
    tables = [
        Table(f"t{turn}", [f"f{turn}"], usual_plan(kind, 8, world, world, turn))
        for turn, kind in enumerate(PLANS[plan])
    ]
    if plan == "two groups":
        tables[1].pooling = "MEAN"
    exact = not set(PLANS[plan]) & set(SPREAD_ROWS)
    return Case(tables, pooled, exact, **options)


def batch_of(variable: bool = False, **lengths: torch.Tensor) -> KeyedJaggedTensor:
    """Returns a batch of two samples, or of three that share the first feature's bag."""
    sizes: dict[str, Any] = {}
    if variable:
        inverse = torch.tensor([[0, 0, 0], [0, 1, 2]])
        sizes = {"stride_per_key_per_rank": [[1], [3]], "inverse_indices": (FEATURES, inverse)}
    return KeyedJaggedTensor(FEATURES, IDS, **lengths, **sizes)


def states_of(twins: ShardedTwins) -> list[Any]:
    tables = [one._shards.table(t.name) for one in twins.collections for t in twins.case.tables]
    return [shard.export_state() for table in tables for shard in table.shards]


def forward(module: Any, batch: KeyedJaggedTensor, ahead: bool) -> None:
    """Runs the stages of a forward; with a prefetch, as in a pipeline."""
    ctx = module.create_context()
    ids = module.input_dist(ctx, batch).wait().wait()
    if ahead:
        module.prefetch(ids, None, ctx)
    module.compute_and_output_dist(ctx, ids).wait()


def refuse(plan: str, pooled: bool, variable: bool = False) -> None:
    with MockDevice() as device:
        twins = ShardedTwins(device, case_of(plan, pooled, variable=variable))
        twins.forward(batch_of(variable, **RIGHT))
        before = states_of(twins)
        modes = [(True, False), (True, True), (False, False)]
        for (name, (wrong, text)), (training, ahead) in itertools.product(WRONG.items(), modes):
            for module, place in zip(twins.collections, (torch.device("cpu"), CUDA), strict=True):
                module.train(training)
                with pytest.raises(ValueError) as caught:
                    forward(module, batch_of(variable, **wrong).to(place), ahead)
                error = str(caught.value)
                assert text in error and error.startswith("Dynamic"), (name, place, error)
                ops.raise_errors(torch.empty(0, device=place))  # the error does not come again
        for one, other in zip(before, states_of(twins), strict=True):
            assert same_state(one, other)
        for module in twins.collections:
            module.train()
            assert len(module._shards.batches) == 0  # none is on its way
        twins.forward(batch_of(variable, **RIGHT))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("pooled", [True, False])
def test_wrong_lengths_are_one_error_before_anything_changes(pooled: bool, world: int) -> None:
    for plan in PLANS if pooled else OF_SEQUENCES:
        workers.run(refuse, plan, pooled, world_size=world)
    for plan in ("row_wise", "two types"):
        workers.run(refuse, plan, pooled, True, world_size=world)


def test_whatever_reads_a_batch_checks_it() -> None:
    """So does the reader of a feature ahead, whose sums TorchRec keeps with the batch."""
    check = BatchCheck(FEATURES, weighted=False, pooled=True, where="Dynamic")
    for read in (lambda batch: batch["f1"], lambda batch: batch.split([1, 1])):
        for wrong, text in WRONG.values():
            with pytest.raises(ValueError, match=text):
                read(check(batch_of(**wrong)))
        read(check(batch_of(**RIGHT)))


def reads_of(plan: str, pooled: bool, dedup: bool = False) -> tuple[int, int]:
    """Returns how often the host waits for a GPU in the input dist, and in the stages after the lookup."""
    with MockDevice() as device:
        twins = ShardedTwins(device, case_of(plan, pooled, dedup=dedup))
        for _ in range(2):
            twins.forward(batch_of(**RIGHT))
        module = twins.collections[1]
        features = batch_of(**RIGHT).to(CUDA)
        device.forget()
        ctx = module.create_context()
        sent = module.input_dist(ctx, features)
        sending = len(device.reads)
        looked_up = module.compute(ctx, sent.wait().wait())
        device.forget()
        module.output_dist(ctx, looked_up).wait()
        return sending, len(device.reads)


def check_reads(expected: dict[str, int]) -> None:
    for plan, reads in expected.items():
        for pooled in (True, False)[: 1 + (plan in OF_SEQUENCES)]:
            assert reads_of(plan, pooled) == (reads, 0), (plan, pooled)
    assert reads_of("table_wise", False, dedup=True) == (2, 0)  # and the number of distinct ids


def test_one_rank_waits_only_where_it_splits_ids() -> None:
    expected = {"table_wise": 0, "row_wise": 0, "column_wise": 1, "two types": 1, "grid_shard": 1}
    workers.run(check_reads, expected, world_size=1)


def test_ranks_wait_once_before_they_send() -> None:
    """Two waits if ids are split, or repeated for column shards, and then sorted by owner."""
    expected = {"table_wise": 1, "row_wise": 1, "column_wise": 1, "two types": 2, "grid_shard": 2}
    workers.run(check_reads, expected, world_size=2)
