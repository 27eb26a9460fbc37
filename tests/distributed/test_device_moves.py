"""Tables of a sharded collection on a mock GPU, by one rank: rows are sent from the host, in chunks.

Sharded collections on a GPU are in tests/sharding.
"""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from device_twins import on_host, small_chunks
from life_cases import living_table
from mock_device import CUDA, OTHER_GPU, MockDevice
from sharded_cases import Case, three_tables
from sharded_training import collection_of, sharder_of
from table_cases import same_state
from torchrec.distributed.types import ShardingEnv

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.distributed.local_shards import copy_trained_rows
from torchrec_dyn.distributed.resharding import move_table
from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.ranks import Table, TableLayout
from torchrec_dyn.ranks.layout import Piece
from torchrec_dyn.state_dict import (
    load_optimizer_state,
    load_tables,
    save_optimizer_states,
    save_tables,
)

SPREAD = 2**58 + 1  # ids of both signs
LIVES = dyn.LeastRecentlyUsed(), dyn.AdmitAfter(2)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device
    assert device.mixed == [] and device.without_kernel == []


@pytest.fixture
def read_at_once(monkeypatch):
    """Returns the bytes of rows that were read at once on the device; chunks have 320 bytes."""
    return small_chunks(monkeypatch, 320)


def table(place, first=0, columns=5):
    """Returns a table of 5 columns, or one column shard of it."""
    options = {"kind": OptimizerKind.PARTIAL_ROWWISE_ADAM, "embedding_dim": 5, "device": place}
    return living_table(*LIVES, first_column=first, columns=columns, **options)


def filled(place):
    """Returns a table of 60 rows with optimizer state, scores and waiting ids."""
    made = table("cpu")
    made.assign(torch.arange(80) * SPREAD, torch.arange(400.0).view(80, 5) / 7)
    made.erase(torch.arange(20, 40) * SPREAD)
    state, ones = made.export_state(), torch.ones(60)
    state |= {"momentum1": ones[:, None] * torch.arange(5) / 3, "momentum2": ones.cumsum(0) / 7}
    state |= {"count": ones.long(), "last_seen": torch.arange(60) % 9, "step": torch.tensor(9)}
    made.load_state({**state, "waiting": torch.tensor([[1, -7], [3, 4], [1, 1]])})
    made.convert(device=place)
    return made


def table_of(group, *shards):
    first = shards[0]
    config = table_config("t", 5, 5, first.dtype, first.initializer)
    layout = TableLayout(tuple(Piece(one.first_column, one.columns, (0,)) for one in shards), False)
    return replace(
        Table.of_one(first, "t", config), group=group, layout=layout, shards=list(shards)
    )


def halves(place):
    return table(place, 0, 2), table(place, 2, 3)


def state_of(*shards):
    return [on_host(one.export_state()) for one in shards]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert same_state(one, other)


def test_a_table_moves_to_other_shards(device, group, read_at_once):
    found = {}
    for place in ("cpu", CUDA):
        before, after = filled(place), halves(place)
        read_at_once.clear()
        move_table(table_of(group, before), table_of(group, *after), "move")
        if place == CUDA:
            assert 0 < max(read_at_once) <= 320
        whole = table(place)
        move_table(table_of(group, *after), table_of(group, whole), "move")
        found[place] = state_of(before, *after, whole)
    assert_same(found[CUDA], found["cpu"])
    assert same_state(found["cpu"][0], found["cpu"][-1])


def test_copies_of_a_state_dict_are_on_the_host(device, group, read_at_once):
    here, there = filled("cpu"), filled(CUDA)
    saved = []
    for one in (here, there):
        sharded, state = table_of(group, one), {}
        read_at_once.clear()
        save_tables(state, {"t.": sharded}, "c")
        both = copy.deepcopy(state), save_optimizer_states([sharded], "state_dict")
        both = pickle.loads(pickle.dumps(both))
        assert max(read_at_once, default=0) <= 320
        saved.append([[block for _, block in one.local()] for of in both for one in of.values()])
    assert all(block.is_cpu for blocks in saved[1] for block in blocks)
    assert str(saved[0]) == str(saved[1])
    for place in ("cpu", CUDA):
        loaded = table(place)
        sharded = table_of(group, loaded)
        load_tables(dict(both[0]), {"t.": sharded}, "c", [])
        by_name = {key.rpartition(".")[2]: one for key, one in both[1].items()}
        load_optimizer_state(sharded, by_name)
        assert_same(state_of(loaded), state_of(here))


def test_rows_on_the_device_are_read_and_edited_by_id(device, group):
    seen = []
    for place in ("cpu", CUDA):
        shards = halves(place)
        move_table(table_of(group, filled(place)), table_of(group, *shards), "move")
        where = torch.device(place)
        whole = table_of(group, *shards)
        ids = torch.tensor([3 * SPREAD, 21 * SPREAD, 5]).to(place)
        whole.assign(ids[1:], torch.ones(2, 5).to(place))
        assert whole.erase(ids[:1]) == 1
        answers = [*whole.lookup(ids), whole.count(ids), whole.last_seen(ids)]
        answers.append(whole.ids())
        assert {one.device for one in answers} == {where}
        seen.append([one.cpu() for one in answers])
        assert torch.equal(whole.lookup(ids.cpu())[0].cpu(), answers[0].cpu())
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def test_rows_trained_before_sharding_are_copied_through_the_host(device, group, read_at_once):
    found = []
    for place in ("cpu", CUDA):
        source, shards = filled(place), halves(place)
        read_at_once.clear()
        copy_trained_rows(replace(table_of(group, source), group=None), table_of(group, *shards))
        assert max(read_at_once, default=0) <= 320
        found.append(state_of(*shards))
    assert_same(*found)


@pytest.mark.skipif(CUDA == OTHER_GPU, reason="has no two GPUs")
@pytest.mark.parametrize("pooled", [True, False])
def test_a_collection_stays_on_the_gpu_that_was_current_when_it_was_made(device, group, pooled):
    """Another thread, which saves or edits tables, has another current GPU."""
    case = Case(three_tables(["table_wise", "row_wise"], 1, 1), pooled=pooled)
    env, sharder = ShardingEnv.from_process_group(group), sharder_of(case)
    plan = {table.name: table.plan for table in case.tables}
    cuda = torch.device("cuda")
    with torch.cuda.device(OTHER_GPU):
        whole = collection_of(case, device=cuda, fused_params=case.fused_params)
        sharded = sharder.shard(collection_of(case), plan, env, cuda)
    for one in (whole, sharded, sharder.reshard(sharded, plan, env, cuda)):
        handle = one.table("t0")
        handle.assign(torch.arange(3), torch.ones(3, 8))
        rows, _ = handle.lookup(torch.arange(4))
        assert handle.device == rows.device == OTHER_GPU and int(rows.sum()) == 24
        handle.erase(torch.arange(3))
    with pytest.raises(
        ValueError, match="expected the device of the collection, cuda:1, got cuda:0"
    ):
        sharder.reshard(sharded, plan, env, CUDA)
