"""The batch that a row-wise input dist sends: the order of FBGEMM's bucketize op on mixed ids."""

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all

from torchrec_dyn import ops
from torchrec_dyn.ranks import ids_per_rank
from torchrec_dyn.sharding.dists import sorted_by_owner

pytestmark = pytest.mark.usefixtures("device")


def a_batch(bags: list[int], most: int, weighted: bool, dtype: torch.dtype) -> KeyedJaggedTensor:
    """Returns three features of these numbers of bags, of 0 to `most` ids each."""
    draw = torch.Generator().manual_seed(most)
    lengths = torch.randint(most + 1, (sum(bags),), generator=draw, dtype=dtype)
    count = int(lengths.sum())
    varies = len(set(bags)) > 1
    return KeyedJaggedTensor(
        keys=[f"f{number}" for number in range(len(bags))],
        values=torch.randint(-(2**63), 2**63 - 1, (count,), generator=draw),
        weights=torch.rand(count, generator=draw) if weighted else None,
        lengths=lengths,
        stride_per_key_per_rank=[[size] for size in bags] if varies else None,
    )


def with_mixed_ids(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    varies = batch.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=batch.keys(),
        values=ops.mix64(batch.values()),
        weights=batch.weights_or_none(),
        lengths=batch.lengths(),
        stride_per_key_per_rank=batch.stride_per_key_per_rank() if varies else None,
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("bags", "most", "weighted", "dtype"),
    [
        ([3000, 3000, 3000], 6, False, torch.int64),
        ([9000, 1, 4000], 1, True, torch.int32),  # a batch size of each feature
        ([1, 1, 1], 20_000, True, torch.int64),
        ([0, 5, 0], 3, False, torch.int32),
        ([2, 2, 2], 0, True, torch.int64),
    ],
)
def test_order_is_that_of_fbgemm(bags, most, weighted, dtype, ranks, threads) -> None:
    batch = a_batch(bags, most, weighted, dtype)
    expected, expected_where = bucketize_kjt_before_all2all(
        with_mixed_ids(batch),
        num_buckets=ranks,
        block_sizes=torch.full((3,), ids_per_rank(ranks)),
        output_permute=True,
        keep_original_indices=True,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, where = sorted_by_owner(batch, ranks, positions=True)
    finally:
        torch.set_num_threads(before)
    assert got.keys() == expected.keys()
    assert torch.equal(ops.mix64(got.values()), expected.values())
    assert torch.equal(where, expected_where)
    for name in ("lengths", "weights_or_none"):
        ours, theirs = getattr(got, name)(), getattr(expected, name)()
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))
    assert got.stride_per_key_per_rank() == expected.stride_per_key_per_rank()
    assert got.length_per_key() == expected.length_per_key()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes_move_with_their_ids(dtype: torch.dtype) -> None:
    batch = a_batch([4, 4, 4], 5, True, torch.int64)
    weights = batch.weights().to(dtype)
    order = sorted_by_owner(batch, 3, positions=True)[1].argsort()
    _, _, got, _ = ops.sort_by_owner(batch.values(), batch.lengths(), weights, 3)
    assert got.dtype == dtype and torch.equal(got, weights[order])
