"""A full save and the deltas after it, in order, are the full save later: unsharded models."""

import copy
import gc
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from delta_cases import NAMES, Model, assert_same, batch, events, happen, per_table, train
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import ids_of
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import EmbeddingBagConfig
from torchrec.optim import Adagrad
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import (
    LoadPlanner,
    apply_delta,
    dcp_files,
    delta_export,
    export_delta,
    mark,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIMIZERS = [EmbOptimType.EXACT_ROWWISE_ADAGRAD, "ADAMW"]
OPTIMIZERS += [pytest.param(EmbOptimType.EXACT_SGD, marks=pytest.mark.deep)]  # without state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=max(1, settings.default.max_examples // 8))
@given(before=st.lists(events, max_size=6), after=st.lists(events, max_size=25), ids=per_table)
def test_full_and_deltas_in_order_are_full_later(tmp_path_factory, optimizer, before, after, ids):
    folder = tmp_path_factory.mktemp("deltas")
    model = Model(optimizer)
    twin = copy.deepcopy(model)
    for event in before:
        happen(model, event)
        happen(twin, event)
    marker, number = mark(model), 0
    for event in [*after, ("export",)]:
        if event[0] == "export":
            marker = export_delta(model, folder / str(number), marker)
            apply_delta(twin, folder / str(number))
            assert_same(model, twin)
            number += 1
        else:
            happen(model, event)
    # The copy goes on as the model does: no list or cache of before is left.
    for _ in range(6):
        for one in (model, twin):
            train(one, ids)
        assert_same(model, twin)
        ids = {
            name: [number + 1 for number in some if abs(number) < 1000]
            for name, some in ids.items()
        }


def test_a_copy_forgets_what_it_had_listed_ahead(tmp_path):
    """The model went back to rows and counters of long ago: they must expire in the copy as they do there."""
    model = Model()
    train(model, batch(100))
    model.tables()["old"].assign(ids_of(1), torch.ones(1, 4))
    early = model.tables()["old"].export_state()
    twin = copy.deepcopy(model)
    for step in range(20):
        for one in (model, twin):
            train(one, batch(step))
    marker = mark(model)
    model.tables()["old"].load_state(early)
    export_delta(model, tmp_path / "0", marker)
    apply_delta(twin, tmp_path / "0")
    for _ in range(5):
        assert_same(model, twin)
        for one in (model, twin):
            train(one, batch())
    old = model.tables()["old"]
    assert old.num_rows == old.stats()["waiting"] == 0


# Missed, repeated, for other rows, torn or damaged: an error, and nothing has changed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that trained, copies of it as it was at three moments, and the deltas between them."""
    folder = tmp_path_factory.mktemp("run")
    model = Model(EmbOptimType.ADAM)
    model.sequence.set_time(1)
    train(model, batch(1, 2, 2, 3))
    copies, marker = [copy.deepcopy(model)], mark(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            train(model, batch(3, 4 + number, 4 + number, -number))
            model.tables()["plain"].erase(ids_of(1 + number))
            marker = export_delta(model, folder / str(number), marker)
            copies.append(copy.deepcopy(model))
    return folder, copies


def refuses(model, path, message: str) -> None:
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        apply_delta(model, path)
    assert_same(model, before)


def test_in_order_they_lead_from_each_to_the_next(run):
    folder, copies = run
    model = copy.deepcopy(copies[0])
    for number in range(3):
        apply_delta(model, folder / str(number))
        assert_same(model, copies[number + 1])


def test_a_repeated_a_missed_and_an_early_one(run):
    folder, copies = run
    model = copy.deepcopy(copies[1])
    refuses(
        model, folder / "0", r"table='plain'\): .* of ids as .*it was applied already. Apply every"
    )
    refuses(
        model,
        folder / "2",
        r"table='plain'\): .*begins at content sum [0-9a-f]{16} of ids .*Apply every",
    )
    apply_delta(model, folder / "1")
    refuses(model, folder / "0", "Apply every delta once and in order")


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_that_trained_on_its_own(run, name):
    folder, copies = run
    model = copy.deepcopy(copies[0])
    table = model.tables()[name]
    rows, _ = table.lookup(table.ids()[:1])
    table.assign(table.ids()[:1], rows + 1)
    refuses(model, folder / "0", rf"table='{name}'\): .* of weight as the copy has")


def drop_a_counter(model):
    model.tables()["lru"].life.waiting.removal(ids_of(1, 3)).commit()


def test_another_step_clock_or_counter(run):
    folder, copies = run
    for change, message in (
        (lambda m: setattr(m.tables()["plain"], "step", 7), "table='plain'.* of step"),
        (lambda m: m.sequence.set_time(5), "table='timed'.* of clock"),
        (drop_a_counter, "table='lru'.* of waiting"),
    ):
        model = copy.deepcopy(copies[0])
        change(model)
        refuses(model, folder / "0", message)


def test_models_of_another_kind(run, tmp_path):
    folder, copies = run
    refuses(
        Model(EmbOptimType.EXACT_SGD),
        folder / "0",
        "expected a delta with optimizer state of exact_sgd",
    )
    with pytest.raises(ValueError, match=r"of the tables \['lru', 'old', 'plain'\], got a delta"):
        apply_delta(copies[0].pooled, folder / "0")
    half = copy.deepcopy(copies[0])
    half.pooled.half()
    apply_delta(half, folder / "0")  # another dtype is no other kind
    converted = copy.deepcopy(copies[1])
    converted.pooled.half()
    assert_same(half, converted)
    with pytest.raises(ValueError, match="expected a model with dynamic tables"):
        apply_delta(torch.nn.Linear(2, 2), folder / "0")
    dcp.save({"model": copies[0].state_dict()}, checkpoint_id=tmp_path / "full", no_dist=True)
    refuses(
        copies[0], tmp_path / "full", "expected a delta of export_delta, got .* a full checkpoint"
    )
    refuses(copies[0], tmp_path / "nowhere", "no directory")


def test_it_is_not_loaded_as_a_checkpoint(run):
    """It has the changed rows only: tables would silently lose the others."""
    folder, _ = run
    path, model = folder / "0", Model(EmbOptimType.ADAM)
    optimizer = CombinedOptimizer([("pooled", model.pooled.fused_optimizer)])
    for state in ({"model": model.state_dict()}, {"optimizer": optimizer.state_dict()}):
        for planner in (LoadPlanner(allow_partial_load=True), LoadPlanner(path=path)):
            with pytest.raises(
                CheckpointException, match="expected a full checkpoint, got a delta"
            ):
                dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)


def test_a_torn_or_truncated_one(run, tmp_path):
    folder, copies = run
    torn = shutil.copytree(folder / "0", tmp_path / "torn")
    (torn / ".metadata").unlink()
    refuses(copies[0], torn, "It is torn")
    short = shutil.copytree(folder / "0", tmp_path / "short")
    (data,) = short.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    refuses(copies[0], short, "it is truncated")


def test_what_an_export_refuses(run, tmp_path):
    _, copies = run
    model, other = copy.deepcopy(copies[0]), copy.deepcopy(copies[0])
    marker = mark(model)

    def refused(message, *call):
        with pytest.raises(ValueError, match=message):
            export_delta(*call)

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").touch()
    refused("expected a new directory, got .*taken", model, tmp_path / "taken", marker)
    refused("expected a marker of torchrec_dyn", model, tmp_path / "new", 7)
    refused("expected a marker of this table object", other, tmp_path / "new", marker)
    refused("expected a marker of the tables", model.pooled, tmp_path / "new", marker)
    model.pooled.embedding_bags["old"].float()
    refused("expected a table with the row dtype", model, tmp_path / "new", marker)
    model.pooled.embedding_bags["old"].half()
    assert not (tmp_path / "new").exists()
    export_delta(model, tmp_path / "new", marker)
    apply_delta(other, tmp_path / "new")
    assert_same(model, other)


def test_a_delta_without_a_change(tmp_path):
    model = Model()
    other, marker = copy.deepcopy(model), mark(model)
    marker = export_delta(model, tmp_path / "0", marker)
    apply_delta(other, tmp_path / "0")
    train(model, batch(1, 1))
    copy_now = copy.deepcopy(model)
    marker = export_delta(model, tmp_path / "1", export_delta(model, tmp_path / "2", marker))
    apply_delta(copy_now, tmp_path / "1")
    assert_same(model, copy_now)


def test_rows_of_before_another_optimizer_are_in_the_delta(tmp_path):
    """Another optimizer gives the rows other numbers, by which changes are recorded."""
    model = Model()
    train(model, batch(1, 1, 2, 3, 4))
    other, marker = copy.deepcopy(model), mark(model)
    train(model, batch(1, 5))
    for one in (model, other):
        one.pooled.embedding_bags["plain"].mark_optimizer([Adagrad], [{"lr": 0.1, "eps": 0.5}])
    export_delta(model, tmp_path / "0", marker)
    apply_delta(other, tmp_path / "0")
    assert_same(model, other)


def test_a_step_of_another_thread_during_an_export_is_an_error(tmp_path, monkeypatch):
    model = Model()
    marker = mark(model)

    def step_between(*options):
        train(model, batch(1, 1, 2))
        dcp_files.save_files(*options)

    train(model, batch(1, 1))
    monkeypatch.setattr(delta_export, "save_files", step_between)
    with pytest.raises(CheckpointException, match="got a table that was trained or changed since"):
        export_delta(model, tmp_path / "0", marker)
    assert not (tmp_path / "0").exists()
    monkeypatch.undo()
    export_delta(model, tmp_path / "0", marker)


def test_tracking_ends_with_the_last_marker():
    model = Model()
    marker = mark(model)
    train(model, batch(1, 1, 2))
    assert all(table.changes is not None for table in model.tables().values())
    del marker
    gc.collect()
    train(model, batch(1, 1, 2))
    assert all(table.changes is None for table in model.tables().values())


def test_a_backward_of_before_is_refused(tmp_path):
    model = Model().train()
    twin = copy.deepcopy(model)
    output, late = model(batch(1, 1, 2)), twin(batch(1, 1, 2))
    marker = mark(model)
    output.backward()
    export_delta(model, tmp_path / "0", marker)
    apply_delta(twin, tmp_path / "0")
    assert_same(model, twin)
    with pytest.raises(RuntimeError, match="loaded or converted in between"):
        late.backward()


def test_rows_above_the_limit_of_the_copy_are_kept(tmp_path):
    """As a load keeps them."""

    def table(limit: int):
        config = dyn.DynamicTableConfig(initializer=dyn.Constant(0.0))
        bags = dyn.DynamicEmbeddingBagCollection
        one = EmbeddingBagConfig(limit, 4, "t", feature_names=["f"])
        return bags([one], dynamic=config)

    model, small = table(10), table(5)
    marker = mark(model)
    model.table("t").assign(torch.arange(9), torch.ones(9, 4))
    export_delta(model, tmp_path / "0", marker)
    apply_delta(small, tmp_path / "0")
    assert small.table("t").num_rows == 9
