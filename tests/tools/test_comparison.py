"""`python -m torchrec_dyn diff`: every difference between two checkpoints is told, whatever their plans."""

import re
import shutil

import pytest
import torch
from checkpoint_cases import Setup, new, run_on, save, train
from checkpoint_jobs import Job
from saved_cases import model_state, optimizer_state, save_table

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import knobs

ROWS = 3000


def told(capsys, *paths):
    """Status, output and errors of the command."""
    status = command_line.main(["diff", *map(str, paths)])
    return (status, *capsys.readouterr())


def line_of(text, title):
    return re.search(rf"^ +{title}  +(.*)$", text, re.M)[1]


@pytest.fixture
def states():
    return model_state(ROWS, life=True), optimizer_state(ROWS)


@pytest.fixture
def first(tmp_path, states):
    save_table(tmp_path / "first", *states)
    return tmp_path / "first"


def second(tmp_path, model, optimizer):
    """Saves a changed copy."""
    shutil.rmtree(tmp_path / "second", ignore_errors=True)
    save_table(tmp_path / "second", model, optimizer)
    return tmp_path / "second"


def without(state, is_kept):
    """The state with some of its rows."""
    return {
        name: saved[is_kept] if saved.shape[:1] == is_kept.shape else saved
        for name, saved in state.items()
    }


def test_row_wise_state_of_other_column_cuts(tmp_path, capsys):
    """One number for each row and column shard: their number differs, or one is alone."""
    model, cuts = model_state(ROWS), [(0, 6), (0, 2, 6), (0, 2, 4, 6)]
    for some in cuts:
        save_table(tmp_path / str(len(some)), model, optimizer_state(ROWS, some))
    for one, other in ((2, 3), (3, 4)):
        status, text, _ = told(capsys, tmp_path / str(one), tmp_path / str(other))
        rows = f"{ROWS:,}"
        assert status == 1
        assert line_of(text, "momentum1") == f"{rows} of {rows} rows differ, in their columns"


def test_equal_contents_under_other_plans_are_equal(tmp_path, capsys):
    paths = [tmp_path / "one", tmp_path / "other"]
    for path, setup in zip(
        paths, (Setup(2, ("row_wise",)), Setup(1, ("table_wise",))), strict=True
    ):
        run_on(setup, save_trained, str(path))
    status, text, _ = told(capsys, *paths)
    assert status == 0 and "all tables are equal" in text and "differ," not in text


def save_trained(setup, path):
    model = new(setup)
    train(model, setup, [0, 1])
    save(model, path)


@pytest.mark.parametrize("name", ["weight", "last_seen", "count", "momentum1"])
def test_one_number_of_one_row(tmp_path, capsys, first, states, name):
    changed = [{key: saved.clone() for key, saved in state.items()} for state in states]
    (numbers,) = (state[name] for state in changed if name in state)
    numbers.view(ROWS, -1)[1234, 0] += 2
    status, text, _ = told(capsys, first, second(tmp_path, *changed))
    assert status == 1
    assert line_of(text, name).startswith("1 of 3,000 rows differ, by at most 2")
    assert line_of(text, "for example") == str(states[0]["ids"][1234].item())
    assert len(re.findall("rows differ", text)) == 1 and "only in" not in text


def test_ids_that_one_side_lacks(tmp_path, capsys, monkeypatch, first, states):
    """In ranges of a few rows."""
    monkeypatch.setattr(knobs, "CHUNK_BYTES", 19_999)
    draw = torch.Generator().manual_seed(1)
    kept = [torch.rand(ROWS, generator=draw) < share for share in (0.9, 0.5)]
    paths = []
    for number, is_kept in enumerate(kept):
        paths.append(tmp_path / str(number))
        save_table(paths[-1], *(without(state, is_kept) for state in states))
    status, text, _ = told(capsys, *paths)
    assert status == 1 and "rows differ" not in text
    alone = [int((kept[0] & ~kept[1]).sum()), int((kept[1] & ~kept[0]).sum())]
    for side, count in zip(("first", "second"), alone, strict=True):
        assert line_of(text, f"only in the {side}") == f"{count:,} ids"
    ids = states[0]["ids"][kept[0] ^ kept[1]]
    ranges = text.partition("by range\n")[2].partition("\n\n")[0]
    counted = [line.strip(" #").split("  ")[-1].replace(",", "") for line in ranges.splitlines()]
    assert sum(map(int, counted)) == len(ids) and counted[0] == str(int((ids < 0).sum()))
    assert set(line_of(text, "for example").split(", ")) <= {*map(str, ids.tolist())}


def test_tables_of_one_side_and_small_tensors(tmp_path, capsys, first, states):
    model, optimizer = states
    other = second(tmp_path, model, optimizer | {"step": optimizer["step"] + 1})
    status, text, _ = told(capsys, first, other)
    step = int(optimizer["step"])
    assert status == 1 and line_of(text, "step") == f"{step} | {step + 1}"
    status, text, _ = told(capsys, first, second(tmp_path, model, {}))
    assert status == 1 and "momentum1" in text


def test_what_cannot_be_compared(tmp_path, capsys, first):
    status, _, error = told(capsys, first, tmp_path / "nothing")
    assert status == 2 and "no directory" in error
    file = first / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9000])
    status, _, error = told(capsys, first, first)
    assert status == 2 and "truncated" in error


def test_a_lack_of_memory_without_a_text(tmp_path, capsys, monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(command_line, "print_difference", no_memory)
    status, _, error = told(capsys, tmp_path, tmp_path)
    assert status == 2 and "got MemoryError: out of memory. Give the process more memory" in error


def test_steps_before_an_entry_that_cannot_be_read_are_not_called_equal(tmp_path, capsys):
    """The runs differ from step 1 on; entries after the damaged one lead to it only. One keeps two."""
    for name in ("one", "other", "pruned"):
        job = Job(tmp_path / name, keep=2 if name == "pruned" else 9)
        if name == "other":
            train(job.model, job.setup, [7])
        for _ in range(4):
            job.save()
        job.checkpoints.close()
    paths = tmp_path / "one", tmp_path / "other"
    status, text, _ = told(capsys, paths[1], tmp_path / "pruned")
    assert status == 1 and "step 3: the first in both has other contents, in" in text
    status, text, _ = told(capsys, *paths)
    assert status == 1 and "step 1: the first in both has other contents, in" in text
    (paths[1] / "commits" / "00000003").write_text("{")
    status, text, _ = told(capsys, *paths)
    assert status == 1 and "1 steps in both" in text
    assert "step 4: the first in both has other contents, in" in text
    for number in (1, 2, 4):
        (paths[1] / "commits" / f"0000000{number}").write_text("{")
    status, _, error = told(capsys, *paths)
    assert status == 2 and f"an entry that can be read, got {paths[1]} without one: full-" in error
    assert error.endswith("Try again, or give another directory.\n")
