"""The first tests for a GPU: extremes of the mixer, the order of a routed batch, a find beside an insert.

Without a GPU the CUDA kernels run in the simt build, on the memory of the CPU and without streams.
"""

from contextlib import nullcontext

import oracle
import pytest
import torch
from device_ops import use_kernels
from oracle import WORD, signed, unmixed
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all

import torchrec_dyn as dyn
from torchrec_dyn import ops
from torchrec_dyn.ranks import ids_per_rank
from torchrec_dyn.ranks.routing import owners
from torchrec_dyn.sharding.dists import sorted_by_owner
from torchrec_dyn.storage.id_map import IdMap

LAST_ID = -3487469807577879104  # of the last mixed id, 2^64 - 1


@pytest.fixture(params=["simt", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of all tensors: the CPU with the kernels of the simt build, or a GPU."""
    if request.param == "simt":
        use_kernels(monkeypatch, "simt")
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def extreme_words(ranks: int) -> list[int]:
    """Returns the first and last mixed ids of all, of every rank's range, and those beyond the ranges."""
    block = (WORD - 1) // ranks
    edges = {block * rank + step for rank in range(ranks + 1) for step in (-2, -1, 0, 1)}
    edges |= {WORD - 1 - step for step in range(ranks + 1)} | {2**63 - 1, 2**63}
    return sorted(word for word in edges if 0 <= word < WORD)


@pytest.mark.parametrize("ranks", [2, 3, 8, 48])
def test_the_last_mixed_ids_have_an_id_an_owner_and_a_row(place, ranks):
    words, block = extreme_words(ranks), (WORD - 1) // ranks
    mixed = torch.tensor([signed(word) for word in words], device=place)
    ids = unmixed(mixed)
    assert words[-1] == WORD - 1 and ids[-1].item() == LAST_ID
    assert ids.tolist() == [oracle.unmix64(word) for word in words]
    assert torch.equal(ops.mix64(ids), mixed)
    expected = [word // block if word < block * ranks else word % ranks for word in words]
    assert owners(ids, ranks).tolist() == expected
    id_map, rows = IdMap(device=place), torch.arange(len(ids), device=place)
    id_map.reserve(len(ids))
    id_map.insert(ids, rows)
    assert torch.equal(id_map.lookup(ids), rows)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("bags", [[40, 40], [60, 3]])  # equal, and a batch size of each feature
def test_a_routed_batch_has_the_order_of_fbgemm_on_the_same_device(place, bags, ranks):
    ids = unmixed(torch.tensor([signed(word) for word in extreme_words(ranks)] * 3))
    lengths = torch.randint(9, (sum(bags),), generator=torch.Generator().manual_seed(ranks))
    batch = KeyedJaggedTensor(
        keys=["a", "b"],
        values=ids.repeat(-(-int(lengths.sum()) // len(ids)))[: int(lengths.sum())],
        lengths=lengths,
        stride_per_key_per_rank=None if bags[0] == bags[1] else [[size] for size in bags],
    ).to(place)
    varies = batch.variable_stride_per_key()
    mixed = KeyedJaggedTensor(
        keys=batch.keys(),
        values=ops.mix64(batch.values()),
        lengths=batch.lengths(),
        stride_per_key_per_rank=batch.stride_per_key_per_rank() if varies else None,
    )
    expected, expected_where = bucketize_kjt_before_all2all(
        mixed,
        num_buckets=ranks,
        block_sizes=torch.full((2,), ids_per_rank(ranks), device=place),
        output_permute=True,
        keep_original_indices=True,
    )
    got, where = sorted_by_owner(batch, ranks, positions=True)
    assert torch.equal(ops.mix64(got.values()), expected.values())
    assert torch.equal(got.lengths(), expected.lengths())
    assert torch.equal(where, expected_where)


def test_a_find_beside_an_insert_takes_no_stale_id(place):
    """An id that was removed may still stand in its slot: who claims the slot writes its own id after that.

    So a find on another stream must wait for the insert.
    """
    on_gpu = place.type == "cuda"
    count, turns = (500_000, 20) if on_gpu else (500, 3)
    config = EmbeddingConfig(2 * count, 4, "a", feature_names=["a"])
    module = dyn.DynamicEmbeddingCollection(
        [config],
        device=place,
        dynamic=dyn.DynamicTableConfig(initializer=dyn.Constant(0.5)),
        fused_params={"learning_rate": 0.0},
    )
    table, lengths = module.table("a"), torch.ones(count, dtype=torch.int64, device=place)
    here, there = (torch.arange(count, device=place) + first for first in (0, count))
    inserting, finding = nullcontext(), nullcontext()
    if on_gpu:
        inserting, finding = (torch.cuda.stream(torch.cuda.Stream()) for _ in range(2))
        torch.cuda.synchronize()
    with torch.no_grad():
        module(KeyedJaggedTensor(["a"], here, lengths=lengths))
        for _ in range(turns):
            with inserting:
                table.erase(here)
                module(KeyedJaggedTensor(["a"], there, lengths=lengths))
            with finding:
                _, is_known = table.lookup(here)
                rows, are_known = table.lookup(there)
            if on_gpu:
                torch.cuda.synchronize()
            assert not is_known.any() and are_known.all()
            assert (rows == 0.5).all()
            here, there = there, here
