"""A batch with a size per feature and one with one size, sent by two ranks of a pooled collection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from torchrec_dyn.sharding.sent_batch import SentBatch, sent_batch

KEYS = ["a", "b"]
WEIGHTS = [None, torch.tensor([0.5, 1.0, 2.0, 4.0])]


def plain(weights: Any = None) -> SentBatch:
    lengths = torch.tensor([1, 0, 1, 1, 0, 1])  # 3 samples
    ids = torch.tensor([1, 2, 3, 4])
    return sent_batch(KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths), trains=True)


def varying(weights: Any = None) -> SentBatch:
    lengths, sizes = torch.tensor([2, 1, 0, 1]), [[1], [3]]
    ids = torch.tensor([5, 6, 7, 8])
    made = KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths, stride_per_key_per_rank=sizes)
    return sent_batch(made, trains=True)


def rows_of(batch: SentBatch) -> list[tuple[str, list[int]]]:
    """Returns the labelled rows that TorchRec's first exchange sends to two ranks with a feature each."""
    rows = batch.dist_splits([1, 1])
    if not batch.variable_stride_per_key():
        rows.append([batch.stride()] * 2)
    return list(zip([*batch.dist_labels(), "size"], rows, strict=False))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_rows_and_tensors_of_both_forms_have_one_place(weights: Any) -> None:
    """A rank that gets both forms waits for no more than was sent."""
    one, other = rows_of(plain(weights)), rows_of(varying(weights))
    names = ["lengths", "values", *([] if weights is None else ["weights"])]
    assert [name for name, _ in one] == [*names, "values", "size"]
    assert [name for name, _ in other] == [*names, "values", ""]
    assert one[-2:] == [("values", [8 * 2 + 1, 8 * 2 + 1]), ("size", [3, 3])]
    assert other[-2:] == [("values", [8 * 2 + 3, 8 * 2 + 3]), ("", [0, 0])]
    for batch in (plain(weights), varying(weights)):
        tensors = batch.dist_tensors()
        assert [len(tensor) for tensor in tensors] == [
            sum(row) for _, row in rows_of(batch)[: len(names)]
        ]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_two_forms_send_is_not_read(weights: Any) -> None:
    """Of the numbers of both batches TorchRec would read what is not there."""
    one, other = plain(weights), varying(weights)
    lengths = torch.cat([other.dist_tensors()[0][:2], one.lengths()[:3]])
    ids = torch.cat([other.values()[:2], one.values()[:2]])
    tensors = [lengths, ids, *([] if weights is None else [torch.cat([weights[:2], weights[:2]])])]
    for strides in ([0, 3], None):
        got = SentBatch.dist_init(KEYS[:1], tensors, strides is None, 2, None, strides)
        assert got.keys() == ["a"] and not got.values().numel() and not got.lengths().numel()
