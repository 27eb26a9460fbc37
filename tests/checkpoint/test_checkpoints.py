"""`Checkpoints`: a directory from which training continues as if it had not stopped."""

import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workers
from another_process import start
from checkpoint_cases import Setup, contents, optimizer_of, quietly, train
from checkpoint_cases import new as new_collection
from checkpoint_jobs import flip, names
from forked import forkserver
from torchrec import KeyedJaggedTensor

from torchrec_dyn.__main__ import main
from torchrec_dyn.checkpoint import Checkpoints, Positions, export_delta, mark
from torchrec_dyn.checkpoint_format import open_checkpoint, read_chain

PLANS = {0: ("table_wise",), 1: ("table_wise",), 2: ("row_wise", "column_wise")}


def new(world: int, tables: int = 1) -> tuple[Setup, Any, Any]:
    setup = Setup(world, PLANS[world], optimizer="ADAM", tables=tables, feedback=True)
    model = new_collection(setup)
    return setup, model, optimizer_of(model)


def saved(model: Any, optimizer: Any, folder: Path) -> dict[str, Any]:
    """Everything of a model, as one full save of another directory has it."""
    checkpoints = Checkpoints(folder)
    entry = quietly(checkpoints.save, model, optimizer, step=0)
    checkpoints.close()
    return contents(entry.tables)


def run_without_a_stop(
    world: int, path: str, steps: int, every: int, tables: int = 1, full_every: int = 3
) -> list[str]:
    setup, model, optimizer = new(world, tables)
    checkpoints = Checkpoints(f"{path}/kept", keep=2, full_every=full_every)
    for step in range(steps):
        train(model, setup, [step])
        if step % every == every - 1:
            quietly(checkpoints.save, model, optimizer, step=step, extra={"next": step + 1})
    saved(model, optimizer, Path(path, "end"))
    checkpoints.close()
    return [entry.path.name for entry in checkpoints.entries()]


def continue_run(
    world: int, path: str, steps: int, tables: int, step: int | None = None
) -> tuple[int, list[str]]:
    """Restores, trains to the end, and saves all of it; returns where it began, and the report."""
    setup, model, optimizer = new(world, tables)
    train(model, setup, [70])  # contents that the restore must replace
    checkpoints = Checkpoints(f"{path}/kept", keep=2, full_every=3)
    restored = quietly(checkpoints.restore, model, optimizer, step=step)
    assert restored is not None and restored.extra == {"next": restored.step + 1}
    train(model, setup, range(restored.extra["next"], steps))
    shutil.rmtree(f"{path}/again", ignore_errors=True)
    saved(model, optimizer, Path(path, "again"))
    return restored.step, restored.skipped


def run(function: Any, world: int, *args: Any) -> Any:
    """Runs a function in this process or on several ranks; returns the result of the first."""
    return (
        workers.run(function, world, *args, world_size=world)[0]
        if world
        else function(world, *args)
    )


def ends_equal(path: Path) -> bool:
    ends = [contents(path / name / "full-00000001" / "state") for name in ("end", "again")]
    assert ends[0].keys() == ends[1].keys()
    return all(torch.equal(one, ends[1][name]) for name, one in ends[0].items())


@pytest.mark.parametrize(("world", "tables"), [(0, 5), (2, 2)])
def test_a_stopped_run_ends_as_one_that_was_not(world: int, tables: int, tmp_path: Path) -> None:
    """Full, delta, full, delta: restored from the newest delta, and from the older one."""
    names = run(run_without_a_stop, world, str(tmp_path), 9, 2, tables, 2)
    assert names == ["full-00000001", "delta-00000002", "full-00000003", "delta-00000004"]
    assert run(continue_run, world, str(tmp_path), 9, tables) == (7, [])
    assert ends_equal(tmp_path)
    assert run(continue_run, world, str(tmp_path), 9, tables, 3) == (3, [])
    assert ends_equal(tmp_path)


@pytest.mark.parametrize(("first", "then"), [(2, 0), (0, 2)])
def test_another_number_of_ranks(first: int, then: int, tmp_path: Path) -> None:
    """What all ranks gave alike is there; without feedback between ranks the rows are equal."""
    run(run_without_a_stop, first, str(tmp_path), 4, 2, 5)
    assert run(continue_run, then, str(tmp_path), 4, 5) == (3, [])
    assert ends_equal(tmp_path)


def test_a_run_goes_on_in_the_same_directory(tmp_path: Path) -> None:
    """The next save continues the chain: a delta whose parent is the restored entry."""
    run_without_a_stop(0, str(tmp_path), 4, 2)
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept", full_every=3)
    with pytest.raises(
        ValueError, match="expected to write after save 0, got a directory with save 2"
    ):
        checkpoints.save(model, optimizer, step=9)
    checkpoints.restore(model, optimizer)
    entry = checkpoints.save(model, optimizer, step=9)
    assert entry.kind == "delta" and entry.parent == checkpoints.at(3).id
    assert checkpoints.latest() == entry and checkpoints.save(model, optimizer, step=10).is_full
    checkpoints.close()


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Returns a directory of saves after each step; each kind of chain is trained once."""

    @cache
    def chain(full_every: int, saves: int) -> Path:
        setup, model, optimizer = new(0)
        checkpoints = Checkpoints(tmp_path_factory.mktemp("chain"), keep=2, full_every=full_every)
        for step in range(saves):
            train(model, setup, [step])
            quietly(checkpoints.save, model, optimizer, step=step, extra={"next": step + 1})
        checkpoints.close()
        return checkpoints.path

    return chain


@pytest.fixture
def trained(chains: Callable[[int, int], Path], tmp_path: Path) -> Callable[[int, int], Any]:
    """Returns what puts a copy of a chain into `kept`."""

    def copied(full_every: int, saves: int) -> Checkpoints:
        shutil.copytree(chains(full_every, saves), tmp_path / "kept", dirs_exist_ok=True)
        return Checkpoints(tmp_path / "kept", keep=2, full_every=full_every)

    return copied


def test_full_saves_are_kept_with_their_deltas(trained: Any, tmp_path: Path) -> None:
    entries = trained(2, 7).entries()
    assert [entry.step for entry in entries] == [4, 5, 6]
    assert names(tmp_path / "kept") == [
        "delta-00000006", "full-00000005", "full-00000007"
    ]  # fmt: skip


def test_a_branch_is_kept(trained: Any, tmp_path: Path) -> None:
    """A delta after an old full save, while newer full saves of the other branch are there."""
    trained(2, 5)
    setup, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept", keep=1, full_every=3)
    quietly(checkpoints.restore, model, optimizer, step=2)
    train(model, setup, [5])
    entry = quietly(checkpoints.save, model, optimizer, step=5)
    checkpoints.close()
    assert [one.step for one in checkpoints.line_of(entry)] == [2, 5]
    assert checkpoints.latest() == entry
    with pytest.raises(ValueError, match="expected the full save and deltas before it"):
        shutil.rmtree(checkpoints.at(2).path)
        checkpoints.line_of(entry)


def test_a_damaged_delta_changes_nothing(trained: Any, tmp_path: Path) -> None:
    trained(4, 4)
    _, model, optimizer = new(0)
    newest = Checkpoints(tmp_path / "kept").latest()
    assert newest is not None and not newest.is_full
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (file,) = newest.tables.glob("*.distcp")
    table = next(iter(open_checkpoint(newest.tables).tables.values()))
    flip(file, file.read_bytes().index(table.rows("weight", 0, 1).numpy().tobytes()))
    with pytest.raises(ValueError, match="content sum"):
        quietly(Checkpoints(tmp_path / "kept").restore, model, optimizer)
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_a_directory_without_an_entry(tmp_path: Path) -> None:
    _, model, optimizer = new(0)
    assert Checkpoints(tmp_path / "kept").restore(model, optimizer) is None
    with pytest.raises(ValueError, match=r"expected a step among \[\], got 7"):
        Checkpoints(tmp_path / "kept").at(7)


def hold(path: str, begun: Any) -> None:
    """Holds the lock of a directory, as a writer does, until it is killed."""
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(path)
    quietly(checkpoints.save, model, optimizer, step=0)
    begun.set()
    multiprocessing.Event().wait()


def test_one_job_writes_and_a_kill_frees_the_directory(tmp_path: Path) -> None:
    begun = forkserver().Event()
    writer = start(hold, str(tmp_path / "kept"), begun)
    assert begun.wait(120)
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept")
    checkpoints.restore(model, optimizer)
    with pytest.raises(RuntimeError, match="expected one job that writes"):
        checkpoints.save(model, optimizer, step=1)
    writer.kill()
    writer.join()
    assert checkpoints.save(model, optimizer, step=1).sequence == 2
    checkpoints.close()


def test_a_close_ends_the_recording_of_changes(tmp_path: Path) -> None:
    """So the next save, which opens the directory again, has no changes to write alone."""
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept", full_every=9)
    quietly(checkpoints.save, model, optimizer, step=0)
    assert not quietly(checkpoints.save, model, optimizer, step=1).is_full
    checkpoints.close()
    assert quietly(checkpoints.save, model, optimizer, step=2).is_full
    checkpoints.close()


def test_a_converted_table_is_saved_in_full(tmp_path: Path) -> None:
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept", full_every=9)
    checkpoints.save(model, optimizer, step=0)
    model.half()
    assert checkpoints.save(model, optimizer, step=1).is_full
    checkpoints.close()


def save_own_positions(path: str) -> str:
    _, model, optimizer = new(2)
    rank = torch.distributed.get_rank()
    checkpoints = Checkpoints(path)
    own = {"own": rank, "other": rank + 1, "all": [7]}
    entry = quietly(checkpoints.save, model, optimizer, step=0, extra=own)
    checkpoints.close()
    assert dict(entry.extra) == {"own": False, "other": False, "all": True}
    restored = quietly(Checkpoints(path).restore, model, optimizer)
    assert restored is not None
    return str(restored.extra)


def test_values_of_ranks_are_for_as_many_ranks(tmp_path: Path) -> None:
    told = workers.run(save_own_positions, str(tmp_path / "kept"), world_size=2)
    assert told == [f"{{'own': {rank}, 'other': {rank + 1}, 'all': [7]}}" for rank in (0, 1)]
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept")
    told = r"each of which has its own other, own, got 1.*leave_out=\['other', 'own'\]"
    with pytest.raises(ValueError, match=told):
        quietly(checkpoints.restore, model, optimizer)
    with pytest.raises(ValueError, match="its own other, got 1"):
        quietly(checkpoints.restore, model, optimizer, leave_out=["own"])
    for wrong in ("own", ["all"]):
        with pytest.raises(ValueError, match="expected names that are not in extra"):
            checkpoints.restore(model, optimizer, extra={"all": Positions([])}, leave_out=wrong)
    restored = quietly(checkpoints.restore, model, optimizer, leave_out=["own", "other"])
    assert restored.extra == {"all": [7]}


class OfRank:
    """A scheduler of the user's own, with the state of a source in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [{"batches": 3, "source": None, "is_global": False}]}


def test_positions_in_sources_of_ranks_are_for_as_many_ranks(tmp_path: Path) -> None:
    """Though all ranks gave equal values: each has trained as many batches, of a source of its own."""
    _, model, optimizer = new(0)
    loader = torch.utils.data.DataLoader([1, 2])
    loader.state_dict = dict  # type: ignore[attr-defined]
    shared = Positions([1], is_global=True)
    for number, (value, fits) in enumerate(
        [(Positions([1]), False), (shared, True), (OfRank(), False), (loader, False)]
    ):
        checkpoints = Checkpoints(tmp_path / str(number))
        entry = quietly(checkpoints.save, model, optimizer, step=0, extra={"position": value})
        checkpoints.close()
        assert dict(entry.extra) == {"position": fits}
        told = workers.run(restored_on_two, str(checkpoints.path), world_size=2)
        assert told == ["restored" if fits else told[0]] * 2
        assert fits or "save positions in a source whose batches all ranks share" in told[0]


def restored_on_two(path: str) -> str:
    _, model, optimizer = new(2)
    try:
        quietly(Checkpoints(path).restore, model, optimizer)
    except ValueError as error:
        return str(error)
    return "restored"


def test_values_and_numbers_that_cannot_be(tmp_path: Path) -> None:
    _, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"got KeyedJaggedTensor that weights_only=True refuses"):
        empty = KeyedJaggedTensor(["f"], torch.tensor([1]), torch.tensor([1]))
        checkpoints.save(model, optimizer, step=0, extra={"batch": empty})
    assert not os.path.exists(tmp_path / "kept" / "full-00000001")
    checkpoints.save(model, optimizer, step=0, extra={"a": 1})
    with pytest.raises(ValueError, match=r"expected names among \['a'\] in extra, got \['b'\]"):
        checkpoints.restore(model, optimizer, extra={"b": Positions([])})
    checkpoints.close()
    for name in ("keep", "full_every"):
        with pytest.raises(ValueError, match=f"expected {name} of at least 1, got 0"):
            Checkpoints(tmp_path, **{name: 0})


def test_a_step_of_numpy_or_of_a_tensor(tmp_path: Path) -> None:
    setup, model, optimizer = new(0)
    train(model, setup, [0])
    checkpoints = Checkpoints(tmp_path / "kept", keep=9)
    given: list[Any] = [np.int64(5), torch.tensor(6), 7, 7.5]
    for step in given:
        checkpoints.save(model, optimizer, step=step)
    assert [repr(entry.step) for entry in checkpoints.entries()] == ["5", "6", "7", "7.5"]
    ids = model.collection.table("plain").ids()
    wrong: list[Any] = ["8", None, float("nan"), torch.tensor([1, 2])]
    for step in wrong:
        for call in (checkpoints.save, partial(checkpoints.forget, ids={"plain": ids})):
            with pytest.raises(ValueError, match="expected a finite number as step, got"):
                call(model, optimizer, step=step)
    assert model.collection.table("plain").num_rows == len(ids) > 0
    assert len(list((tmp_path / "kept").glob("*-*"))) == 4
    checkpoints.close()


def test_a_plain_value_is_not_loaded_into(tmp_path: Path) -> None:
    """It is an error before anything is loaded: the next save goes on."""
    setup, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept")
    checkpoints.save(model, optimizer, step=0, extra={"epoch": 3})
    train(model, setup, [0])
    before = model.state_dict()
    with pytest.raises(
        ValueError, match=r"with load_state_dict in extra, got int as 'epoch'\. Leave"
    ):
        checkpoints.restore(model, optimizer, extra={"epoch": 0})
    assert all(one.equal(before[name]) for name, one in model.state_dict().items())
    checkpoints.save(model, optimizer, step=1)
    checkpoints.close()


def test_a_url_is_given_as_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"s3:/bucket/job: expected a URL with ://.* Give a str"):
        Checkpoints(Path("s3://bucket/job"))
    with pytest.raises(ValueError, match=r"nowhere://job: expected a URL that fsspec can open"):
        Checkpoints("nowhere://job")
    assert Checkpoints(f"file://{tmp_path}/job").path == tmp_path / "job"
    assert not [*tmp_path.iterdir()]


def test_a_delta_has_no_rows_that_did_not_change(trained: Any, tmp_path: Path) -> None:
    """The dense part of a delta reads no rows: it has no tensor of a table."""
    trained(2, 2)
    (delta,) = (entry for entry in read_chain(tmp_path / "kept").entries if not entry.is_full)
    assert not any("embedding_bags" in name for name in contents(delta.dense))


def test_deltas_of_its_own_can_be_exported_beside_it(tmp_path: Path) -> None:
    setup, model, optimizer = new(0)
    checkpoints = Checkpoints(tmp_path / "kept", full_every=9)
    marker = mark(model)
    checkpoints.save(model, optimizer, step=0)
    train(model, setup, [0])
    export_delta(model, tmp_path / "delta", since=marker)
    assert checkpoints.save(model, optimizer, step=1).kind == "delta"
    checkpoints.close()


def test_learning_rates_are_restored(tmp_path: Path) -> None:
    """TorchRec's optimizers leave them out of their state dicts."""
    _, model, optimizer = new(0)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    checkpoints = Checkpoints(tmp_path / "kept")
    checkpoints.save(model, optimizer, step=0)
    checkpoints.close()
    _, model, optimizer = new(0)
    checkpoints.restore(model, optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_runs_are_compared_on_the_way_to_their_newest_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run went back and took the way of the other; its first try was another at step 2."""
    for run_name, tries in (("one", [[0, 1, 3], [2]]), ("other", [[0, 1, 2]])):
        for number, batches in enumerate(tries):
            setup, model, optimizer = new(0)
            checkpoints = Checkpoints(tmp_path / run_name, keep=9, full_every=9)
            first = 0 if number == 0 else 2
            if first:
                assert quietly(checkpoints.restore, model, optimizer, step=1)
            for step, batch in enumerate(batches, first):
                train(model, setup, [batch])
                quietly(checkpoints.save, model, optimizer, step=step)
            if run_name == "one" and number == 0:
                shutil.copytree(tmp_path / "one", tmp_path / "left")
            checkpoints.close()
    paths = [str(tmp_path / name) for name in ("one", "other", "left")]
    assert len(Checkpoints(paths[0]).entries()) == 4  # of both ways
    assert main(["diff", *paths[:2]]) == 0 and "3 steps in both" in capsys.readouterr().out
    assert main(["diff", *paths[1:]]) == 1
    told = capsys.readouterr().out
    assert re.search(r"step 2: the first with other contents, in \w+ \(.*weight", told)
    assert "rows differ" in told  # of the deltas, which begin at the same step
