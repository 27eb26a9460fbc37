"""A table whose blocks grow in place trains, evicts, evaluates and converts as a table of many blocks."""

from contextlib import nullcontext

import pytest
import torch
from device_twins import on_host
from mock_device import MockDevice
from table_cases import make_group, make_table, random_bags, same_state, without_probes

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.optimizers import OptimizerKind

LIMIT = 3000


def run(kind, device="cpu"):
    """Returns outputs and the final state of a table, and the number of blocks of each of its stores."""
    table = make_table(
        kind, embedding_dim=24, num_embeddings=LIMIT, row_limit=LIMIT, unseen="initial",
        eviction=dyn.LeastRecentlyUsed(), device=device,
    )  # fmt: skip
    group, outputs = make_group(table), []
    for step in range(8):
        bags = random_bags(step, bags=100, longest=15, pool=1000 * (step + 1))
        ids, offsets = (tensor.to(device) for tensor in bags)
        output = group(ids, offsets, training=True)
        outputs.append(output.detach().clone())
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(device))
        unseen = group(ids + 3, offsets, training=False)
        outputs.append(unseen)
    blocks = [len(store.blocks) for store in (*table.stores, table.life.scores.store)]
    table.convert(torch.float16)
    outputs = [output.cpu() for output in outputs]
    return outputs, on_host(table.export_state()), without_probes(table.stats()), blocks


@pytest.mark.parametrize("kind", [OptimizerKind.EXACT_ROWWISE_ADAGRAD, OptimizerKind.ADAM])
def test_a_table_in_ranges_is_as_a_table_of_many_blocks(kind, monkeypatch):
    monkeypatch.setattr("torchrec_dyn.knobs.BLOCK_BYTES", 1 << 14)
    outputs, state, stats, blocks = run(kind)
    assert stats["evicted_full"] > 0 and min(blocks) > 5
    monkeypatch.setattr(knobs, "RANGE_DEVICES", {"cpu"})
    monkeypatch.setattr(knobs, "PAGE_BYTES", 4096)
    in_ranges = run(kind)
    assert in_ranges[3] == [1] * len(blocks)
    assert all(map(torch.equal, outputs, in_ranges[0]))
    assert same_state(state, in_ranges[1]) and stats == in_ranges[2]


@pytest.fixture(params=["mock", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def gpu(request):
    """Tensors of a GPU, or of a mock GPU."""
    with MockDevice() if request.param == "mock" else nullcontext():
        yield


@pytest.mark.everyday(2)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("in_ranges", [True, False])
@pytest.mark.parametrize("kind", [OptimizerKind.EXACT_ROWWISE_ADAGRAD, OptimizerKind.ADAM])
def test_a_table_of_a_gpu_with_or_without_ranges_is_as_one_of_the_cpu(kind, in_ranges, monkeypatch):
    """Without ranges memcheck sees an access behind a block (benchmarks/gpu_side.sh)."""
    monkeypatch.setattr("torchrec_dyn.knobs.BLOCK_BYTES", 1 << 14)
    outputs, state, _, blocks = run(kind)
    if not in_ranges:
        monkeypatch.setattr(knobs, "RANGE_DEVICES", set())
    of_gpu = run(kind, "cuda")
    assert of_gpu[3] == ([1] * len(blocks) if in_ranges else blocks)
    assert all(map(torch.equal, outputs, of_gpu[0])) and same_state(state, of_gpu[1])
