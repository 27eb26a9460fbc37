"""A damaged checkpoint is an error on every rank, and the tables stay as they were, to the bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import Setup, differences, held, load, new, run_on, save, train
from checkpoint_damage import Damage, flips_in_numbers, items_of
from life_cases import living_table

from torchrec_dyn.life import NO_STEP
from torchrec_dyn.policies import MOST_COUNT, AdmitAfter, LeastRecentlyUsed
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.state_dict.staged_rows import StagedRows
from torchrec_dyn.storage import canonical_order

# A table without policies, and one with ids that wait, scores and times: together they have every tensor.
BOTH = ("plain", "counted")
SAVED = Setup(2, ("row_wise", "table_wise"), optimizer="ADAM_BY_ROW", names=BOTH)
LOADED = Setup(2, ("column_wise", "row_wise"), optimizer="ADAM_BY_ROW", names=BOTH)
UNSHARDED = Setup(0, optimizer="ADAM_BY_ROW", names=BOTH)


def save_trained(setup: Setup, folder: str, steps: Sequence[int] = (0, 1, 2)) -> None:
    model = new(setup)
    train(model, setup, steps)
    save(model, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "saved"
    run_on(SAVED, save_trained, str(path))
    return path


def losses(folder: Path, chance: random.Random) -> list[Damage]:
    """Returns two damages of every file: the whole file is missing, and its end is missing."""
    found = []
    for file in sorted(one for one in folder.iterdir() if one.is_file()):
        size = file.stat().st_size
        found += [Damage(file.name, 0), Damage(file.name, chance.randrange(1, size))]
    return found


def repeated_ids(folder: Path) -> list[Damage]:
    """Returns damages in which an id of a table is replaced by another id of the table."""
    found = []
    for item in items_of(folder):
        if item.key.endswith(".ids") and len(item.numbers) > 1:
            first = bytes(item.numbers[:1].view(torch.uint8).tolist())
            found.append(Damage(item.file, item.begin + 8, first))
    return found


class Told(NamedTuple):
    """Result of loading a damaged checkpoint: the error, "" for none, and the keys of wrong tensors."""

    error: str
    wrong: list[str]


def load_damaged(setup: Setup, folder: str, damages: Sequence[Damage]) -> list[Told]:
    """Loads damaged copies, one after another, into a table with other contents; returns the results.

    After an error nothing may have changed; without an error the contents must equal the sound checkpoint.
    """
    sound, model = held(load(new(setup), folder)), new(setup)
    train(model, setup, range(10, 12))
    was, damaged, told = held(model), f"{folder} damaged", []
    for damage in damages:
        if not setup.world or dist.get_rank() == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(folder, damaged)
            damage.do(damaged)
        if setup.world:
            dist.barrier()
        error = ""
        try:
            load(model, damaged)
        except BaseException as one:  # torch's CheckpointException is not an Exception
            error = f"{type(one).__name__}: {one}"
        told.append(Told(error, differences(held(model), was if error else sound)))
        if told[-1].wrong or not error:
            model = new(setup)
            train(model, setup, range(10, 12))
            was = held(model)
        if setup.world:
            dist.barrier()
    return told


def check(
    setup: Setup, folder: Path, damages: Sequence[Damage], is_wrong: bool = True
) -> list[str]:
    """Asserts that every rank has an error; or sound tables, where the damage may be of no account."""
    of_ranks = run_on(setup, load_damaged, str(folder), damages, timeout=3600)
    for damage, told in zip(damages, zip(*of_ranks, strict=True), strict=True):
        assert not any(one.wrong for one in told), (damage, told)
        assert len({bool(one.error) for one in told}) == 1, (damage, told)
        assert told[0].error or not is_wrong, damage
    return [one.error for one in of_ranks[0]]


def say_damaged(errors: list[str]) -> bool:
    return all("damaged" in one or "read it with the version" in one.lower() for one in errors)


def by_name(folder: Path) -> dict[str, list[Damage]]:
    """A flipped bit in each tensor, checksums apart, by the tensor's name."""
    found: dict[str, list[Damage]] = {}
    items = [item for item in items_of(folder) if "checksum" not in item.key]
    damages = flips_in_numbers(folder, random.Random(1), 1)
    for item, damage in zip(items, damages, strict=True):
        found.setdefault(item.key.rpartition(".")[2], []).append(damage)
    return found


def test_a_flipped_bit_of_any_number_is_found(folder: Path) -> None:
    of_life = {"last_seen", "count", "waiting", "clock"}
    of_state = {"momentum1", "momentum2", "row_counter", "step"}
    damages = by_name(folder)
    assert damages.keys() == {"ids", "weight", "config", "optimizer_config"} | of_life | of_state
    chance = random.Random(2)
    some = [chance.choice(of) for of in damages.values()]  # all of them in the soak
    errors = check(LOADED, folder, some)
    assert say_damaged(errors), [one for one in errors if not say_damaged([one])]


def test_an_unsharded_table_is_as_it_was_too(folder: Path) -> None:
    damages = flips_in_numbers(folder, random.Random(5), 1, "model.")
    errors = check(UNSHARDED, folder, random.Random(6).sample(damages, 3))
    assert say_damaged(errors), [one for one in errors if not say_damaged([one])]


def test_repeated_ids_are_found(folder: Path) -> None:
    errors = check(LOADED, folder, repeated_ids(folder)[:3])
    assert errors and say_damaged(errors), errors


def staged(rows: int) -> StagedRows:
    """Returns the empty stage of a table of 2 columns, of which all rows are read."""
    shard = living_table(LeastRecentlyUsed(), AdmitAfter(2), embedding_dim=2)
    table = Table.of_one(shard, "t", {})
    return StagedRows(table, shard, Places([(0, rows)]), torch.float32, {}, True)


def test_an_id_at_both_sides_of_a_cut_between_chunks_is_found() -> None:
    ids = torch.arange(4)
    ids = ids[canonical_order(ids)]
    for second, is_right in ((ids[2:], True), (ids[[1, 2]], False), (ids[[0, 2]], False)):
        stage = staged(4)
        stage.receive("weight", 0, 0, torch.ones(4, 2))
        with nullcontext() if is_right else pytest.raises(ValueError, match="canonical order"):
            stage.receive("ids", 0, 0, ids[:2])
            stage.receive("ids", 2, 0, second)
            stage.check_complete(True)


@pytest.mark.parametrize("name, most", [("last_seen", NO_STEP - 1), ("count", MOST_COUNT)])
def test_scores_and_counters_out_of_range_are_found(name: str, most: int) -> None:
    """NO_STEP would mark a row without an id."""
    for number, is_right in ((0, True), (most, True), (-1, False), (most + 1, False)):
        stage, numbers = staged(1), torch.tensor([number])
        waiting = torch.tensor([[7, 1, 1]])
        waiting[0, 1 if name == "last_seen" else 2] = number
        for given, block in ((name, numbers), ("waiting", waiting)):
            with nullcontext() if is_right else pytest.raises(ValueError, match="damaged"):
                stage.receive(given, 0, 0, block)


@pytest.mark.parametrize("setup", [LOADED, UNSHARDED])
def test_lost_and_cut_files_are_found(folder: Path, setup: Setup) -> None:
    check(setup, folder, losses(folder, random.Random(3)))
