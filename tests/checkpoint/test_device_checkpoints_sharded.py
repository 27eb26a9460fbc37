"""Tables on several mock GPUs: saved with the bytes of CPUs, loaded from CPUs and on CPUs."""

import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from checkpoint_cases import (
    LOCAL_SIZES,
    ROW_WISE,
    Setup,
    batch,
    contents,
    differences,
    held,
    load,
    new,
    put,
    quietly,
    save,
    state_dict_of,
    tables_of,
    train,
)
from mock_device import CUDA, MockDevice
from sharded_cases import Case, Table, usual_plan
from sharded_training import Holder
from sharded_twins import ShardedTwins
from static_collections import OPTIMIZERS, ROWS, ebc, loss_of
from static_collections import batch as static_batch

from torchrec_dyn import __main__ as command_line
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import apply_delta, export_delta, export_rows, import_rows, mark
from torchrec_dyn.migration import from_static, load_static

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLACES = {"cpu": "cpu", "device": CUDA}
# Sharding types of the tables "plain", and "counted", which has policies.
SOME = ("plain", "counted")
PLANS = (
    Setup(2, ("column_wise", "row_wise"), names=SOME),
    # So few rows that an import of known ids looks for room.
    Setup(2, ("row_wise", "three_columns"), names=SOME, rows=60),
)
ON_HOST = (
    Setup(2, ("column_wise", "row_wise"), names=SOME, gpu_rows=10, optimizer="ADAM"),
    Setup(2, ("row_wise", "three_columns"), names=SOME, rows=60, gpu_rows=10, optimizer="ADAM"),
)
ON_NODES = (
    Setup(4, ("grid_shard", "table_row_wise", "table_column_wise", "grid_shard"), optimizer="ADAM"),
    Setup(3, ("row_wise",), optimizer="ADAM"),
)
OTHER_CUTS = (
    Setup(2, ("three_columns", "row_wise"), optimizer="PARTIAL_ROWWISE_ADAM"),
    Setup(2, ("column_wise",), optimizer="PARTIAL_ROWWISE_ADAM"),
)


def edit(collection, setup, place):
    """Erases and assigns ids of this rank's batch."""
    for name in ("plain", "counted"):
        features = batch(setup.case(), 0, dist.get_rank(), setup.world)
        ids = features[f"f_{name}"].values().to(place)
        collection.table(name).erase(ids[::3].contiguous())
        others = ids[1::4].contiguous()
        rows = (others[:, None] % 7 + torch.arange(12.0, device=place)) / 16
        collection.table(name).assign(others, rows)


def saved_by_ranks(setup, folder):
    """Trains twins, and saves each: a checkpoint, a delta, and a file of rows."""
    with MockDevice() as device:
        twins = ShardedTwins(device, setup.case())
        for model, (name, place) in zip(twins.models, PLACES.items(), strict=True):
            train(model, setup, range(3), place)
            save(model, f"{folder}/{name}")
            marker = mark(model)
            train(model, setup, [3], place)
            edit(model.module.collection, setup, place)
            quietly(export_delta, model, f"{folder}/{name}_delta", marker)
            export_rows(model.module.collection, "plain", f"{folder}/{name}_rows")
        twins.check_notes()
        return twins.compare()


def loaded_by_ranks(setup, folder, first):
    """Loads into twins under another plan: each takes what the other kind of ranks saved.

    The devices load the checkpoint `first` before that of several CPU ranks.
    """
    with MockDevice() as device:
        twins = ShardedTwins(device, setup.case())
        here, there = twins.models
        load(there, f"{folder}/{first}")
        load(here, f"{folder}/device")
        assert twins.compare() > 0
        train(there, setup, [3], CUDA)  # a load into a full table
        load(there, f"{folder}/cpu")
        assert twins.compare() > 0
        before = held(here)
        copies = [pickle.dumps(state_dict_of(model)) for model in twins.models]
        quietly(apply_delta, here, f"{folder}/device_delta")
        quietly(apply_delta, there, f"{folder}/cpu_delta")
        assert twins.compare() > 0 and differences(held(here), before)
        for collection, name in zip(twins.collections, reversed(PLACES), strict=True):
            handle = collection.table("plain")
            handle.erase(handle.read_ids()[:3])
            import_rows(collection, "plain", f"{folder}/{name}_rows")
        assert twins.compare() > 0
        for model, copied in zip(twins.models, reversed(copies), strict=True):
            put(model, pickle.loads(copied))
        assert twins.compare() > 0 and not differences(held(here), before)
        for model, place in zip(twins.models, PLACES.values(), strict=True):
            train(model, setup, [4], place)
        for table in tables_of(there):
            table.id_map.check_invariants()
        twins.check_notes()
        return twins.compare()


def files_of(path):
    """Returns the bytes of the files of a checkpoint or file of rows, and DCP's list of its tensors."""
    if path.is_file():
        return path.read_bytes()
    metadata = dcp.FileSystemReader(path).read_metadata()
    files = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    assert files
    return files, metadata.state_dict_metadata, metadata.storage_data


def ranks_of(setup):
    return {"world_size": setup.world, "local_size": LOCAL_SIZES[setup.world], "timeout": 100}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        PLANS,
        ON_HOST,
        *(pytest.param(*plans, marks=pytest.mark.deep) for plans in (ON_NODES, OTHER_CUTS)),
    ],
)
def test_ranks_on_devices_save_and_load_as_ranks_on_cpus(tmp_path, source, target):
    alone = Setup(0, optimizer=source.optimizer, names=source.names)
    unsharded = new(alone)
    train(unsharded, alone, range(3))
    save(unsharded, tmp_path / "alone")
    workers.run(saved_by_ranks, source, str(tmp_path), **ranks_of(source))
    for part in ("", "_delta", "_rows"):
        assert files_of(tmp_path / f"device{part}") == files_of(tmp_path / f"cpu{part}"), part
    is_as_alone = source.optimizer not in ROW_WISE  # one number per row and column shard
    first = "alone" if is_as_alone else "cpu"
    workers.run(loaded_by_ranks, target, str(tmp_path), first, **ranks_of(target))
    # One rank on a CPU loads, reads and serves what several ranks on devices saved.
    loaded = load(new(alone), tmp_path / "device")
    if is_as_alone:
        assert not differences(contents(tmp_path / "device"), contents(tmp_path / "alone"))
        assert not differences(held(loaded), held(unsharded))
    assert command_line.main(["inspect", str(tmp_path / "device"), "--verify"]) == 0
    serving.build(tmp_path / "device", tmp_path / "served")
    serving.apply_delta(tmp_path / "served", tmp_path / "device_delta")


def filled_from_static(folder):
    """Shards a collection made of static tables, and fills a sharded one from their checkpoint."""
    tables = [
        Table("a", ["f", "g"], usual_plan("row_wise", 8, 2, 2, rows=ROWS["a"]), rows=ROWS["a"]),
        Table("b", ["h"], usual_plan("column_wise", 4, 2, 2, rows=ROWS["b"]), 4, rows=ROWS["b"]),
    ]
    torch.manual_seed(1)
    static = ebc()
    optimizer = OPTIMIZERS["EXACT_ADAGRAD"](static.parameters())
    loss_of(static, static_batch(static, random.Random(2))).backward()
    optimizer.step()
    quietly(dcp.save, Holder(static).state_dict(), checkpoint_id=folder)
    with MockDevice() as device:
        made = ShardedTwins(device, Case(tables), wrap=lambda _: from_static(static, optimizer))
        loaded = ShardedTwins(device, Case(tables))
        for model in loaded.models:
            with pytest.raises(
                ValueError, match=r"load_static: expected a collection .* not the model"
            ):
                load_static(model, folder)
            load_static(model.module.collection, folder, with_optimizer=False)
        for twins in (made, loaded):
            for table, weight in zip(tables, static.parameters(), strict=True):
                ids = torch.arange(table.rows, device=CUDA)
                rows, found = twins.collections[1].table(table.name).lookup_rows(ids)
                assert bool(found.all()) and torch.equal(rows.cpu(), weight.detach())
            twins.check_notes()
        return made.compare() + loaded.compare()


def test_static_tables_become_dynamic_on_the_devices_of_ranks(tmp_path):
    rows = workers.run(filled_from_static, str(tmp_path / "static"), world_size=2)
    assert sum(rows) == 2 * (ROWS["a"] + 2 * ROWS["b"])
