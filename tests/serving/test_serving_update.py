"""apply_delta: a checkpoint and its deltas in order serve what the last checkpoint would."""

import errno
import fcntl
import json
import os
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from another_process import call
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import id_of_hash
from serving_cases import Plain, bag_configs, save, save_delta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import knobs, ops, serving
from torchrec_dyn.serving import builder as serving_builder
from torchrec_dyn.serving import generation as serving_generation
from torchrec_dyn.serving.files import only_writer
from torchrec_dyn.serving.manifest import current_generation, read_manifest

IDS = range(-10, 60)
A = Plain("a", 8).with_random(range(40))
B = Plain("b", 12).with_random(range(-10, 3), seed=1)


def collection(folder: Path, *tables: Plain) -> serving.ServingEmbeddingBagCollection:
    return serving.ServingEmbeddingBagCollection(folder, bag_configs(*tables))


def all_rows(ours: serving.ServingEmbeddingBagCollection) -> torch.Tensor:
    """Rows of all of IDS in all tables, side by side."""
    keys = [name for config in ours.embedding_bag_configs() for name in config.feature_names]
    ids = torch.tensor(IDS).repeat(len(keys))
    return ours(KeyedJaggedTensor(keys, ids, lengths=torch.ones(len(ids)).long())).values()


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def served(tmp_path):
    save(tmp_path / "checkpoint", A, B)
    serving.build(tmp_path / "checkpoint", tmp_path / "served")
    return tmp_path / "served"


changes = st.lists(
    st.tuples(st.sets(st.sampled_from(IDS)), st.sets(st.sampled_from(IDS)), st.integers(0, 99)),
    min_size=1,
    max_size=4,
)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int4])
@given(changes=changes)
@settings(max_examples=max(1, settings.default.max_examples // 8))
def test_deltas_in_order_give_the_last_checkpoint(tmp_path_factory, dtype, changes):
    folder = tmp_path_factory.mktemp("deltas")
    save(folder / "checkpoint", A, B)
    serving.build(folder / "checkpoint", folder / "served", rows=dtype)
    ours = collection(folder / "served", A, B)
    state = [A, B]
    for number, (trained, erased, seed) in enumerate(changes):
        after = [one.with_random(trained, seed).without(erased) for one in state]
        save_delta(folder / f"delta{number}", state, after)
        serving.apply_delta(folder / "served", folder / f"delta{number}")
        state = after
    assert ours.refresh()
    save(folder / "last", *state)
    serving.build(folder / "last", folder / "fresh", rows=dtype)
    assert torch.equal(all_rows(ours), all_rows(collection(folder / "fresh", *state)))
    tables = [
        read_manifest(one, current_generation(one)).tables
        for one in (folder / "served", folder / "fresh")
    ]
    for name in ("a", "b"):
        assert tables[0][name].sums == tables[1][name].sums
        assert tables[0][name].num_rows == tables[1][name].num_rows
        assert tables[0][name].row_sum == tables[1][name].row_sum
    shutil.rmtree(folder)


def test_missed_and_repeated_deltas_are_refused(served, tmp_path):
    states = [[A, B]]
    for number in range(3):
        states.append([states[-1][0].with_random([number], seed=number + 10), B])
        save_delta(tmp_path / f"d{number}", *states[-2:])
    serving.apply_delta(served, tmp_path / "d0")
    before = content(served)
    with pytest.raises(ValueError, match=r"table='a'\): expected a delta that begins at.*already"):
        serving.apply_delta(served, tmp_path / "d0")
    with pytest.raises(ValueError, match=r"table='a'\): .* Apply the deltas in between first"):
        serving.apply_delta(served, tmp_path / "d2")
    assert content(served) == before
    serving.apply_delta(served, tmp_path / "d1")
    serving.apply_delta(served, tmp_path / "d2")


def test_a_full_checkpoint_is_no_delta_and_a_delta_no_checkpoint(served, tmp_path):
    with pytest.raises(ValueError, match="expected a delta, got a full checkpoint"):
        serving.apply_delta(served, tmp_path / "checkpoint")
    save_delta(tmp_path / "d", [A], [A.with_random([1])])
    with pytest.raises(ValueError, match="expected a checkpoint, got a delta"):
        serving.build(tmp_path / "d", tmp_path / "other")
    # Nor is a delta that says nothing of a table that is served.
    with pytest.raises(ValueError, match=r"got \['b'\]"):
        serving.apply_delta(served, tmp_path / "d")
    with pytest.raises(ValueError, match=r"a directory made by serving\.build"):
        serving.apply_delta(tmp_path, tmp_path / "d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("removed twice", "expected removed ids that are served, got 1 ids without a row"),
        ("removed unknown", "expected removed ids that are served, got 1 ids without a row"),
        ("result", "expected a delta that leads to content sums"),
        ("flipped", "expected the content sum"),
    ],
)
def test_deltas_that_contradict_themselves_change_nothing(tmp_path, dtype, fault, message):
    save(tmp_path / "checkpoint", A, B)
    served = tmp_path / "served"
    serving.build(tmp_path / "checkpoint", served, rows=dtype)
    after = [A.with_random([1, 2], seed=9).without([3]), B.without([0])]
    wrong = {
        "removed twice": {"removed": torch.tensor([3, 3])},
        "removed unknown": {"removed": torch.tensor([1000])},
        "result": {"result": A.with_random([1, 2, 50]).without([3]).sums()},
        "flipped": {},
    }[fault]
    save_delta(tmp_path / "d", [A, B], after, **wrong)
    if fault == "flipped":
        (file,) = (tmp_path / "d").glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[data.find(after[0].rows[2].numpy().tobytes()) + 2] ^= 4
        file.write_bytes(data)
    ours, before = collection(served, A, B), current_generation(served)
    rows = all_rows(ours)
    with pytest.raises(ValueError, match=message):
        serving.apply_delta(served, tmp_path / "d")
    assert current_generation(served) == before
    assert sorted(p.name for p in served.iterdir() if p.is_dir()) == [before]
    assert torch.equal(all_rows(collection(served, A, B)), rows)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)], ids=str
)
def test_a_row_of_nans_stops_no_deltas(tmp_path, dtype, bits):
    nans = torch.full((4,), bits, dtype=torch.int16).view(dtype)
    plain = Plain("a", 4, dtype=dtype).with_random(range(5))
    table = replace(plain, rows={**plain.rows, 3: nans})
    served = tmp_path / "served"
    serving.build(save(tmp_path / "checkpoint", table), served)
    states = [table, table.with_random([3], seed=1), table, table.without([3]), table]
    for number, (before, after) in enumerate(pairwise(states)):
        save_delta(tmp_path / f"d{number}", [before], [after])
        serving.apply_delta(served, tmp_path / f"d{number}")
    serving.verify(served)


def test_another_model_is_refused(served, tmp_path):
    other = Plain("a", 8, dict(A.rows), seed=5)
    save_delta(tmp_path / "d", [other, B], [other.with_random([1]), B])
    with pytest.raises(ValueError, match=r"table='a'\): expected seed 0 as served, got 5"):
        serving.apply_delta(served, tmp_path / "d")


def test_maps_grow_and_dead_rows_are_given_back(served, tmp_path, monkeypatch):
    monkeypatch.setattr(knobs, "WASTE_BYTES", 0)
    state = [A.with_random(range(-10, 60)), B]
    wide = 500
    big = [state[0].with_random(range(1000, 1000 + wide), seed=2), B]
    save_delta(tmp_path / "d0", [A, B], big)
    serving.apply_delta(served, tmp_path / "d0")
    for number in range(1, 5):
        after = [big[0].with_random(range(1000, 1000 + wide), seed=number), B]
        save_delta(tmp_path / f"d{number}", big, after)
        serving.apply_delta(served, tmp_path / f"d{number}")
        big = after
        manifest = read_manifest(served, current_generation(served))
        in_use = 32 * len(big[0].rows) + 48 * len(B.rows)
        assert in_use <= manifest.rows_bytes <= 2 * in_use + 48
        assert len(list(served.glob("rows-*"))) <= 2
        assert len([p for p in served.iterdir() if p.is_dir()]) == 2
    ours = collection(served, *big)
    ids = torch.tensor([*IDS, *range(1000, 1000 + wide)])
    both = KeyedJaggedTensor(["f_a", "f_b"], ids.repeat(2), lengths=torch.ones(2 * len(ids)).long())
    expected = torch.stack([big[0].rows.get(int(i), torch.zeros(8)) for i in ids])
    assert torch.equal(ours(both)["f_a"], expected)


def test_memory_does_not_grow_with_removed_ids_nor_with_wide_rows(tmp_path, monkeypatch):
    """Rows are read by chunks where ids go, where the rows file is rewritten and where it is summed."""
    before = [Plain("a", 64).with_random(range(400))]
    after = [before[0].without(range(300))]
    save(tmp_path / "checkpoint", *before)
    save_delta(tmp_path / "d", before, after)
    serving.build(tmp_path / "checkpoint", tmp_path / "served")
    read: list[int] = []

    def watched(owner: Any, name: str, argument: int) -> None:
        real = getattr(owner, name)

        def call(*given):
            read.append(given[argument].nbytes)
            return real(*given)

        monkeypatch.setattr(owner, name, call)

    watched(serving_builder, "sum_of_rows", 2)
    watched(serving_generation, "sum_of_rows", 2)
    watched(serving_builder.Appender, "append", 1)
    monkeypatch.setattr(knobs, "WASTE_BYTES", 0)
    monkeypatch.setattr(knobs, "SERVED_CHUNK_BYTES", 8192)
    monkeypatch.setattr(knobs, "MAP_PIECE_BYTES", 8192)
    serving.apply_delta(tmp_path / "served", tmp_path / "d")
    generation = current_generation(tmp_path / "served")
    assert read_manifest(tmp_path / "served", generation).rows_bytes == 100 * 256  # rewritten
    serving.verify(tmp_path / "served")
    assert 256 < max(read) <= 8192


def test_one_writer_at_a_time(served, tmp_path):
    save_delta(tmp_path / "d", [A, B], [A.with_random([1]), B])
    with only_writer(served), pytest.raises(ValueError, match="one writer at a time"):
        serving.apply_delta(served, tmp_path / "d")
    serving.apply_delta(served, tmp_path / "d")


def test_a_process_forked_meanwhile_does_not_hold_the_lock(served, tmp_path):
    """As a worker of a data loader, or of a server, that another thread starts."""
    ours, theirs = os.pipe()
    with only_writer(served):
        child = os.fork()
        if child == 0:
            os.close(theirs)
            os.read(ours, 1)  # until the other end is closed
            os._exit(0)
    os.close(ours)
    try:
        save_delta(tmp_path / "d", [A, B], [A.with_random([1]), B])
        serving.apply_delta(served, tmp_path / "d")
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_named(served, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    save_delta(tmp_path / "d", [A, B], [A.with_random([1]), B])
    with pytest.raises(OSError, match=r"Function not implemented: '.*/lock'"):
        serving.apply_delta(served, tmp_path / "d")
    with pytest.raises(OSError, match=r"Function not implemented: '.*/lock'"):
        serving.build(tmp_path / "checkpoint", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_file_that_cannot_be_read_is_not_taken_for_a_missing_one(served):
    (served / "current").unlink()
    (served / "current").symlink_to("current")
    with pytest.raises(OSError, match=r"symbolic links: '.*/current'"):
        collection(served, A, B)


def kill_at_every_moment(folder: Path) -> int:
    """Applies a delta in processes that end before their 1st, 2nd, ... access to a file.

    Returns:
        the number of accesses.
    """
    rows = {name: all_rows(collection(folder / name, A, B)) for name in ("old", "new")}
    tried, seen, killed = folder / "tried", [], True
    while killed:
        shutil.rmtree(tried, ignore_errors=True)
        shutil.copytree(folder / "old", tried)
        child = os.fork()
        if child == 0:
            end_at(len(seen))
            serving.apply_delta(tried, folder / "delta")
            os._exit(0)
        killed = os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 9
        found = all_rows(collection(tried, A, B))
        (name,) = (name for name in rows if torch.equal(found, rows[name]))
        if killed and name == "old":
            serving.apply_delta(tried, folder / "delta")  # goes on from what is left
            assert torch.equal(all_rows(collection(tried, A, B)), rows["new"])
            assert len([one for one in tried.iterdir() if one.is_dir()]) == 2
        seen.append(name)
    assert seen == sorted(seen, reverse=True) and seen[0] == "old" and seen[-1] == "new"
    return len(seen)


def end_at(moment: int) -> None:
    """Ends this process before access `moment` to a file of the folder "tried"."""
    events = {"open", "os.rename", "os.mkdir", "os.remove", "os.truncate", "mmap.__new__"}
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in events and (event == "mmap.__new__" or "tried" in str(arguments)):
            if count == moment:
                os._exit(9)
            count += 1

    sys.addaudithook(hook)


def test_a_writer_that_is_killed_leaves_the_old_rows_or_the_new(served, tmp_path):
    shutil.copytree(served, tmp_path / "old")
    after = [A.with_random([1, 50], seed=3).without([7]), B.with_random([2], seed=4)]
    save_delta(tmp_path / "delta", [A, B], after)
    serving.apply_delta(served, tmp_path / "delta")
    served.rename(tmp_path / "new")
    assert call(kill_at_every_moment, tmp_path) > 15


def test_ids_that_share_slots_of_the_public_hash_are_served_as_fast(tmp_path):
    """The maps of a build, and a map that a delta makes, have secret keys; the manifest has them."""
    crafted = [id_of_hash(i) for i in range(3000)]
    few = Plain("a", 4).with_random(crafted[:20])
    many = few.with_random(crafted)
    serving.build(save(tmp_path / "few", few), tmp_path / "served")
    first = key_and_longest_probe(tmp_path / "served")
    serving.apply_delta(tmp_path / "served", save_delta(tmp_path / "delta", [few], [many]))
    grown = key_and_longest_probe(tmp_path / "served")
    serving.build(save(tmp_path / "many", many), tmp_path / "built")
    built = key_and_longest_probe(tmp_path / "built")
    assert len({0, first[0], grown[0], built[0]}) == 4
    assert max(grown[1], built[1]) < 200


def key_and_longest_probe(folder: Path) -> tuple[int, int]:
    generation = folder / current_generation(folder)
    key = json.loads((generation / "manifest.json").read_text())["tables"]["a"]["key"]
    slots = torch.from_file(
        str(generation / "slots"),
        size=os.path.getsize(generation / "slots") // 8,
        dtype=torch.int64,
    )
    return key, ops.probe_lengths(slots.view(-1, 2), 1, key)[2].item()
