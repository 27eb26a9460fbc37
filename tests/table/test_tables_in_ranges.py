"""A table whose blocks grow in place trains, evicts, evaluates and converts as a table of many blocks."""

import pytest
import torch
from table_cases import make_group, make_table, random_bags, same_state

import torchrec_dyn as dyn
from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.storage import growing_block

LIMIT = 3000


def run(kind):
    """Returns outputs and the final state of a table, and the number of blocks of each of its stores."""
    table = make_table(
        kind, embedding_dim=24, num_embeddings=LIMIT, row_limit=LIMIT, unseen="initial",
        eviction=dyn.LeastRecentlyUsed(),
    )  # fmt: skip
    group, outputs = make_group(table), []
    for step in range(8):
        ids, offsets = random_bags(step, bags=100, longest=15, pool=1000 * (step + 1))
        output = group(ids, offsets, training=True)
        outputs.append(output.detach().clone())
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
        unseen = group(ids + 3, offsets, training=False)
        outputs.append(unseen)
    blocks = [len(store.blocks) for store in (*table.stores, table.life.scores.store)]
    table.convert(torch.float16)
    return outputs, table.export_state(), table.stats(), blocks


@pytest.mark.parametrize("kind", [OptimizerKind.EXACT_ROWWISE_ADAGRAD, OptimizerKind.ADAM])
def test_a_table_in_ranges_is_as_a_table_of_many_blocks(kind, monkeypatch):
    monkeypatch.setattr("torchrec_dyn.storage.row_store._BLOCK_BYTES", 1 << 14)
    outputs, state, stats, blocks = run(kind)
    assert stats["evicted_full"] > 0 and min(blocks) > 5
    monkeypatch.setattr(growing_block, "RANGE_DEVICES", {"cpu"})
    monkeypatch.setattr(growing_block, "_PAGE_BYTES", 4096)
    in_ranges = run(kind)
    assert in_ranges[3] == [1] * len(blocks)
    assert all(map(torch.equal, outputs, in_ranges[0]))
    assert same_state(state, in_ranges[1]) and stats == in_ranges[2]
