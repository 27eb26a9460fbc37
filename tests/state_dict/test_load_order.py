"""The order of loads: a model and its optimizer in either order; and what was read but not yet loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import differences, held, put, quietly, save, state_dict_of, tables_of
from checkpoint_small import LRU, case, on_one, read, sharded, step, unsharded
from table_cases import same_state
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.state_dict import TableLoad, staged_table
from torchrec_dyn.storage.row_store import RowStore


def either_first(path: str) -> list[str]:
    of = case(2, "row_wise", config=LRU, optimizer="ADAM")
    trained = sharded(of)
    for count in (30, 20):
        step(trained, list(range(count)))
    save(trained, path)
    found = []
    for order in (("model", "optimizer"), ("optimizer", "model")):
        model = sharded(of)
        step(model, [1, 2, 99])
        state = read(state_dict_of(model), path)
        for part in order:
            (model if part == "model" else model.fused_optimizer).load_state_dict(state[part])
            found += differences(held(model), held(trained))  # the first has loaded both
        with pytest.raises(RuntimeError, match="changed since"):
            step(model, [5])
            model.fused_optimizer.load_state_dict(state["optimizer"])
    return found


def test_either_state_dict_loads_all_and_the_other_is_checked(tmp_path: Path) -> None:
    assert workers.run(either_first, str(tmp_path / "saved"), world_size=2) == [[], []]


def optimizer_alone(path: str) -> list[str]:
    of = case(2, "row_wise", optimizer="ADAM")
    trained, model, other = (sharded(of) for _ in range(3))
    step(trained, list(range(30)))
    save(trained, path)
    model.load_state_dict(read({"model": model.state_dict()}, path)["model"])
    before = held(model)
    assert differences(before, held(trained))  # optimizer state has begun anew
    step(other, list(range(30, 60)))
    for into, error in ((other, "ids that the table has"), (model, None)):
        state = read({"optimizer": into.fused_optimizer.state_dict()}, path)["optimizer"]
        if error is None:
            into.fused_optimizer.load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=error):
                into.fused_optimizer.load_state_dict(state)
    return differences(held(model), held(trained))


def test_an_optimizer_alone_is_loaded_if_its_ids_are_those_of_the_table(tmp_path: Path) -> None:
    assert workers.run(optimizer_alone, str(tmp_path / "saved"), world_size=2) == [[], []]


def test_two_state_dicts_of_a_table_in_one_load_are_an_error(tmp_path: Path) -> None:
    assert on_one(table_twice, tmp_path)


def table_twice(path: str) -> bool:
    model = sharded(case())
    quietly(dcp.save, {"a": model.state_dict(), "b": model.state_dict()}, checkpoint_id=path)
    with pytest.raises(BaseException, match="expected its tensors once in a state dict"):
        read({"a": model.state_dict(), "b": model.state_dict()}, path)
    return True


def test_unsharded_the_module_starts_optimizer_state_afresh() -> None:
    """If the ids agree, the order cannot be checked: docs/guide/save/checkpoints.md says it."""
    model = unsharded(case())
    step(model, [1, 2, 3])
    state = copy.deepcopy(state_dict_of(model))
    model.fused_optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
    after = model.local_tables()["t"].export_state()
    assert not after["momentum1"].any() and not after["step"]


def test_unsharded_an_optimizer_of_other_ids_is_refused() -> None:
    model, trained = unsharded(case()), unsharded(case())
    step(model, [1, 2, 3])
    step(trained, [4, 5, 6])
    before = model.local_tables()["t"].export_state()
    with pytest.raises(ValueError, match="ids that the table has"):
        model.fused_optimizer.load_state_dict(copy.deepcopy(trained.fused_optimizer.state_dict()))
    after = model.local_tables()["t"].export_state()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def state_of_a_copy(model: dyn.DynamicEmbeddingBagCollection, **changes: torch.Tensor) -> dict:
    """Returns the optimizer's state dict of a copy of a model whose table has other numbers."""
    model = copy.deepcopy(model)
    table = model.local_tables()["t"]
    table.load_state(table.export_state() | changes)
    return model.fused_optimizer.state_dict()


def test_unsharded_optimizer_state_goes_to_the_rows_of_its_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state comes in canonical order, in stretches of two rows; the rows are in the order of training."""
    monkeypatch.setattr(knobs, "CHUNK_BYTES", 64)
    model = unsharded(case(optimizer="ADAM"))
    step(model, list(range(40)))
    state = model.local_tables()["t"].export_state()
    changes = {name: torch.rand_like(state[name]) for name in ("momentum1", "momentum2")}
    changes["step"] = torch.tensor(7)
    model.fused_optimizer.load_state_dict(state_of_a_copy(model, **changes))
    assert same_state(model.local_tables()["t"].export_state(), state | changes)


@pytest.mark.parametrize("config", [None, LRU], ids=["no scores", "scores"])
def test_the_step_of_scores_does_not_go_back(config: dyn.DynamicTableConfig | None) -> None:
    """Optimizer state of an earlier step sets the step of a table without scores only."""
    model = unsharded(case(config=config, optimizer="ADAM"))
    step(model, [1, 2])
    early = model.fused_optimizer.state_dict()
    step(model, [1, 2])
    table = model.local_tables()["t"]
    model.fused_optimizer.load_state_dict(early)
    assert table.step == (1 if config is None else 2)
    model.fused_optimizer.load_state_dict(state_of_a_copy(model, step=torch.tensor(9)))
    assert table.step == 9


@pytest.mark.parametrize("store", [RowStore, Scores])
def test_unsharded_optimizer_state_that_cannot_be_loaded_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, store: type
) -> None:
    """Memory ends after some rows; scores of rows that were loaded without them follow the step."""
    trained, model = (unsharded(case(config=LRU, optimizer="ADAM")) for _ in range(2))
    step(trained, list(range(40)))
    step(trained, [0, 1])
    saved = {
        key: one
        for key, one in trained.state_dict().items()
        if not key.endswith((".last_seen", ".count"))
    }
    step(model, list(range(40)))
    model.load_state_dict(saved)
    table, calls, write = model.local_tables()["t"], [], store.write
    table.erase(torch.arange(10))
    for number in reversed(range(10)):  # in other rows
        table.assign(torch.tensor([number]), torch.ones(1, 8))
    before, stats, generation = table.export_state(), table.stats(), table.generation

    def fail(*given: object) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        write(*given)

    monkeypatch.setattr(knobs, "CHUNK_BYTES", 64)
    monkeypatch.setattr("torchrec_dyn.knobs.IDS_SCORED_TOGETHER", 2)
    monkeypatch.setattr(store, "write", fail)
    with pytest.raises(MemoryError):
        model.fused_optimizer.load_state_dict(trained.fused_optimizer.state_dict())
    assert len(calls) == 2 and same_state(table.export_state(), before)
    assert table.stats() == stats and table.generation == generation
    monkeypatch.setattr(store, "write", write)
    model.fused_optimizer.load_state_dict(trained.fused_optimizer.state_dict())
    assert table.step == 2 and set(table.export_state()["last_seen"].tolist()) == {2}


def optimizer_of_an_earlier_save(path: str) -> int:
    of = case(config=LRU, optimizer="EXACT_SGD")  # without state by row, which is bound to its rows
    trained, model = sharded(of), sharded(of)
    for name in ("one", "two"):
        step(trained, [1, 2])
        save(trained, f"{path}_{name}")
    model.load_state_dict(read({"model": model.state_dict()}, f"{path}_two")["model"])
    states = read({"optimizer": model.fused_optimizer.state_dict()}, f"{path}_one")
    model.fused_optimizer.load_state_dict(states["optimizer"])
    return tables_of(model)[0].step


def test_an_earlier_optimizer_does_not_take_the_step_back_behind_the_scores(tmp_path: Path) -> None:
    assert on_one(optimizer_of_an_earlier_save, tmp_path) == 2


def optimizer_of_other_rows(path: str) -> list[str]:
    one, other, model = (sharded(case()) for _ in range(3))
    step(one, [1, 2, 3])
    step(other, [1, 2, 3, 4])
    two = {"model": one.state_dict(), "optimizer": other.fused_optimizer.state_dict()}
    quietly(dcp.save, two, checkpoint_id=path)
    before = held(model)
    with pytest.raises(CheckpointException, match="expected tensors with the same number of rows"):
        read(state_dict_of(model), path)
    return differences(held(model), before)


def test_rows_and_optimizer_state_of_other_numbers_in_one_checkpoint(tmp_path: Path) -> None:
    assert on_one(optimizer_of_other_rows, tmp_path) == []


# What was read and not yet loaded


def read_too_early(path: str) -> list[str]:
    trained = sharded(case())
    step(trained, [1, 2, 3])
    save(trained, path)
    model, other = sharded(case()), sharded(case())
    state = read(state_dict_of(model), path)
    heard = []
    for use in (
        lambda: copy.deepcopy(state),
        lambda: quietly(dcp.save, state, checkpoint_id=f"{path}_again"),
        lambda: put(other, state),
    ):
        try:
            use()
        except BaseException as error:  # DCP's is no Exception
            heard.append(type(error).__name__)
    put(model, state)
    return [*heard, str(tables_of(model)[0].num_rows)]


def test_what_was_read_cannot_be_copied_saved_or_given_to_another_model(tmp_path: Path) -> None:
    heard = on_one(read_too_early, tmp_path)
    assert heard == ["RuntimeError", "CheckpointException", "ValueError", "3"]


def two_models(path: str, world: int) -> list[str]:
    one, two = sharded(case(world)), sharded(case(world))
    step(one, [1, 2, 3])
    step(two, [4, 5, 6])
    expected = [held(one), held(two)]
    quietly(dcp.save, {"one": state_dict_of(one), "two": state_dict_of(two)}, checkpoint_id=path)
    one, two = sharded(case(world)), sharded(case(world))
    state = read({"one": state_dict_of(one), "two": state_dict_of(two)}, path)
    put(one, state["one"])
    put(two, state["two"])
    return differences(held(one), expected[0]) + differences(held(two), expected[1])


@pytest.mark.parametrize("world", [1, 2])
def test_two_models_of_the_same_names_in_one_checkpoint(tmp_path: Path, world: int) -> None:
    found = workers.run(two_models, str(tmp_path / "saved"), world, world_size=world)
    assert found == [[]] * world


def verified_anew(path: str) -> bool:
    model = sharded(case())
    step(model, [1, 2, 3])
    save(model, path)
    step(model, [1, 2, 3])
    state = read(state_dict_of(model), path)
    put(model, state)
    read({"optimizer": state["optimizer"]}, path)
    states = state["optimizer"]["state"]["collection.embedding_bags.t.weight"]
    staged = states["t.optimizer_config"].entry.staged
    staged._states["momentum1"].rows(0, 1)[0] += 1
    with pytest.raises(ValueError, match="damaged"):
        model.fused_optimizer.load_state_dict(state["optimizer"])
    return True


def test_what_is_read_again_is_verified_again(tmp_path: Path) -> None:
    assert on_one(verified_anew, tmp_path)


def trained_by_another_thread(path: str) -> bool:
    model = sharded(case())
    step(model, [1, 2, 3])
    save(model, path)
    state = read({"optimizer": model.fused_optimizer.state_dict()}, path)
    compare = TableLoad.prepare

    def prepare_and_train(load: TableLoad) -> None:
        compare(load)
        step(model, [4])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableLoad, "prepare", prepare_and_train)
        with pytest.raises(RuntimeError, match="changed since"):
            model.fused_optimizer.load_state_dict(state["optimizer"])
    return bool(tables_of(model)[0].num_rows == 4)


def test_a_step_between_the_check_and_the_commit_of_optimizer_state(tmp_path: Path) -> None:
    assert on_one(trained_by_another_thread, tmp_path)


def loaded_again_after_an_error(path: str) -> list[str]:
    of = case(2, "row_wise", optimizer="EXACT_ROWWISE_ADAGRAD", data_type="FP16")
    trained, model = sharded(of), sharded(of)
    for count in (20, 10):
        step(trained, list(range(count)))
    save(trained, path)
    state, before = read(state_dict_of(model), path), held(model)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(staged_table, "replace", mock.Mock(side_effect=MemoryError))
        with pytest.raises(RuntimeError, match="MemoryError"):
            model.load_state_dict(state["model"])
    assert not differences(held(model), before)
    put(model, state)
    return differences(held(model), held(trained))


def test_a_load_that_could_not_be_prepared_changes_nothing_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    found = workers.run(loaded_again_after_an_error, str(tmp_path / "saved"), world_size=2)
    assert found == [[], []]
