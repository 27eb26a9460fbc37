"""No training path adds floats in an order that CUDA leaves open: so a run on CUDA repeats bit for bit."""

import pytest
import torch
import torch.distributed as dist
import workers
from mock_device import MockDevice
from order_of_sums import OrderOfSums
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.layers import inputs
from torchrec_dyn.lookup.repeated_rows import sums_by_place

PLANS = ["table_wise", "row_wise", "column_wise"]
POOLED_PLANS = [*PLANS, "table_row_wise", "table_column_wise", "grid_shard"]
# These ops add in order on the CPU. Their functions take another way elsewhere, as the next tests show.
REPEATS = {("index_add_", "torchrec_dyn/lookup/repeated_rows.py: sums_by_place")}
SHARES = {("index_add", "torchrec_dyn/layers/inputs.py: _sums_by_bag")}


def tables(plans, **options):
    """Returns a table of two features for each plan."""
    plan_of = {plan: usual_plan(plan, 8, 2, 2) for plan in plans}
    return [Table(plan, [plan, f"{plan}_2"], plan_of[plan], **options) for plan in plans]


CASES = {
    "pooled": Case(tables(POOLED_PLANS, pooling="MEAN"), variable=True),
    "weighted": Case(tables(POOLED_PLANS), weighted=True),
    "sequence": Case(tables(PLANS), pooled=False, variable=True),
    "each id once": Case(tables(PLANS), pooled=False, dedup=True),
}


def train_sharded(case):
    model = shard(case, collection_of(case, fused_params=case.fused_params))
    with OrderOfSums() as noted:
        for step in range(2):
            features = batches(case, step)[0][dist.get_rank()]
            outputs = list(outputs_by_name(case, model(features)).values())
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return noted.sums


@pytest.mark.parametrize("name", CASES)
def test_sharded_training_adds_in_a_fixed_order(name):
    expected = set() if CASES[name].pooled else REPEATS
    assert workers.run(train_sharded, CASES[name], world_size=2, local_size=2) == [expected] * 2


def with_fewer_bags():
    """Returns features `a` of 6 bags and `b` of 4 bags, for 12 samples."""
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(30) % 11,
        lengths=torch.full((10,), 3),
        stride_per_key_per_rank=[[6], [4]],
        inverse_indices=(["a", "b"], torch.stack([torch.arange(12) % 6, torch.arange(12) % 4])),
    )


@pytest.mark.parametrize("module", ["collection", "quotient and remainder"])
def test_unsharded_outputs_by_sample_add_in_a_fixed_order(module):
    tables = [EmbeddingBagConfig(100, 8, name=f, feature_names=[f]) for f in "ab"]
    if module == "collection":
        model = dyn.DynamicEmbeddingBagCollection(tables, fused_params=FUSED_PARAMS)
    else:
        model = dyn.QuotientRemainderEmbeddingBagCollection(tables, 4, fused_params=FUSED_PARAMS)
    with OrderOfSums() as noted:
        model(with_fewer_bags()).values().sum().backward()
    assert noted.sums == REPEATS


@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_modules_of_one_table_add_in_a_fixed_order(mode):
    options = {} if mode != "tile" else {"tile_length": 3}
    bags = dyn.DynamicEmbeddingBag(
        8, 100, mode, is_weighted=True, fused_params=FUSED_PARAMS, **options
    )
    ids = torch.randint(0, 50, (60,))
    weights = torch.rand(60, requires_grad=True)
    with OrderOfSums() as noted:
        bags(ids.view(12, 5), weights.view(12, 5)).sum().backward()
    assert noted.sums == (SHARES if mode == "mean" else set())


@pytest.mark.parametrize("count, columns", [(0, 8), (1, 8), (40, 130), (3000, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_by_place_have_the_bits_of_the_cpu(count, columns, dtype):
    draw = torch.Generator().manual_seed(count)
    rows = 5000 if count else 0
    places = (torch.rand(rows, generator=draw) ** 3 * count).long()
    values = (torch.rand(rows, columns, generator=draw) - 0.5).to(dtype)
    expected = sums_by_place(values, places, count)
    with MockDevice() as device, OrderOfSums() as noted:
        there = device.of(values), device.of(places)
        with torch.device("meta"):  # the default device of the user
            sums = sums_by_place(*there, count)
    assert torch.equal(sums.memory, expected) and sums.dtype == dtype
    assert noted.sums == set() and device.mixed == device.without_kernel == []


def test_sums_by_bag_have_the_bits_of_the_cpu():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 40, (100,), generator=draw)
    bag = torch.arange(100).repeat_interleave(lengths)
    weights = torch.randn(len(bag), generator=draw)
    expected = inputs._sums_by_bag(weights, bag, lengths)
    with MockDevice() as device, OrderOfSums() as noted:
        found = inputs._sums_by_bag(*map(device.of, (weights, bag, lengths)))
    assert torch.equal(found.memory, expected)
    assert noted.sums == set() and device.mixed == []
