"""A damaged checkpoint is an error on every rank, and the tables stay as they were, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoint_cases import Setup, new, run_on, save, train
from checkpoint_damage import (
    Damage,
    flips_in_numbers,
    items_of,
    load_damaged,
    losses,
    repeated_ids,
)

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


@pytest.mark.parametrize("setup", [LOADED, UNSHARDED])
def test_lost_and_cut_files_are_found(folder: Path, setup: Setup) -> None:
    check(setup, folder, losses(folder, random.Random(3)))
