"""DynamicEmbeddingBag against torch.nn.EmbeddingBag and its formulas, for every form of input."""

import copy
import pickle
from itertools import permutations
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec import EmbeddingBagConfig, JaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
DIM = 4
BAGS = [[3, 3, 7], [], [2**63 - 1], [-1, 7, -(2**63), 0, 5, 3]]


def bag_of(mode: str = "sum", **options: Any) -> dyn.DynamicEmbeddingBag:
    return dyn.DynamicEmbeddingBag(
        DIM,
        100,
        mode,
        fused_params=SGD,
        **{"tile_length": 3 if mode == "tile" else None, **options},
    )


def jagged(bags: list[list[int]], weights: Tensor | None = None) -> JaggedTensor:
    ids = torch.tensor([one for bag in bags for one in bag], dtype=torch.int64)
    return JaggedTensor(ids, lengths=torch.tensor([len(bag) for bag in bags]), weights=weights)


def nested(bags: list[list[int]]) -> Tensor:
    tensors = [torch.tensor(bag, dtype=torch.int64) for bag in bags]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


def rows_of(module: dyn.DynamicEmbeddingBag, bags: list[list[int]]) -> dict[int, Tensor]:
    """Assigns a row to every id of the bags; returns copies by id, which gather gradients."""
    ids = torch.tensor(sorted({one for bag in bags for one in bag}), dtype=torch.int64)
    rows = torch.rand(len(ids), DIM, generator=torch.Generator().manual_seed(3)) - 0.5
    module.table.assign(ids, rows)
    return {int(one): row.requires_grad_() for one, row in zip(ids, rows.clone(), strict=True)}


def by_formula(
    mode: str, bags: list[list[int]], weights: list[Tensor], rows: dict[int, Tensor], tile: int = 3
) -> Tensor:
    """Computes the formulas of the docstring bag by bag."""
    outputs = []
    for bag, of_bag in zip(bags, weights, strict=True):
        terms = [w * rows[one] for w, one in zip(of_bag, bag, strict=True)]
        if mode == "tile":
            empty = [torch.zeros(DIM)] * tile
            outputs.append(torch.cat([*terms, *empty][:tile]))
            continue
        if mode == "max":
            outputs.append(torch.stack(terms).max(0).values if terms else torch.zeros(DIM))
            continue
        total = sum(terms, torch.zeros(DIM))
        if mode == "mean":
            norm = sum(of_bag, torch.tensor(0.0))
            total = total / norm if float(norm.detach()) != 0 else torch.zeros(DIM)
        outputs.append(total)
    return torch.stack(outputs)


def check_step(
    module: dyn.DynamicEmbeddingBag, output: Tensor, expected: Tensor, rows: dict[int, Tensor]
) -> None:
    """Asserts equal outputs, and equal rows after one step."""
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.sin().sum().backward()
    expected.sin().sum().backward()
    for one, row in rows.items():
        learnt = row.detach() - (0 if row.grad is None else row.grad)
        got, found = module.table.lookup(torch.tensor([one]))
        assert bool(found)
        torch.testing.assert_close(got[0], learnt, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["jagged", "nested"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "tile"])
def test_bags_without_weights(mode: str, form: str) -> None:
    module = bag_of(mode)
    rows = rows_of(module, BAGS)
    output = module(jagged(BAGS) if form == "jagged" else nested(BAGS))
    assert output.shape == (4, 3 * DIM if mode == "tile" else DIM)
    ones = [torch.ones(len(bag)) for bag in BAGS]
    check_step(module, output, by_formula(mode, BAGS, ones, rows), rows)
    assert output[1].eq(0).all()  # the empty bag


@pytest.mark.parametrize("given_as", ["own", "beside", "nested"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_weighted_bags(mode: str, gradients: bool, given_as: str) -> None:
    module = bag_of(mode, is_weighted=True, weight_gradients=gradients)
    rows = rows_of(module, BAGS)
    weights = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.1, 0.2, 1.0, 0.0, 4.0, 2.5])
    ours, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    if given_as == "own":
        output = module(jagged(BAGS, ours))
    elif given_as == "beside":
        output = module(jagged(BAGS), ours)
    else:
        ids = nested(BAGS)
        output = module(ids, torch.nested.nested_tensor_from_jagged(ours, ids.offsets()))
    expected = by_formula(mode, BAGS, theirs.split([len(bag) for bag in BAGS]), rows)
    check_step(module, output, expected, rows)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


# ReCIS 1.0 divides by the count if there are more than 5 ids per offset, else by the weights.
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 40])
def test_weighted_mean_at_any_density(length: int, gradients: bool) -> None:
    module = bag_of("mean", is_weighted=True, weight_gradients=gradients)
    bags = [[(7 * i + j) % 11 for j in range(length)] for i in range(6)]
    rows = rows_of(module, bags)
    weights = torch.rand(6, length, generator=torch.Generator().manual_seed(1)) + 0.1
    output = module(torch.tensor(bags), weights)
    check_step(module, output, by_formula("mean", bags, list(weights), rows), rows)


def test_recis_values_by_hand() -> None:
    rows = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]])
    bags, weights = jagged([[1, 2], [2, 2, 1], []]), torch.tensor([1.0, 3.0, 1.0, 1.0, 2.0])
    expected = {
        "sum": [[31.0, 62, 93, 124], [22, 44, 66, 88], [0, 0, 0, 0]],
        "mean": [[7.75, 15.5, 23.25, 31], [5.5, 11, 16.5, 22], [0, 0, 0, 0]],
        "tile": [[1.0, 2, 3, 4, 30, 60, 90, 120], [10, 20, 30, 40, 10, 20, 30, 40], [0] * 8],
    }
    for mode, values in expected.items():
        module = bag_of(mode, is_weighted=True, tile_length=2 if mode == "tile" else None)
        module.table.assign(torch.tensor([1, 2]), rows)
        assert module(bags, weights).tolist() == values


@pytest.mark.parametrize("gradients", [False, True])
def test_bags_whose_weights_sum_to_zero(gradients: bool) -> None:
    module = bag_of("mean", is_weighted=True, weight_gradients=gradients)
    rows = rows_of(module, [[1, 2, 3]])
    weights = torch.tensor([[1.0, -1.0], [0.0, 0.0], [1.0, 3.0]], requires_grad=True)
    output = module(torch.tensor([[1, 2], [1, 2], [2, 3]]), weights)
    assert output[:2].eq(0).all() and output[2].ne(0).all()
    output.sum().backward()
    assert weights.grad.isfinite().all() and weights.grad[:2].eq(0).all()
    assert module.table.lookup(torch.tensor([1]))[0].equal(rows[1].detach().unsqueeze(0))


@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_weights_of_several_calls_see_the_rows_of_the_forward(mode: str) -> None:
    module = bag_of(mode, is_weighted=True, weight_gradients=True)
    rows = rows_of(module, [[1, 2]])
    ours, theirs = (torch.tensor([[1.0, 3.0], [2.0, 0.5]], requires_grad=True) for _ in range(2))
    output = torch.cat([module(torch.tensor([[1, 2]]), one) for one in ours.split(1)])
    check_step(module, output, by_formula(mode, [[1, 2]] * 2, list(theirs), rows), rows)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_ones_where_weighted_bags_come_without_weights(mode: str) -> None:
    plain, weighted, here = (
        bag_of(mode, **options)
        for options in ({}, {"is_weighted": True}, {"is_weighted": True, "weight_gradients": True})
    )
    expected = plain(jagged(BAGS))
    torch.testing.assert_close(weighted(jagged(BAGS)), expected)
    torch.testing.assert_close(here(jagged(BAGS)), expected)


@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_max_has_the_bits_of_torch_for_equal_values_and_nan(dtype: DataType) -> None:
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[2.0, nan, -0.0, -inf], [2.0, 1.0, 0.0, -inf], [1.0, nan, -1.0, inf]])
    module = bag_of("max", data_type=dtype)
    stock = nn.EmbeddingBag.from_pretrained(
        rows, freeze=False, mode="max", include_last_offset=True
    )
    module.table.assign(torch.arange(3), rows)
    bags = [[*order] for size in range(4) for order in permutations(range(3), size)] + [
        [1, 0, 1, 0]
    ]
    lengths = torch.tensor([len(bag) for bag in bags])
    output = module(jagged(bags))
    expected = stock(
        torch.cat([torch.tensor(bag).long() for bag in bags]), pad(lengths.cumsum(0), (1, 0))
    )
    # Sums of a few ones are exact in any dtype.
    output.backward(torch.ones_like(output))
    expected.backward(torch.ones_like(expected))
    learnt = module.table.lookup(torch.arange(3))[0].float()
    stepped = rows - stock.weight.grad
    for ours, theirs in ((output, expected), (learnt, stepped)):
        assert torch.equal(*(values.nan_to_num(70.0, 80.0, -80.0) for values in (ours, theirs)))


def test_max_updates_every_row_of_a_bag() -> None:
    decay = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.5, "weight_decay": 0.1}
    module = dyn.DynamicEmbeddingBag(DIM, 100, "max", fused_params=decay)
    ids, rows = torch.arange(3), torch.tensor([[4.0], [2.0], [1.0]]).repeat(1, DIM)
    module.table.assign(ids, rows)
    module(torch.tensor([[0, 1]])).sum().backward()
    learnt = module.table.lookup(ids)[0]
    # Loshchilov and Hutter 2019: w -= lr * (m / (sqrt(v) + eps) + decay * w); the first quotient is 1, or 0.
    torch.testing.assert_close(learnt[:, 0], torch.tensor([4 - 0.5 * 1.4, 2 - 0.5 * 0.2, 1.0]))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)]
)
def test_dense_bags_train_as_torchs(mode: str, weighted: bool, padding: int | None) -> None:
    module = bag_of(mode, is_weighted=weighted, padding_idx=padding)
    stock = nn.EmbeddingBag(10, DIM, mode=mode, padding_idx=padding)
    known = torch.arange(10 if padding is None else 9) + (padding is not None)
    module.table.assign(known, stock.weight.detach()[known])
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        ids = torch.randint(10, (5, 3), generator=generator)
        ids[0] = 0  # with padding, an empty bag
        weights = torch.rand(5, 3, generator=generator) if weighted else None
        expected = stock(ids, per_sample_weights=weights)
        output = module(ids, weights)
        torch.testing.assert_close(output, expected)
        output.sin().sum().backward()
        expected.sin().sum().backward()
        with torch.no_grad():
            stock.weight -= stock.weight.grad
            stock.weight.grad = None
        torch.testing.assert_close(module.table.lookup(known)[0], stock.weight.detach()[known])
    assert module.table.num_rows == len(known)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "tile"])
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    tile=st.integers(1, 6),
    options=st.sampled_from(
        [{}, {"padding_idx": 2}, {"is_weighted": True}, {"is_weighted": True, "weight_gradients": True},
         {"is_weighted": True, "padding_idx": 2}]
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    mode: str, shape: list[int], tile: int, options: dict[str, Any], seed: int
) -> None:
    if mode == "max":
        options = {name: value for name, value in options.items() if name == "padding_idx"}
    module = bag_of(mode, **options, tile_length=tile if mode == "tile" else None)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, shape, generator=generator)
    weights = torch.rand(shape, generator=generator) if options.get("is_weighted") else None
    output = module(ids, weights)
    assert output.shape == (*shape[:-1], DIM * (tile if mode == "tile" else 1))
    # Each bag alone, without padding.
    flat, of_ids = ids.view(-1, shape[-1]) if ids.numel() else ids, weights
    if ids.numel() == 0:
        assert output.eq(0).all()
        return
    of_ids = torch.ones(flat.shape) if weights is None else weights.view(flat.shape)
    keep = flat != options.get("padding_idx", -1)
    bags = [bag[kept].tolist() for bag, kept in zip(flat, keep, strict=True)]
    held = torch.arange(6)
    rows = dict(zip(held.tolist(), module.table.lookup(held)[0], strict=True))
    expected = by_formula(
        mode, bags, [w[kept] for w, kept in zip(of_ids, keep, strict=True)], rows, tile
    )
    torch.testing.assert_close(output.view(expected.shape), expected)
    output.sum().backward()


def test_tile_looks_up_only_what_it_keeps() -> None:
    module = bag_of("tile", tile_length=2, padding_idx=0)
    ids = torch.tensor([[0, 5, 0, 6, 7], [8, 0, 0, 0, 0]])
    output = module(ids).view(2, 2, DIM)
    first = {one: module.table.lookup(torch.tensor([one]))[0][0] for one in (5, 6, 8)}
    assert torch.equal(output[0], torch.stack([first[5], first[6]]))  # padding takes no place
    assert torch.equal(output[1], torch.stack([first[8], torch.zeros(DIM)]))
    assert sorted(module.table.ids().tolist()) == [5, 6, 8]
    assert module.table.stats()["ids_seen"] == 3
    output.sum().backward()
    for one, row in first.items():
        assert torch.equal(module.table.lookup(torch.tensor([one]))[0][0], row - 1)


def test_forms_agree() -> None:
    bags = [[1, 2, 3], [4, 5, 6]]
    for mode in ("sum", "mean", "max", "tile"):
        dense = bag_of(mode)(torch.tensor(bags))
        assert torch.equal(dense, bag_of(mode)(jagged(bags)))
        assert torch.equal(dense, bag_of(mode)(nested(bags)))
        assert torch.equal(dense[0], bag_of(mode)(torch.tensor(bags[0])))
        assert torch.equal(dense, bag_of(mode)(torch.tensor([bags]))[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gradients", [False, True])
def test_weights_of_other_dtypes_are_computed_with_as_float32(
    gradients: bool, dtype: torch.dtype
) -> None:
    """Quotients of float16 have 11 bits, and those of float64 are rounded twice."""
    ids = torch.arange(60).view(4, 15)
    given = (torch.rand(4, 15, generator=torch.Generator().manual_seed(4)) + 0.1).to(dtype)
    for mode in ("sum", "mean"):
        one, twin = (bag_of(mode, is_weighted=True, weight_gradients=gradients) for _ in range(2))
        weights, wide = given.clone(), given.float()
        if gradients:
            weights, wide = weights.requires_grad_(), wide.requires_grad_()
        output, expected = one(ids, weights), twin(ids, wide)
        assert output.dtype == torch.float32 and torch.equal(output, expected)
        output.sin().sum().backward(), expected.sin().sum().backward()
        assert all(
            map(torch.equal, one.table.lookup(ids.view(-1)), twin.table.lookup(ids.view(-1)))
        )
        if gradients:
            assert torch.equal(weights.grad, wide.grad.to(dtype))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_holes_of_a_nested_tensor_are_in_no_bag(mode: str, gradients: bool) -> None:
    module = bag_of(mode, is_weighted=True, weight_gradients=gradients, padding_idx=9)
    begins, lengths = torch.tensor([1, 0, 0]), torch.tensor([2, 0, 3])
    ids, weights = (
        torch.nested.narrow(dense, 1, begins, lengths, layout=torch.jagged)
        for dense in (torch.arange(12).view(3, 4), torch.arange(12.0).view(3, 4) + 1)
    )
    bags = [[1, 2], [], [8, 10]]
    rows = rows_of(module, bags)
    of_bags = [torch.tensor(bag) + 1.0 for bag in bags]
    check_step(module, module(ids, weights), by_formula(mode, bags, of_bags, rows), rows)
    assert module.table.num_rows == 4


@pytest.mark.parametrize("mode", ["sum", "tile"])
def test_is_an_ordinary_module(mode: str) -> None:
    module = bag_of(mode, is_weighted=True, name="words", padding_idx=-1)
    told = repr(module).split("\n")[1].strip()
    tile = ", tile_length=3" if mode == "tile" else ""
    assert told == f"4, 100, mode='{mode}', name='words'{tile}, is_weighted=True, padding_idx=-1"
    ids = torch.tensor([[1, 2], [3, -1]])
    module(ids).sum().backward()
    again = bag_of(mode, is_weighted=True, name="words", padding_idx=-1)
    again.load_state_dict(copy.deepcopy(module.state_dict()))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), again):
        assert torch.equal(other(ids), module(ids))
    module.half()
    assert module.table.lookup(ids[0])[0].dtype == torch.float16
    assert module(ids).dtype == torch.float32
    assert module.table.name == "words" and module.fused_optimizer.param_groups[0]["lr"] == 1.0
    module.eval()
    assert module(torch.tensor([77])).eq(0).all() and module.table.num_rows == 3


# Refused input

WHERE = r"DynamicEmbeddingBag\(table='embedding_bag'\)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_dim": 0}, "expected embedding_dim to be an integer above 0, got 0"),
        ({"num_embeddings": 0}, "expected num_embeddings to be an integer above 0, got 0"),
        ({"mode": "min"}, 'expected mode "sum", "mean", "max" or "tile", got \'min\''),
        (
            {"mode": "max", "is_weighted": True},
            'expected is_weighted=False with mode "max", as in torch.nn.EmbeddingBag, got is_weighted=True',
        ),
        ({"mode": "tile"}, "expected tile_length to be an integer above 0, got None"),
        (
            {"mode": "tile", "tile_length": 0},
            "expected tile_length to be an integer above 0, got 0",
        ),
        ({"tile_length": 2}, 'expected tile_length with mode "tile" only, got 2 with "sum"'),
        ({"padding_idx": 0.5}, "expected padding_idx to be an int64 or None, got 0.5"),
        ({"weight_gradients": True}, "expected weight_gradients of weighted bags only"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{WHERE}: {message}"):
        dyn.DynamicEmbeddingBag(**{"embedding_dim": 4, "num_embeddings": 10, **options})


TWO = torch.tensor([[1, 2]])


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (torch.tensor(1), None, r"expected ids \[..., bag\], got a tensor of no dimensions"),
        (TWO.short(), None, "expected ids of dtype int64"),
        (TWO, TWO, "expected weights of a floating dtype, got torch.int64"),
        (TWO, [0.5, 0.5], "expected weights of a floating dtype, got list"),
        (TWO, torch.ones(2), r"expected weights of the shape of the ids, \[1, 2\], got \[2\]"),
        (jagged([[1], [2]]), torch.ones(1, 2), r"shape of the ids, \[2\], got \[1, 2\]"),
        (jagged([[1]], torch.ones(1)), torch.ones(1), "expected weights once, got them in the Jagged"),
        (nested([[1], [2]]), torch.ones(2), "expected weights of the shape of the ids"),
        (nested([[1], [2]]), nested([[1, 2], []]).float(), "expected weights of the shape of the ids"),
        (JaggedTensor(TWO[0], lengths=TWO[0]), None, "add up to the 2 ids"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["mean", "tile"])
def test_impossible_inputs(mode: str, ids: Any, weights: Any, message: str) -> None:
    module = bag_of(mode, is_weighted=True)
    with pytest.raises(ValueError, match=f"{WHERE}: .*{message}"):
        module(ids, weights)
    assert module.table.num_rows == 0


@pytest.mark.parametrize("mode", ["sum", "mean", "tile"])
def test_weights_want_a_weighted_module(mode: str) -> None:
    for ids, weights in ((TWO, torch.ones(1, 2)), (jagged([[1]], torch.ones(1)), None)):
        with pytest.raises(ValueError, match=r"expected no weights, got .*is_weighted=True"):
            bag_of(mode)(ids, weights)


def test_a_mean_is_float32_whatever_torchs_default_is() -> None:
    ones = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0))
    bags = bag_of("mean", is_weighted=True, dynamic=ones)
    torch.set_default_dtype(torch.bfloat16)
    try:
        mean = bags(torch.ones(1, 1000, dtype=torch.int64))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(mean, torch.ones(1, DIM))


@pytest.mark.parametrize(
    "make",
    [
        lambda **of: dyn.DynamicEmbedding(DIM, 100, **of),
        lambda **of: bag_of(**of),
        lambda **of: bag_of("tile", is_weighted=True, **of),
        lambda **of: bag_of(is_weighted=True, weight_gradients=True, **of),
        lambda **of: dyn.QuotientRemainderEmbeddingBagCollection(
            [EmbeddingBagConfig(100, DIM, "t", feature_names=["t"])], 7, is_weighted=True, **of
        ),
    ],
)
def test_ids_without_weights_cannot_be_scored_by_them(make: Any) -> None:
    options = dyn.DynamicTableConfig(eviction=(dyn.ExpireAfter(steps=9), dyn.LowestScore()))
    with pytest.raises(ValueError, match="expected an eviction that needs no weights"):
        make(dynamic=options)
    trained = bag_of(is_weighted=True, dynamic=options)
    trained(torch.tensor([[1, 2]]), torch.tensor([[1.0, 3.0]]))
    assert trained.table.count(torch.tensor([1, 2])).tolist() == [256, 768]
