"""load_static of checkpoints of unsharded collections, and what it refuses."""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, shard
from static_collections import OPTIMIZERS, assert_same_rows, batch, ebc, loss_of
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_dyn as dyn
from torchrec_dyn.migration import trained_collections as from_static_rows
from torchrec_dyn.migration.static_checkpoint import load_static
from torchrec_dyn.migration.trained_collections import from_static

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_static_rows, "CHUNK_BYTES", 5 * 4 * 8)


def trained(kind: str) -> tuple[Any, Any]:
    """A static collection and its keyed optimizer after two steps."""
    static = ebc()
    keyed = KeyedOptimizerWrapper(dict(static.named_parameters(prefix="m")), OPTIMIZERS[kind])
    for step in range(2):
        loss_of(static, batch(static, random.Random(step))).backward()
        keyed.step()
        keyed.zero_grad()
    return static, keyed


def save(path: Path, static: Any, keyed: Any, **others: Any) -> Path:
    model = static.state_dict(prefix="m.")
    dcp.save({"model": model, "optim": keyed.state_dict(), **others}, checkpoint_id=path)
    return path


def dynamic(kind: str, dim: int = 8, rows: int = 100) -> Any:
    first, second = ebc().embedding_bag_configs()
    first = replace(first, embedding_dim=dim)
    configs = [first, replace(second, num_embeddings=rows, init_fn=None)]
    return dyn.DynamicEmbeddingBagCollection(configs, fused_params={"optimizer": kind})


def state_of(one: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(table.export_state()) for name, table in one.local_tables().items()}


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for table in one:
        assert one[table].keys() == other[table].keys()
        for name in one[table]:
            assert torch.equal(one[table][name], other[table][name]), (table, name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_gives_what_the_collection_itself_gives(tmp_path: Path, kind: str) -> None:
    static, keyed = trained(kind)
    made = dynamic(kind)
    load_static(made, save(tmp_path / "c", static, keyed), "m")
    assert_same(state_of(made), state_of(from_static(static, keyed)))
    made.train()(batch(static, random.Random(0)))
    assert made.local_tables()["a"].step == (1 if kind == "EXACT_SGD" else 3)


def test_what_was_there_goes_and_the_limit_does_not_count(tmp_path: Path) -> None:
    static, keyed = trained("EXACT_SGD")
    made = dynamic("EXACT_SGD", rows=7)  # of 30
    made.table("b").assign(torch.tensor([1, -9]), torch.ones(2, 4))
    load_static(made, save(tmp_path / "c", static, keyed))
    assert_same_rows(made, static)


def test_weights_alone(tmp_path: Path) -> None:
    static, keyed = trained("ADAM")
    path = save(tmp_path / "c", static, keyed)
    made = dynamic("EXACT_ADAGRAD")
    load_static(made, path, with_optimizer=False, step=9)
    assert_same_rows(made, static)
    assert not made.local_tables()["a"].export_state()["momentum1"].any()
    assert made.local_tables()["a"].step == 9


def without_steps(path: Path) -> Path:
    static, keyed = trained("ADAM")
    for state in keyed.state.values():
        del state["step"]
    return save(path, static, keyed)


def twice(path: Path) -> Path:
    static, keyed = trained("EXACT_SGD")
    return save(path, static, keyed, again=static.state_dict(prefix="n."))


def of_dynamic(path: Path) -> Path:
    made = from_static(ebc())
    dcp.save({"model": made.state_dict(prefix="m.")}, checkpoint_id=path)
    return path


def damaged(path: Path, how: Callable[[Path], Any]) -> Path:
    save(path, *trained("EXACT_SGD"))
    how(path)
    return path


def shorten(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-700])


def overwrite(path: Path) -> None:
    """Spoils the archive of the last table only: the first has been filled when it is read."""
    (file,) = path.glob("*.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, at in metadata.storage_data.items():
        if index.fqn.endswith(".b.weight"):
            data = bytearray(file.read_bytes())
            data[at.offset : at.offset + at.length] = b"x" * at.length
            file.write_bytes(data)


WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "nothing": (lambda p: p, {}, "expected a checkpoint of torch.distributed.checkpoint"),
    "torn": (lambda p: damaged(p, lambda c: (c / ".metadata").unlink()), {}, "It is torn"),
    "truncated": (lambda p: damaged(p, shorten), {}, "it is truncated"),
    "spoiled": (lambda p: damaged(p, overwrite), {}, "expected an archive of torch.save"),
    "other names": (
        lambda p: save(p, *trained("EXACT_SGD")),
        {"fqn": "x"},
        r"expected one key that ends with 'x.embedding_bags.a.weight', got \[\]",
    ),
    "two of a name": (twice, {}, r"got \['model.m.embedding_bags.a.weight', 'again.n.embed.*`fqn`"),
    "dynamic": (of_dynamic, {}, "table 'a': expected a static table, got a dynamic one. Load it"),
    "dim": (
        lambda p: save(p, *trained("EXACT_SGD")),
        {"dim": 6},
        r"table 'a': expected rows \[N, 6\], got \[12, 8\]",
    ),
    "no state": (
        lambda p: save(p, *trained("EXACT_SGD")),
        {"kind": "EXACT_ADAGRAD"},
        r"expected optimizer state \['momentum1'\] of EXACT_ADAGRAD, got \[\]",
    ),
    "more state": (lambda p: save(p, *trained("ADAM")), {}, r"\[\] of EXACT_SGD, got \['momentum1"),
    "state by row": (
        lambda p: save(p, *trained("EXACT_ROWWISE_ADAGRAD")),
        {"kind": "EXACT_ADAGRAD"},
        r"expected momentum1 of EXACT_ADAGRAD as \[12, 8\], got \[12, 1\]",
    ),
    "state by column": (
        lambda p: save(p, *trained("EXACT_ADAGRAD")),
        {"kind": "EXACT_ROWWISE_ADAGRAD"},
        r"expected momentum1 of EXACT_ROWWISE_ADAGRAD as \[12\], got \[12, 8\]",
    ),
    "no steps": (without_steps, {"kind": "ADAM"}, "the training steps of ADAM.* Pass step="),
    "no steps of ADAMW": (without_steps, {"kind": "ADAMW"}, "the training steps of ADAMW.* Pass"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, name: str) -> None:
    make, options, message = WRONG[name]
    path = make(tmp_path / "c")
    made = dynamic(options.pop("kind", "EXACT_SGD"), options.pop("dim", 8))
    for table, columns in (("a", made.embedding_bag_configs()[0].embedding_dim), ("b", 4)):
        made.table(table).assign(torch.tensor([1, -9]), torch.ones(2, columns))
    before = state_of(made)
    with pytest.raises(ValueError, match=message):
        load_static(made, path, **options)
    assert_same(before, state_of(made))


def test_steps_that_are_not_saved_are_told(tmp_path: Path) -> None:
    made = dynamic("ADAM")
    load_static(made, without_steps(tmp_path / "c"), step=11)
    assert made.local_tables()["b"].step == 11


def fail_on_one_rank(folder: str) -> list[str]:
    tables = [
        Table(name, [name], usual_plan("row_wise", dim, 2, 2, 0, 100), dim=dim, rows=100)
        for name, dim in (("a", 8), ("b", 4))
    ]
    case = Case(tables, fused_params={"optimizer": "EXACT_SGD", "learning_rate": 0.1})
    one = shard(case, collection_of(case)).module.collection
    ids = torch.arange(-4, 4)
    dyn.assign_rows(one, "a", ids, torch.ones(8, 8))
    faults = []
    for path in ("damaged", "sound" if dist.get_rank() else "nowhere"):
        with pytest.raises(ValueError) as caught:
            load_static(one, f"{folder}/{path}")
        faults.append(f"{caught.value}")
        assert dyn.read_num_rows(one, "a") == 8 and dyn.read_num_rows(one, "b") == 0
        assert torch.equal(dyn.lookup_rows(one, "a", ids)[0], torch.ones(8, 8))
    load_static(one, f"{folder}/sound")
    assert dyn.read_num_rows(one, "a") == 12 and dyn.read_num_rows(one, "b") == 30
    return faults


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    save(tmp_path / "sound", *trained("EXACT_SGD"))
    damaged(tmp_path / "damaged", overwrite)
    everyones = workers.run(fail_on_one_rank, f"{tmp_path}", world_size=2)
    assert everyones[0] == everyones[1]
    spoiled, nowhere = everyones[0]
    assert "expected an archive of torch.save" in spoiled
    assert nowhere.startswith("load_static(rank=0): ") and "got no directory" in nowhere
