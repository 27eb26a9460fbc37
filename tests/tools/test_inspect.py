"""`python -m torchrec_dyn inspect`: what it tells, when it refuses, how it ends."""

import os
import re
import runpy
import shutil
import sys

import pytest
import torch
from another_process import start
from checkpoint_jobs import flip
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from saved_cases import (
    MODEL_KEY,
    model_state,
    optimizer_state,
    pieces,
    save_dict,
    save_table,
)
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_dyn import DynamicEmbeddingBagCollection, DynamicTableConfig, LeastRecentlyUsed
from torchrec_dyn import __main__ as command_line
from torchrec_dyn.__main__ import main
from torchrec_dyn.checkpoint import export_delta, mark
from torchrec_dyn.tools.inspection import (
    Histogram,
    histogram_of_norms,
    histogram_of_steps,
    readable,
)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved"
    save_table(path, model_state(2000, life=True), optimizer_state(2000, (0, 3, 6)))
    return path


def told(capsys, *arguments):
    """Status, output and errors of the command."""
    status = command_line.main(["inspect", *map(str, arguments)])
    return (status, *capsys.readouterr())


def field(text, title):
    return re.search(rf"^ +{title} +(.*)$", text, re.M)[1]


def counted(text, title):
    """The numbers beside the bars of a histogram."""
    section = re.search(rf"^  {title} .*\n((?:    .*\n)+)", text + "\n", re.M)[1]
    return [
        int(re.split("  +", line.strip(" #"))[1].replace(",", "")) for line in section.splitlines()
    ]


def test_as_a_program(saved, tmp_path):
    arguments = ("inspect", str(saved), "--verify")
    process = start(be_the_program, tmp_path / "errors", tmp_path / "output", *arguments)
    process.join(60)
    assert process.exitcode == 0 and not (tmp_path / "errors").read_text()
    text = (tmp_path / "output").read_text()
    assert f"model.{MODEL_KEY}\n" in text and "everything read and checked" in text
    assert "####" in text


def be_the_program(errors, output, *arguments):
    """Does what `python -m torchrec_dyn` does, on a terminal for ASCII; `output` None: without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT) if output else writer, 1)
    os.close(writer)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    # Flushed at the end, as a program's is.
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)  # noqa: SIM115
    sys.argv = ["torchrec_dyn", *arguments]
    del sys.modules["torchrec_dyn.__main__"]
    try:
        runpy.run_module("torchrec_dyn", run_name="__main__")
    finally:
        sys.stdout.flush()


def run_for_nobody(folder, *arguments):
    """Status and errors of the command as a program whose output nobody reads."""
    process = start(be_the_program, folder / "errors", None, *map(str, arguments))
    process.join(60)
    return process.exitcode, (folder / "errors").read_text()


def test_a_torn_checkpoint(saved, tmp_path, capsys):
    (saved / ".metadata").unlink()
    status, text, errors = told(capsys, saved)
    assert (status, text) == (1, "")
    assert re.fullmatch(
        r"[^\n]*torn: its save never finished\. Use an earlier checkpoint\.\n", errors
    )
    assert run_for_nobody(tmp_path, "inspect", saved) == (status, errors)


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["look", "x"], ["inspect", "x", "--what"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    assert ended.value.code == 2 and "usage: python -m torchrec_dyn" in capsys.readouterr().err


def test_what_is_told_of_a_table(saved, capsys):
    status, text, errors = told(capsys, saved)
    assert (status, errors) == (0, "")
    state = model_state(2000, life=True)
    size = sum(one.numel() * one.itemsize for one in state.values())
    size += 2000 * 2 * 4 + 8 + 80 + 11 * 8  # momentum1, step, config, checksums
    rows = field(text, "rows")
    assert rows.startswith("2,000 x 6 float32, ") and readable(size)[:3] in rows
    assert field(text, "initial rows") == "Uniform(high=0.5, low=-0.5), seed 7"
    assert field(text, "optimizer").startswith("exact_row_wise_adagrad, step 123, one")
    assert field(text, "waiting ids") == "4"
    for title in ("norm", "age", "count"):
        assert sum(counted(text, title)) == 2000, title
    ages = 123 - state["last_seen"]
    assert f"64 to 127  {int(((ages > 63) & (ages < 128)).sum()):,}" in re.sub(
        " +", " ", text
    ).replace("127 ", "127  ")


def test_without_optimizer_and_scores(tmp_path, capsys):
    save_table(tmp_path / "plain")
    _, text, _ = told(capsys, tmp_path / "plain")
    assert "norm" in text and not re.search("optimizer +exact|age of|count of|waiting", text)
    save_table(tmp_path / "scored", model_state(life=True))
    _, text, _ = told(capsys, tmp_path / "scored")
    newest = int(model_state(life=True)["last_seen"].max())
    assert newest < 123 and "age of rows" in text and re.search("^ +0 ", text, re.M)


def test_no_table_and_an_empty_one(tmp_path, capsys):
    save_dict({"dense": torch.ones(3)}, tmp_path / "static")
    status, text, _ = told(capsys, tmp_path / "static", "--verify")
    assert status == 0 and "0 dynamic tables, 0 rows, 0 bytes" in text
    save_table(tmp_path / "empty", model_state(0), optimizer_state(0))
    status, text, _ = told(capsys, tmp_path / "empty", "--verify")
    assert status == 0 and field(text, "rows").startswith("0 x 6 float32")


def test_the_fingerprints_are_of_contents_alone(tmp_path, capsys):
    def lines(path):
        return re.findall(r"[0-9a-f]{16}", told(capsys, path)[1])

    save_table(tmp_path / "one", optimizer=optimizer_state())
    cut = {"ids": ([10],), "weight": ([20, 30], [2])}
    save_table(
        tmp_path / "two",
        optimizer=optimizer_state(),
        cut=lambda name, one: pieces(one, *cut[name]) if name in cut else one,
        key="elsewhere.ebc.embedding_bags.user",
    )
    save_table(tmp_path / "three", optimizer=optimizer_state() | {"step": torch.tensor(124)})
    save_table(tmp_path / "four", model_state(seed=1), optimizer_state())
    one, two, three, four = (lines(tmp_path / name) for name in ("one", "two", "three", "four"))
    assert len(one) == 4 and one == two
    assert [a == b for a, b in zip(one, three, strict=True)] == [True, False, True, False]
    assert [a == b for a, b in zip(one, four, strict=True)] == [False] * 4  # state of other ids


def test_damage_is_one_line(saved, capsys):
    file = saved / "__0_0.distcp"
    good = file.read_bytes()
    state = model_state(2000, life=True)
    for name, part in (("weight", state["weight"][1000:1010]), ("waiting", state["waiting"])):
        file.write_bytes(good)
        flip(file, good.index(part.numpy().tobytes()))
        assert told(capsys, saved)[0] == (name == "weight")  # counters are read on demand
        status, text, errors = told(capsys, saved, "--verify")
        assert status == 1 and "no damage" not in text
        assert errors.count("\n") == 1 and f"of {name}" in errors and MODEL_KEY in errors
    file.write_bytes(good[:-1])
    status, _, errors = told(capsys, saved)
    assert status == 1 and errors.count("\n") == 1 and "truncated" in errors
    shutil.rmtree(saved)
    assert told(capsys, saved)[0] == 1


def test_rows_that_are_not_finite_are_counted(tmp_path, capsys):
    state = model_state(10)
    state["weight"][2, 3], state["weight"][4, 0], state["weight"][5] = torch.nan, torch.inf, 3e38
    state["weight"][6] = 0
    save_table(tmp_path, state)
    _, text, _ = told(capsys, tmp_path)
    assert field(text, "not finite") == "2 rows have a NaN or an infinite number"
    assert sum(counted(text, "norm")) == 8 and re.search(r"^ +0 to ", text, re.M)


def test_the_reader_of_the_output_may_leave(saved, tmp_path):
    assert run_for_nobody(tmp_path, "inspect", saved) == (0, "")


def test_histograms_join_bins():
    one = histogram_of_steps("t")
    one.add(torch.tensor([0, 1, 2, 3, 4, 7, 8, 2**40]))
    one.add(torch.tensor([5]))
    assert sum(count for _, count in one.bars()) == 9 and len(one.bars()) <= 10
    few = histogram_of_steps("t")
    few.add(torch.tensor([0, 1, 2, 3, 4, 7]))
    assert few.bars() == [
        *(("0", 1), ("1", 1)),
        *(("2 to 3", 2), ("4 to 7", 2)),
    ]
    assert Histogram("t", torch.tensor([1])).lines() == []
    norms = histogram_of_norms()
    norms.add(torch.tensor([0.0, 1e-30, 1.0, 1e30], dtype=torch.float64))
    assert sum(count for _, count in norms.bars()) == 4 and len(norms.bars()) <= 10


def test_bytes_are_readable():
    told = [readable(size) for size in (0, 999, 1000, 5.25e9, 3e15)]
    assert told == ["0 bytes", "999 bytes", "1.0 kB", "5.2 GB", "3,000.0 TB"]


# A real delta leads from one checkpoint to the next


def train(collection, steps):
    draw = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        ids = torch.randint(500, (20,), generator=draw)
        collection(
            KeyedJaggedTensor(["f"], ids, lengths=torch.full((10,), 2))
        ).values().sum().backward()


def test_a_delta_begins_and_ends_at_full_checkpoints(tmp_path, capsys):
    config = EmbeddingBagConfig(60, 8, "user", feature_names=["f"])
    collection = DynamicEmbeddingBagCollection(
        [config],
        dynamic=DynamicTableConfig(eviction=LeastRecentlyUsed()),
        fused_params={"optimizer": EmbOptimType.ADAM},
    )

    def save(name):
        state = {
            "model": collection.state_dict(),
            "optimizer": collection.fused_optimizer.state_dict(),
        }
        save_dict(state, tmp_path / name)

    def fingerprints(name):
        assert main(["inspect", str(tmp_path / name), "--verify"]) == 0
        text = capsys.readouterr().out
        assert name != "delta" or int(re.search(r"removed +(\d+) rows", text)[1]) > 0
        return re.findall(r"(?:fingerprint|optimizer state) +(\w{16}.*)", text)

    train(collection, 3)
    marker = mark(collection)
    save("before")
    train(collection, 4)
    export_delta(collection, tmp_path / "delta", since=marker)
    save("after")
    before, after = fingerprints("before"), fingerprints("after")
    assert len(before) == 4 and not set(before) & set(after)
    expected = [f"{base} -> {result}" for base, result in zip(before, after, strict=True)]
    assert fingerprints("delta") == expected


def test_a_plot_and_all_checks(saved, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, text, errors = told(capsys, saved, "--verify", "--plot", tmp_path / "out.png")
    assert (status, errors) == (0, "") and "everything read and checked" in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_made_is_a_wrong_usage(saved, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    for picture, why in (("out.what", "one of .*png"), ("no/where.png", "a directory that exists")):
        with pytest.raises(SystemExit) as ended:
            told(capsys, saved, "--plot", tmp_path / picture)
        assert ended.value.code == 2 and re.search(
            f"--plot: expected .*{why}", capsys.readouterr().err
        )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as ended:
        told(capsys, saved, "--plot", tmp_path / "out.png")
    assert ended.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err
