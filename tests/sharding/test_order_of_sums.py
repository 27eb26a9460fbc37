"""No training path adds floats in an order that CUDA leaves open: so a run on CUDA repeats bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
import workers
from mock_device import MockDevice
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.layers import inputs
from torchrec_dyn.lookup.gradient_reduction import sums_by_place

PACKAGES = (Path(__file__).resolve().parents[2] / "torchrec_dyn", Path(torchrec.__file__).parent)
aten = torch.ops.aten
OPEN = {
    *(aten.index_add, aten.index_add_, aten.index_reduce, aten.index_reduce_),
    *(aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_),
    *(aten.cumsum, aten.cumsum_, aten.cumprod, aten.cumprod_, aten.logcumsumexp, aten.histc),
    *(aten.embedding_dense_backward, aten._embedding_bag_dense_backward, aten.put_, aten.put),
    torch.ops.fbgemm.group_index_select_dim0,
}


class OrderOfSums(TorchDispatchMode):
    """While entered, notes calls of such ops.

    Attributes:
        sums: op and place of each call: the file and function of our package or of TorchRec that called it,
            or "backward".
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, kwargs = func.overloadpacket, kwargs or {}
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        if op is aten.bincount:
            is_open = named.get("weights") is not None
        elif op is aten.segment_reduce:
            is_open = named["data"].dim() == 1  # CUDA then adds in another order than the CPU
        else:
            tensors = [one for one in named.values() if isinstance(one, torch.Tensor)]
            is_open = op in OPEN and (not tensors or tensors[0].is_floating_point())
            # Each sum of distinct places has one number.
            is_open = is_open and not ("index" in named and _are_distinct(named["index"]))
        if is_open:
            self.sums.add((op.__name__, _place()))
        return func(*args, **kwargs)


def _are_distinct(places: torch.Tensor) -> bool:
    return places.unique().numel() == places.numel()


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for package in PACKAGES:
            if path.is_relative_to(package):
                return f"{path.relative_to(package.parent)}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"


PLANS = ["table_wise", "row_wise", "column_wise"]
POOLED_PLANS = [*PLANS, "table_row_wise", "table_column_wise", "grid_shard"]
# This op adds in order on the CPU. Its function takes another way elsewhere, as a test below shows.
REPEATS = {("index_add_", "torchrec_dyn/lookup/gradient_reduction.py: sums_by_place")}


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


@pytest.mark.everyday(2)
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


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "tile"])
def test_modules_of_one_table_add_in_a_fixed_order(mode):
    options = {"is_weighted": mode != "max"} | ({"tile_length": 3} if mode == "tile" else {})
    bags = dyn.DynamicEmbeddingBag(8, 100, mode, fused_params=FUSED_PARAMS, **options)
    ids = torch.randint(0, 50, (12, 5))
    weights = torch.rand(12, 5, requires_grad=True) if mode != "max" else None
    with OrderOfSums() as noted:
        bags(ids, weights).sum().backward()
    assert noted.sums == set()


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


def test_sums_by_place_are_float32_whatever_torchs_default_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        sums = sums_by_place(torch.ones(300, 1).float(), torch.zeros(300).long(), 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sums.dtype == torch.float32 and sums.tolist() == [[300.0]]  # bfloat16 stops at 256


def test_shares_have_the_bits_of_the_cpu():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 40, (100,), generator=draw)
    weights = torch.randn(int(lengths.sum()), generator=draw)
    expected = inputs.shares(weights, lengths)
    with MockDevice() as device, OrderOfSums() as noted:
        found = inputs.shares(*map(device.of, (weights, lengths)))
    assert torch.equal(found.memory, expected)
    assert noted.sums == set() and device.mixed == []
