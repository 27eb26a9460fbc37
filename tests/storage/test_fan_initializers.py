"""Initial rows by Xavier and Kaiming: torch's scale for a square weight, equal rows under every plan."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import load, quietly, save
from checkpoint_small import sharded, step, unsharded
from sharded_cases import Case, Table, usual_plan
from sharded_training import check_trains_as_unsharded
from table_cases import make_table
from torch import nn

import torchrec_dyn as dyn
from torchrec_dyn import __main__ as command_line
from torchrec_dyn.checkpoint_format.checkpoint_reader import open_checkpoint
from torchrec_dyn.initializers import Normal, Uniform

FOUR = [
    dyn.XavierUniform(gain=1.7),
    dyn.XavierNormal(gain=0.3),
    dyn.KaimingUniform(a=0.5, mode="fan_out"),
    dyn.KaimingNormal(nonlinearity="tanh"),
]
by_name = pytest.mark.parametrize("initializer", FOUR, ids=lambda one: type(one).__name__)


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (dyn.XavierUniform(), Uniform(-0.25, 0.25)),  # sqrt(6 / 96)
        (dyn.XavierUniform(gain=2.0), Uniform(-0.5, 0.5)),
        (dyn.XavierNormal(), Normal(0.0, math.sqrt(1 / 48))),
        (dyn.XavierNormal(gain=3.0), Normal(0.0, 3 * math.sqrt(1 / 48))),
        (dyn.KaimingUniform(), Uniform(-math.sqrt(6 / 48), math.sqrt(6 / 48))),
        (dyn.KaimingUniform(a=1.0), Uniform(-0.25, 0.25)),
        (dyn.KaimingUniform(mode="fan_out", nonlinearity="linear"), Uniform(-0.25, 0.25)),
        (dyn.KaimingNormal(), Normal(0.0, math.sqrt(2 / 48))),
        (dyn.KaimingNormal(nonlinearity="relu"), Normal(0.0, math.sqrt(2 / 48))),
        (dyn.KaimingNormal(a=math.sqrt(5)), Normal(0.0, math.sqrt(2 / 6 / 48))),
    ],
)
def test_the_scale_follows_from_the_width(initializer: Any, expected: Any) -> None:
    got, wanted = initializer.for_dimension(48), dataclasses.astuple(expected)
    assert type(got) is type(expected)
    assert dataclasses.astuple(got) == pytest.approx(wanted, rel=1e-14, abs=0)


@pytest.mark.parametrize(
    ("initializer", "torchs", "options"),
    [
        (FOUR[0], nn.init.xavier_uniform_, {"gain": 1.7}),
        (FOUR[1], nn.init.xavier_normal_, {"gain": 0.3}),
        (FOUR[2], nn.init.kaiming_uniform_, {"a": 0.5, "mode": "fan_out"}),
        (FOUR[3], nn.init.kaiming_normal_, {"nonlinearity": "tanh"}),
        (dyn.KaimingUniform(), nn.init.kaiming_uniform_, {}),
    ],
)
def test_rows_spread_as_torchs_square_weight(initializer: Any, torchs: Any, options: Any) -> None:
    """With 250,000 numbers the standard deviation is exact to 1 in 700, a bound to 4 in a million."""
    width = 500
    theirs = torchs(torch.empty(width, width), **options)
    table = make_table(embedding_dim=width, initializer=initializer)
    table.find_or_insert(torch.arange(width))
    ours = table.lookup(torch.arange(width))[0]
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.01)
    assert ours.mean().abs() < 5 * ours.std() / width
    if "uniform" in torchs.__name__:
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=1e-3)


@by_name
def test_neither_limit_nor_block_decides(initializer: Any) -> None:
    def rows(**options: Any) -> torch.Tensor:
        table = make_table(embedding_dim=12, initializer=initializer, **options)
        table.find_or_insert(torch.arange(20))
        return table.lookup(torch.arange(20))[0]

    assert torch.equal(rows(num_embeddings=20), rows(num_embeddings=5_000_000, row_limit=40))
    part = make_table(embedding_dim=12, initializer=initializer, first_column=4, columns=5)
    part.find_or_insert(torch.arange(20))
    assert torch.equal(part.lookup(torch.arange(20))[0], rows()[:, 4:9])


@by_name
@pytest.mark.parametrize("pooled", [True, False])
def test_every_plan_starts_and_trains_as_unsharded(initializer: Any, pooled: bool) -> None:
    config = dyn.DynamicTableConfig(initializer=initializer, seed=5)
    kinds = ["table_wise", "column_wise"] + ([] if pooled else ["row_wise"])
    tables = [
        Table(kind, [f"f{i}"], usual_plan(kind, 8, 2, 2, i), config=config)
        for i, kind in enumerate(kinds)
    ]
    workers.run(check_trains_as_unsharded, Case(tables, pooled, steps=2), world_size=2)


def case_of(initializer: Any) -> Case:
    config = dyn.DynamicTableConfig(initializer=initializer, unseen="initial")
    plan = usual_plan("table_wise", 8, 1, 1)
    return Case([Table("t", ["f_t"], plan, rows=100, config=config)])


@by_name
def test_a_checkpoint_names_what_it_became(tmp_path: Any, capsys: Any, initializer: Any) -> None:
    model, path = unsharded(case_of(initializer)), str(tmp_path / "c")
    step(model, [1, 2, 3])
    save(model, path)
    became = initializer.for_dimension(8)
    (saved,) = open_checkpoint(path).tables.values()
    told = {"name": type(became).__name__, **dataclasses.asdict(became)}
    assert saved.config["initializer"] == told
    assert command_line.main(["inspect", path]) == 0
    assert f"{type(became).__name__}(" in capsys.readouterr().out

    # The load also sets the initial rows of later ids, in a table with another initializer.
    other = unsharded(case_of(dyn.Constant(0.5)))
    load(other, path)
    for one in (model, other):
        step(one, [4])
    ids = torch.tensor([1, 2, 3, 4])
    assert torch.equal(model.table("t").lookup(ids)[0], other.table("t").lookup(ids)[0])


def save_of_two_ranks(initializer: Any, path: str) -> None:
    plan = usual_plan("column_wise", 8, 2, 2)
    config = dyn.DynamicTableConfig(initializer=initializer)
    model = sharded(Case([Table("t", ["f_t"], plan, config=config)]))
    state = {"model": model.state_dict()}
    quietly(dcp.save, state, checkpoint_id=path)


@by_name
def test_column_shards_and_unused_tables_name_that_of_the_whole_row(
    tmp_path: Any, initializer: Any
) -> None:
    workers.run(save_of_two_ranks, initializer, f"{tmp_path}/2", world_size=2)
    unused = {"model": unsharded(case_of(initializer)).state_dict()}
    quietly(dcp.save, unused, checkpoint_id=f"{tmp_path}/1")
    became = initializer.for_dimension(8)
    for path in (f"{tmp_path}/1", f"{tmp_path}/2"):
        (saved,) = open_checkpoint(path).tables.values()
        told = {"name": type(became).__name__, **dataclasses.asdict(became)}
        assert saved.config["initializer"] == told


def test_they_are_values() -> None:
    assert dyn.XavierUniform() == dyn.XavierUniform(1.0) != dyn.XavierNormal()
    assert dyn.KaimingUniform(a=0.1) != dyn.KaimingUniform()
    configs = {dyn.DynamicTableConfig(initializer=one) for one in FOUR + FOUR}
    assert len(configs) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        dyn.XavierUniform().gain = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dyn.XavierUniform(0.0), r"XavierUniform\.gain: expected a finite number > 0, got"),
        (lambda: dyn.XavierNormal(-1.0), r"XavierNormal\.gain: .* got -1\.0"),
        (lambda: dyn.XavierUniform(math.nan), "got nan"),
        (lambda: dyn.XavierNormal(math.inf), "got inf"),
        (lambda: dyn.XavierUniform("2"), "got '2'"),
        (lambda: dyn.KaimingUniform(a=math.inf), r"KaimingUniform\.a: expected a finite number"),
        (lambda: dyn.KaimingUniform(a=-1e200), r"KaimingUniform\.a: .* got -1e\+200"),
        (lambda: dyn.KaimingNormal(a=None), r"KaimingNormal\.a: .* got None"),
        (lambda: dyn.KaimingUniform(mode="fan"), '"fan_in" or "fan_out", got \'fan\''),
        (
            lambda: dyn.KaimingNormal(nonlinearity="sharp"),
            r"KaimingNormal\.nonlinearity: .* got 'sharp'",
        ),
        (lambda: dyn.KaimingNormal(nonlinearity=None), r"nonlinearity: .* got None"),
    ],
)
def test_impossible_ones(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
