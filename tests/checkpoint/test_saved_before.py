"""Files saved by commit 24c9c85 are read, to the bit, through public names only.

The files and what they hold: tests/support/saved_by_24c9c85/write.py. This test must stay as it is while the
package changes: where it is red, files that users have saved can be read no more.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from saved_by_24c9c85.models import (
    FUSED,
    Alone,
    Shared,
    answers,
    life,
    load,
    read_plain,
    save,
    served_answers,
    shard,
    state_of,
)
from saved_by_24c9c85.write import SERVED_AS, as_text, fingerprints
from torch import Tensor
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

import torchrec_dyn as dyn
from torchrec_dyn import checkpoint, serving

SAVED = Path(__file__).parents[1] / "support/saved_by_24c9c85"
BOTH, ALONE, DELTA = SAVED / "saved_by_2_ranks", SAVED / "saved_by_1_process", SAVED / "delta"
EXPECTED: dict[str, Any] = json.loads((SAVED / "expected.json").read_text())
OTHER_PLANS = {
    "wide": column_wise(ranks=[1, 0], **FUSED),  # row-wise state stays on equal cuts
    "spread": table_wise(rank=0, **FUSED),
    "whole": row_wise(**FUSED),
    "news": column_wise(ranks=[0, 1], **FUSED),
}
# Products and sums of more than two numbers: their last bit is the machine's.
NEARLY = {"rtol": 1e-6, "atol": 1e-6}
# Initial rows are computed, and those of "spread" are rounded to float16.
INITIAL = {"rtol": 2e-3, "atol": 1e-6}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def tensor(text: str) -> Tensor:
    """Reads what `as_text` wrote."""
    dtype, sizes, numbers = text.split(" ")
    shape = [int(size) for size in sizes.split(",") if size]
    flat = torch.tensor(list(bytes.fromhex(numbers)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def with_numbers(found: dict[str, str]) -> dict[str, str]:
    """Without the tensors of an empty table, which DCP drops where a table is sharded."""
    return {key: text for key, text in found.items() if tensor(text).numel()}


def plain(path: Path) -> dict[str, str]:
    """The whole contents of a checkpoint; its index is a pickle and may name no class of ours."""
    assert b"torchrec_dyn." not in (path / ".metadata").read_bytes()
    return as_text(read_plain(path))


def index(path: Path) -> dict[str, list[Any]]:
    """The chunks of "cells", by which a rank finds its rows."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: sorted((list(chunk.offsets), list(chunk.sizes)) for chunk in one.chunks)
        for key, one in saved.items()
        if key.endswith(".cells")
    }


def check_index(path: Path, before: Path) -> None:
    """The first number of each index is the number of rows; before there was one number for each cell."""
    now, cells = index(path), index(before)
    assert now.keys() == cells.keys()
    for key, ((_, first), *others) in now.items():
        assert first[0] - 1 == sum(size[0] - 1 for _, size in cells[key]) and len(others) == 4


def flat_state(model: Any) -> dict[str, str]:
    """The state dict of a model that is not sharded, under the keys of a checkpoint."""
    state = state_of(model)
    found = {f"model.{key}": one for key, one in state["model"].items()}
    for path, of_table in state["optimizer"]["state"].items():
        found |= {f"optimizer.state.{path}.{name}": one for name, one in of_table.items()}
    return as_text({key: one for key, one in found.items() if not key.endswith(".cells")})


def check_without_shards(found: dict[str, str], name: str) -> None:
    """Beside what was saved: "wide" has one number a row, the mean of those of its two column shards."""
    expected, wide = dict(EXPECTED[name]), "optimizer.state.bags.embedding_bags.wide.weight.wide"
    halves = tensor(expected[f"{wide}.momentum1"])
    assert halves.shape[1] == 2 and not halves[:, 0].equal(halves[:, 1])
    rule = b'{"cuts": [0, 8], "format": 1, "optimizer": "exact_rowwise_adagrad"}'
    expected |= as_text(
        {
            f"{wide}.momentum1": halves.mean(1, keepdim=True),
            f"{wide}.config": torch.tensor(list(rule), dtype=torch.uint8),
        }
    )
    assert found.keys() == expected.keys()
    del expected[f"{wide}.checksum"]
    assert {key: found[key] for key in expected} == expected


def check_near(found: dict[str, Tensor], expected: dict[str, str], **near: float) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, tensor(expected[name]), **near)


@pytest.mark.parametrize("path", [BOTH, ALONE, DELTA], ids=lambda one: one.name)
def test_the_reader_reads_all_of_it(path, capsys, monkeypatch):
    expected = EXPECTED[path.name]
    assert plain(path) == expected  # by DCP alone
    opened, read = checkpoint.open_checkpoint(path), {}
    assert not opened.ownerless and opened.is_delta == (path == DELTA)
    assert sorted(opened.tables) == sorted(EXPECTED[f"fingerprints of {path.name}"])
    for key, table in opened.tables.items():
        table.verify()
        optimizer = f"optimizer.state.{key.removeprefix('model.')}.weight.{table.name}"
        for name in table.names:
            own = name in ("momentum1", "momentum2", "step") or name.startswith("optimizer.")
            place = f"{optimizer}.{name.removeprefix('optimizer.')}" if own else f"{key}.{name}"
            read[place] = table.read(name)
        assert table.config == json.loads(bytes(read[f"{key}.config"].tolist()))
        assert table.num_rows == len(read.get(f"{key}.ids", ()))
        for name in ("ids", "weight"):
            pieces = [one[name] for one in table.chunks((name,), chunk_bytes=50)]
            if pieces:
                assert torch.cat(pieces).equal(read[f"{key}.{name}"])
    dense = {key for key in expected if "projections" in key or "position_weights" in key}
    assert len(dense) == (2 if path == ALONE else 0)
    assert as_text(read) == {key: one for key, one in expected.items() if key not in dense}
    assert fingerprints(path) == EXPECTED[f"fingerprints of {path.name}"]

    monkeypatch.setattr(sys, "argv", ["torchrec_dyn", "inspect", "--verify", str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchrec_dyn", run_name="__main__", alter_sys=True)
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "no damage" in told
    for both in EXPECTED[f"fingerprints of {path.name}"].values():
        assert all(one in told for one in both)


def test_one_process_goes_on_with_what_two_ranks_saved(tmp_path):
    model = load(Shared(is_told=False), BOTH)
    check_without_shards(flat_state(model), BOTH.name)
    assert as_text(answers(model)) == EXPECTED["answers"]
    assert as_text(life(model)) == EXPECTED["life"]
    save(model, tmp_path / "again")
    check_without_shards(plain(tmp_path / "again"), BOTH.name)

    checkpoint.apply_delta(model, DELTA)
    check_without_shards(flat_state(model), "later")
    assert as_text(answers(model)) == EXPECTED["answers later"]
    assert as_text(life(model)) == EXPECTED["life later"]


def in_two_ranks(folder: Path) -> dict[str, dict[str, str]]:
    """Loads under another plan, saves again, applies the delta, saves that, and exports it again."""
    model = load(shard(Shared(is_told=False), OTHER_PLANS), BOTH)
    save(model, folder / "again")
    found = {"answers": as_text(answers(model)), "life": as_text(life(model))}
    checkpoint.export_rows(model.module.bags, "spread", folder / "spread.safetensors")
    marker = checkpoint.mark(model)
    checkpoint.apply_delta(model, DELTA)
    checkpoint.export_delta(model, folder / "delta", since=marker)
    save(model, folder / "later")
    found |= {"answers later": as_text(answers(model)), "life later": as_text(life(model))}
    other = shard(Shared(), OTHER_PLANS)
    checkpoint.import_rows(other.module.bags, "spread", SAVED / "spread.safetensors")
    ids = dyn.read_ids(other.module.bags, "spread")
    found["spread"] = as_text(
        {"ids": ids, "weight": dyn.lookup_rows(other.module.bags, "spread", ids)[0]}
    )
    return found


def test_two_ranks_go_on_under_another_plan(tmp_path):
    found = workers.run(in_two_ranks, tmp_path, world_size=2)
    for of_rank in found:
        for name in ("answers", "life", "answers later", "life later"):
            assert of_rank[name] == EXPECTED[name], name
        key = "model.bags.embedding_bags.spread"
        assert of_rank["spread"]["ids"] == EXPECTED[BOTH.name][f"{key}.ids"]
        assert of_rank["spread"]["weight"] == EXPECTED[BOTH.name][f"{key}.weight"]
    assert plain(tmp_path / "again") == EXPECTED[BOTH.name]
    check_index(tmp_path / "again", BOTH)
    check_index(tmp_path / "delta", DELTA)
    assert fingerprints(tmp_path / "again") == EXPECTED[f"fingerprints of {BOTH.name}"]
    assert plain(tmp_path / "later") == EXPECTED["later"]
    assert plain(tmp_path / "delta") == EXPECTED[DELTA.name]
    assert fingerprints(tmp_path / "delta") == EXPECTED[f"fingerprints of {DELTA.name}"]
    own = (SAVED / "spread.safetensors").read_bytes()
    assert (tmp_path / "spread.safetensors").read_bytes() == own


def alone_in_two_ranks(folder: Path) -> dict[str, Tensor]:
    model = load(shard(Alone(), {}), ALONE)
    save(model, folder)
    return answers(model)


def check_answers_alone(found: dict[str, Tensor]) -> None:
    expected = EXPECTED["answers alone"]
    exact = found.keys() - {"narrow", "pair"}
    assert as_text({name: found[name] for name in exact}) == {one: expected[one] for one in exact}
    check_near(found, expected, **NEARLY)


def test_what_one_process_saved_is_loaded_by_one_and_by_two(tmp_path):
    model = Alone()
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data.zero_()
    load(model, ALONE)
    assert flat_state(model) == EXPECTED[ALONE.name]
    check_answers_alone(answers(model))
    save(model, tmp_path / "one")
    assert plain(tmp_path / "one") == EXPECTED[ALONE.name]
    assert index(tmp_path / "one").keys() == index(ALONE).keys()
    for found in workers.run(alone_in_two_ranks, tmp_path / "two", world_size=2):
        check_answers_alone(found)
    assert with_numbers(plain(tmp_path / "two")) == with_numbers(EXPECTED[ALONE.name])
    assert fingerprints(tmp_path / "two") == EXPECTED[f"fingerprints of {ALONE.name}"]


def check_served(found: dict[str, Tensor], name: str) -> None:
    expected = EXPECTED["served"][name]
    if name.startswith("float") and not name.endswith("initial"):
        assert as_text(found) == expected
    check_near(found, expected, **(INITIAL if name.endswith("initial") else NEARLY))


@pytest.mark.parametrize("name", SERVED_AS)
def test_served_directories(tmp_path, name):
    served = shutil.copytree(SAVED / f"served_{name}", tmp_path / "served")
    check_served(served_answers(served), name)
    check_served(served_answers(served, "initial"), f"{name} initial")
    serving.apply_delta(served, DELTA)
    check_served(served_answers(served), f"{name} later")
    if name == "int8":
        after = shutil.copytree(SAVED / "served_int8_after_delta", tmp_path / "after")
        check_served(served_answers(after), "int8 later")
        with pytest.raises(ValueError, match="applied already"):
            serving.apply_delta(after, DELTA)


def files(folder: Path) -> dict[str, Any]:
    """The contents of a served directory, which gives its files random names; format 2 also has keys."""
    current = (folder / "current").read_text().strip()
    manifest = json.loads((folder / current / "manifest.json").read_text())
    rows = (folder / manifest.pop("rows_file")).read_bytes()
    assert not any(rows[manifest["rows_bytes"] :]), "zeros, of which later versions have more"
    assert manifest.pop("format") in (1, 2)
    assert not any(table.pop("key", 0) for table in manifest["tables"].values())
    return {
        "current": current.partition("-")[0],
        "manifest": manifest,
        "slots": (folder / current / "slots").read_bytes(),
        "rows": rows[: manifest["rows_bytes"]],
    }


@pytest.mark.parametrize("name", SERVED_AS)
def test_served_directories_are_built_the_same(tmp_path, name, monkeypatch):
    monkeypatch.setattr("torchrec_dyn.serving.builder.new_key", lambda: 0)
    monkeypatch.setattr("torchrec_dyn.serving.update.new_key", lambda: 0)
    serving.build(BOTH, tmp_path / "served", rows=SERVED_AS[name])
    assert files(tmp_path / "served") == files(SAVED / f"served_{name}")
    if name == "int8":
        serving.apply_delta(tmp_path / "served", DELTA)
        assert files(tmp_path / "served") == files(SAVED / "served_int8_after_delta")


def test_rows_as_safetensors(tmp_path):
    collection, file = Shared(is_told=False).bags, SAVED / "spread.safetensors"
    ids = tensor(EXPECTED[BOTH.name]["model.bags.embedding_bags.spread.ids"])
    assert checkpoint.import_rows(collection, "spread", file) == len(ids)
    rows, found = dyn.lookup_rows(collection, "spread", ids)
    weight = EXPECTED[BOTH.name]["model.bags.embedding_bags.spread.weight"]
    assert bool(found.all()) and as_text({"": rows}) == {"": weight}
    checkpoint.export_rows(collection, "spread", tmp_path / "again")
    checkpoint.export_saved_rows(BOTH, "spread", tmp_path / "saved")
    for path in (tmp_path / "again", tmp_path / "saved"):
        assert path.read_bytes() == file.read_bytes()
