"""Requests while deltas are applied: each sees one generation of all tables."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from serving_cases import Plain, bag_configs, save, save_delta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import knobs, serving
from torchrec_dyn.serving import builder
from torchrec_dyn.serving import generation as serving_generation
from torchrec_dyn.serving import lookup as serving_lookup
from torchrec_dyn.serving.generation import mapped_tensors
from torchrec_dyn.serving.manifest import read_manifest, with_current

IDS = range(300)
VERSIONS = 6


def version(number: int) -> list[Plain]:
    """Two tables in which every number is `number`."""
    return [
        Plain("a", 8, {i: torch.full((8,), float(number)) for i in IDS}),
        Plain("b", 16, {i: torch.full((16,), float(number)) for i in IDS}),
    ]


def ask(ours: serving.ServingEmbeddingBagCollection) -> set[float]:
    """Every number of an answer about all ids of both tables."""
    ids = torch.tensor([*IDS, *IDS])
    features = KeyedJaggedTensor(["f_a", "f_b"], ids, lengths=torch.ones(len(ids)).long())
    return set(ours(features).values().unique().tolist())


def prepare(folder: Path, dtype: torch.dtype, deltas: int = VERSIONS) -> Path:
    save(folder / "checkpoint", *version(0))
    for number in range(deltas):
        save_delta(folder / f"delta{number}", version(number), version(number + 1))
    serving.build(folder / "checkpoint", folder / "served", rows=dtype)
    return folder / "served"


def test_the_named_generation_is_the_one_that_is_read(tmp_path, monkeypatch):
    """Also for a thread that asks while another is within `refresh`, after any line that sets something."""
    served = prepare(tmp_path, torch.float32, deltas=1)
    ours = serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0)))
    serving.apply_delta(served, tmp_path / "delta0")
    seen: set[tuple[str, float]] = set()

    def set_and_ask(module, name, value):
        torch.nn.Module.__setattr__(module, name, value)
        seen.add((ours.generation, *ask(ours)))

    monkeypatch.setattr(serving_lookup.ServedLookup, "__setattr__", set_and_ask)
    before = (ours.generation, *ask(ours))
    assert ours.refresh()
    assert seen <= {before, (ours.generation, *ask(ours))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_thread_sees_one_generation_of_all_tables(tmp_path, monkeypatch, dtype):
    # Rows move to a new file with every second delta, to other row numbers.
    monkeypatch.setattr(knobs, "WASTE_BYTES", 0)
    served = prepare(tmp_path, dtype)
    ours = serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0)))
    answers: list[set[float]] = []
    stop, answered = threading.Event(), threading.Semaphore(0)

    def read():
        while not stop.is_set():
            answers.append(ask(ours))
            answered.release()
        answers.append({-1.0})  # it has not died of an error

    def await_answers():
        """Two after all that there are: the second began after this call."""
        while answered.acquire(blocking=False):
            pass
        assert all(answered.acquire(timeout=60) for _ in range(2))

    # Threads give way to each other often, in the middle of a call too.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(VERSIONS):
            serving.apply_delta(served, tmp_path / f"delta{number}")
            assert ours.refresh() and not ours.refresh()
            await_answers()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert answers.pop() == {-1.0}
    assert all(len(answer) == 1 for answer in answers)
    seen = [answer.pop() for answer in answers]
    assert seen == sorted(seen) and {*range(1, VERSIONS + 1)} <= {*seen}
    assert ask(ours) == {float(VERSIONS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_request_ends_with_the_generation_it_began_with(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(knobs, "WASTE_BYTES", 0)
    served = prepare(tmp_path, dtype, 3)
    ours = serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0)))
    find = serving_generation.ServedTensors.find

    def slow(self, ids, table_offsets):
        found = find(self, ids, table_offsets)
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            for number in range(3):  # so many that rows have moved to a new file
                serving.apply_delta(served, tmp_path / f"delta{number}")
            assert ours.refresh()
        return found

    monkeypatch.setattr(serving_generation.ServedTensors, "find", slow)
    assert ask(ours) == {0.0}
    assert ask(ours) == {3.0}


@pytest.mark.parametrize("reader", ["collection", "verification", "index"])
def test_a_generation_whose_files_are_being_removed_is_given_up_for_the_next(
    tmp_path, monkeypatch, reader
):
    """Some files are gone, others are still there: that is no damage."""
    served = prepare(tmp_path, torch.float32, 3)
    ours = serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0)))
    serving.apply_delta(served, tmp_path / "delta0")

    def some(folder, **_):
        for name in ("tensors", "keys"):
            (folder / name).unlink(missing_ok=True)

    def slow(folder, name):
        read = read_manifest(folder, name)
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            monkeypatch.setattr(builder.shutil, "rmtree", some)
            for number in (1, 2):
                serving.apply_delta(served, tmp_path / f"delta{number}")
        return read

    def index(name):
        return mapped_tensors(served, name, slow(served, name))

    if reader == "index":
        assert with_current(served, index)["a.slots"].any()
    elif reader == "verification":
        monkeypatch.setattr(serving_generation, "read_manifest", slow)
        assert serving.verify(served) > 0
    else:
        monkeypatch.setattr(serving_generation, "read_manifest", slow)
        assert ours.refresh() and ask(ours) == {3.0}
    assert (tmp_path / "done").exists()


def test_what_is_served_stays_when_its_files_are_gone(tmp_path):
    served = prepare(tmp_path, torch.int8, 4)
    ours = serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0)))
    for number in range(4):
        serving.apply_delta(served, tmp_path / f"delta{number}")
    assert not (served / ours.generation).exists()
    assert ask(ours) == {0.0}
    assert ours.refresh() and ask(ours) == {4.0}


def test_a_write_into_a_mapped_tensor_stays_in_its_process(tmp_path):
    served = prepare(tmp_path, torch.float32, 1)
    one, other = (
        serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0))) for _ in range(2)
    )
    for name, buffer in one.named_buffers():
        if name.endswith("generation.rows"):
            buffer.zero_()
    assert ask(other) == {0.0}
    serving.apply_delta(served, tmp_path / "delta0")
    assert other.refresh() and ask(other) == {1.0}


def test_a_refresh_does_not_turn_back_what_another_thread_serves(tmp_path, monkeypatch):
    served = prepare(tmp_path, torch.float32, 2)
    ours = serving.ServingEmbeddingBagCollection(served, bag_configs(*version(0)))
    serving.apply_delta(served, tmp_path / "delta0")
    find = serving_lookup.open_generation

    def late(*given):
        monkeypatch.setattr(serving_lookup, "open_generation", find)
        found = find(*given)
        serving.apply_delta(served, tmp_path / "delta1")
        assert ours.refresh()  # of another thread
        return found

    monkeypatch.setattr(serving_lookup, "open_generation", late)
    assert not ours.refresh() and ask(ours) == {2.0}
