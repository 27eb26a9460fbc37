"""Reading what sharded models saved: the same contents whatever the plan, without any of their ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard
from torchrec import KeyedJaggedTensor

from torchrec_dyn import DynamicTableConfig, LeastRecentlyUsed
from torchrec_dyn.checkpoint_format.checkpoint_reader import open_checkpoint
from torchrec_dyn.storage.id_map import canonical_order

KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard")


def case_of(kind, world, optimizer=EmbOptimType.ADAM):
    life = DynamicTableConfig(eviction=LeastRecentlyUsed())
    tables = [
        Table("user", ["a", "b"], usual_plan(kind, 8, world, world), config=life),
        Table("item", ["c"], usual_plan(kind, 4, world, world, turn=1), dim=4, data_type="FP16"),
        Table("never", ["d"], usual_plan(kind, 4, world, world), dim=4),
    ]
    return Case(tables, fused_params={"optimizer": optimizer, "learning_rate": 0.1})


def train_and_save(case, path):
    """Returns of each table the ids here, their columns and their rows."""
    sharded = shard(case, collection_of(case))
    for step in range(case.steps):
        features = batches(case, step)[0][dist.get_rank()]
        # Whole numbers, so that sums do not depend on their order, and so on the plan.
        outputs = outputs_by_name(case, sharded(_without(features, "d")))
        torch.autograd.backward(
            list(outputs.values()), [torch.ones_like(one) for one in outputs.values()]
        )
    dcp.save(
        {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()},
        checkpoint_id=path,
    )
    handles = {table.name: sharded.module.collection.table(table.name) for table in case.tables}
    return {
        name: (one.ids(), one.columns, one.lookup(one.ids())[0]) for name, one in handles.items()
    }


def _without(features, name):
    """The same batch with no ids for one feature."""
    parts = features.to_dict()
    lengths = [part.lengths() * (key != name) for key, part in parts.items()]
    values = [part.values() for key, part in parts.items() if key != name]
    return KeyedJaggedTensor(list(parts), torch.cat(values), lengths=torch.cat(lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_is_read(tmp_path, kind):
    ranks = workers.run(train_and_save, case_of(kind, 2), str(tmp_path), world_size=2)
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.ownerless
    by_name = {table.name: table for table in checkpoint.tables.values()}
    assert set(by_name) == {"user", "item", "never"}
    for name, table in by_name.items():
        table.verify()
        assert table.optimizer is not None and table.optimizer["optimizer"] == "adam"
        assert int(table.read("step")) == Case.steps
        ids = torch.unique(torch.cat([rank[name][0] for rank in ranks]))
        assert table.num_rows == len(ids) and (name == "never") == (len(ids) == 0)
        if name == "never":
            continue
        expected = ids[canonical_order(ids)]
        assert torch.equal(table.read("ids"), expected)
        weight = table.read("weight")
        place = {id: row for row, id in enumerate(expected.tolist())}
        for rank in ranks:
            here, columns, rows = rank[name]
            held = [c for first, width in columns for c in range(first, first + width)]
            if held:
                rows_of = torch.tensor([place[id] for id in here.tolist()], dtype=torch.int64)
                assert torch.equal(weight[rows_of][:, held].float(), rows.float())
    assert by_name["user"].row_names == (
        *("ids", "weight", "last_seen", "count"),
        *("momentum1", "momentum2"),
    )


def test_the_fingerprint_is_that_of_the_contents(tmp_path):
    found = set()
    for kind in KINDS:
        path = tmp_path / kind
        workers.run(train_and_save, case_of(kind, 2), str(path), world_size=2)
        tables = open_checkpoint(path).tables.values()
        found.add(
            tuple(
                (table.name, table.fingerprint(), table.fingerprint(optimizer=True))
                for table in tables
            )
        )
    assert len(found) == 1
