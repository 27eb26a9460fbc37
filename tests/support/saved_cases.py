"""Checkpoints under the documented keys, without a model."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchrec_dyn.checkpoint_format.content_sums import (
    MODEL_CHECKSUM,
    OPTIMIZER_CHECKSUM,
    as_words,
    content_sum,
    sum_of_small,
)
from torchrec_dyn.checkpoint_format.saved_tensor import Part, SavedTensor
from torchrec_dyn.storage.id_map import canonical_order

NOT_BY_ROW = ("waiting", "clock", "step", "config", "optimizer_config")
EMBEDDING_DIM = 6


def pieces(tensor: Tensor, rows: list[int], columns: list[int] | None = None) -> SavedTensor:
    """Returns a tensor that DCP saves as chunks cut at these rows and columns."""
    ends = [[0, *rows, len(tensor)]]
    ends += [[0, *(columns or []), tensor.shape[1]]] if tensor.dim() == 2 else []
    parts = []
    for spans in itertools.product(*(itertools.pairwise(one) for one in ends)):
        block = tensor[tuple(itertools.starmap(slice, spans))]
        if not block.numel():
            continue  # DCP identifies chunks by their first place: another chunk may begin there
        parts.append(
            Part(
                tuple(first for first, _ in spans),
                tuple(block.shape),
                lambda start, stop, block=block: block[start:stop],
            )
        )
    return SavedTensor(tensor.shape, tensor.dtype, parts)


def model_state(
    rows: int = 50, seed: int = 0, life: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Returns the tensors of a table "user" in the model's state dict, by name."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**62), 2**62, (rows,), generator=draw)
    ids = ids[canonical_order(ids)]
    state = {"ids": ids, "weight": torch.randn(rows, EMBEDDING_DIM, generator=draw).to(dtype)}
    if life:
        state["last_seen"] = torch.randint(1, 100, (rows,), generator=draw)
        state["count"] = torch.randint(1, 2**40, (rows,), generator=draw)
        waiting = torch.arange(12).reshape(4, 3) - 2**40
        state["waiting"] = waiting[canonical_order(waiting[:, 0].contiguous())]
        state["clock"] = torch.tensor([[3, 5, 9], [100, 200, 2**50]])
    config = {
        **{"format": 2, "table": "user", "embedding_dim": EMBEDDING_DIM, "seed": 7},
        **{"rows": str(dtype)[6:], "initializer": {"name": "Uniform", "low": -0.5, "high": 0.5}},
    }
    return state | {"config": config_bytes(config)}


def optimizer_state(rows: int = 50, cuts: tuple[int, ...] = (0, 6)) -> dict[str, Tensor]:
    """Returns the tensors of the table in the optimizer's state dict, for row-wise Adagrad, by name."""
    shards = len(cuts) - 1
    config = {"format": 2, "optimizer": "exact_row_wise_adagrad", "cuts": list(cuts)}
    return {
        "momentum1": torch.arange(float(rows * shards)).reshape(rows, shards),
        "step": torch.tensor(123),
        "optimizer_config": config_bytes(config),
    }


def config_bytes(config: dict[str, object]) -> Tensor:
    text = json.dumps(config, sort_keys=True).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sums_of(state: dict[str, Tensor], ids: Tensor, table: str = "user") -> dict[str, int]:
    return {
        name: sum_of_small(table, name, saved)
        if name in NOT_BY_ROW
        else content_sum(table, name, ids, saved)
        if saved.numel()
        else 0
        for name, saved in state.items()
    }


def with_checksum(state: dict[str, Tensor], ids: Tensor, table: str = "user") -> dict[str, Tensor]:
    """Returns the state with its checksum and without empty tensors, which DCP does not save."""
    words = torch.cat([as_words(sums_of(state, ids, table)), torch.tensor([5])])
    kept = {name: saved for name, saved in state.items() if saved.numel()}
    return kept | {OPTIMIZER_CHECKSUM if "step" in state else MODEL_CHECKSUM: words[None]}


def save_dict(state: Mapping[str, object], path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


MODEL_KEY = "sparse.ebc.embedding_bags.user"


def save_table(
    path,
    state: dict[str, Tensor] | None = None,
    optimizer: dict[str, Tensor] | None = None,
    cut=lambda name, tensor: tensor,
    key: str = MODEL_KEY,
    **more: object,
) -> None:
    """Saves {"model": ..., "optimizer": ...} with one table and tensors that belong to no table."""
    state = model_state() if state is None else state
    ids = state["ids"]
    whole = with_checksum(state, ids)
    saved: dict[str, object] = {f"{key}.{name}": cut(name, one) for name, one in whole.items()}
    everything: dict[str, object] = {
        "model": {**saved, "dense.weight": torch.randn(3, 4), "dense.step": torch.tensor(1)},
        "steps": 17,
        **more,
    }
    if optimizer is not None:
        parts = with_checksum(optimizer, ids)
        moments = {f"user.{name}": cut(name, one) for name, one in parts.items()}
        everything["optimizer"] = {
            "state": {f"{key}.weight": moments, "dense.weight": {"exp_avg": torch.ones(3, 4)}},
            "param_groups": [{"lr": 0.1}],
        }
    save_dict(everything, path)
