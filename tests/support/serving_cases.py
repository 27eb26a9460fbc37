"""Checkpoints and deltas in the saved format, built from plain tables without a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from saved_cases import config_bytes, save_dict, sums_of, with_checksum
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.checkpoint_format import as_words
from torchrec_dyn.serving.row_format import INT4, SCALE_AND_BIAS_BYTES, RowFormat
from torchrec_dyn.storage.id_map import canonical_order

UNIFORM = {"high": 0.5, "low": -0.5, "name": "Uniform"}


@dataclass
class Plain:
    """A trained table as a plain dict.

    `dim` columns, `rows` by id, in the dtype of training.
    """

    name: str
    dim: int
    rows: dict[int, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    pooling: str = ""

    def with_random(self, ids, seed: int = 0) -> Plain:
        generator = torch.Generator().manual_seed(seed)
        new = {int(i): torch.randn(self.dim, generator=generator).to(self.dtype) for i in ids}
        return replace(self, rows={**self.rows, **new})

    def without(self, ids) -> Plain:
        gone = {int(i) for i in ids}
        return replace(self, rows={i: row for i, row in self.rows.items() if i not in gone})

    def tensors(self, ids=None) -> dict[str, Tensor]:
        """Returns the saved tensors of some ids (None: all ids) in canonical order."""
        own = torch.tensor(sorted(self.rows if ids is None else ids), dtype=torch.int64)
        own = own[canonical_order(own)]
        saved = {"config": self.config()}
        if len(own):
            saved["ids"] = own
            saved["weight"] = torch.stack([self.rows[int(i)] for i in own])
        return saved

    def config(self) -> Tensor:
        config = {
            "embedding_dim": self.dim,
            "format": 2,
            "initializer": UNIFORM,
            "rows": str(self.dtype).removeprefix("torch."),
            "seed": self.seed,
            "table": self.name,
        }
        if self.pooling:
            config["pooling"] = self.pooling
        return config_bytes(config)

    def sums(self) -> Tensor:
        """Returns the content sums of the whole table, as a delta has them."""
        saved = self.tensors()
        return as_words(sums_of(saved, saved.get("ids"), self.name))

    def summed(self, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns saved tensors with their checksum."""
        return with_checksum(saved, saved.get("ids"), self.name)

    def named(self, saved: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
        """Returns saved tensors by their keys in the state dict of a collection `ebc`."""
        return {f"ebc.{kind}.{self.name}.{name}": one for name, one in saved.items()}


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Saves a flat state dict without a process group; returns the path."""
    save_dict(tensors, path)
    return path


def save(path: Path, *tables: Plain, kind: str = "embedding_bags") -> Path:
    """Saves whole tables as an unsharded collection `ebc` does; returns the path."""
    found = {}
    for table in tables:
        found |= table.named(table.summed(table.tensors()), kind)
    return save_tensors(path, found)


def save_delta(
    path: Path, before: list[Plain], after: list[Plain], kind: str = "embedding_bags", **changed
) -> Path:
    """Saves the delta between two states of the same tables; `changed` replaces saved tensors."""
    found = {}
    for old, new in zip(before, after, strict=True):
        touched = [
            i for i, row in new.rows.items()
            if i not in old.rows or not torch.equal(old.rows[i], row)
        ]  # fmt: skip
        removed = torch.tensor([i for i in old.rows if i not in new.rows], dtype=torch.int64)
        saved = new.summed(new.tensors(touched))
        saved["base"], saved["result"] = old.sums(), new.sums()
        if len(removed):
            saved["removed"] = removed[canonical_order(removed)]
        saved |= changed
        found |= new.named(saved, kind)
    return save_tensors(path, found)


def bag_configs(*tables: Plain, features=None, pooling=None) -> list[EmbeddingBagConfig]:
    """Returns one config per table; `features` and `pooling` by table name, by default "f_<name>" and SUM."""
    return [
        EmbeddingBagConfig(
            name=one.name,
            embedding_dim=one.dim,
            num_embeddings=1 << 20,
            feature_names=(features or {}).get(one.name, [f"f_{one.name}"]),
            pooling=(pooling or {}).get(one.name, PoolingType.SUM),
        )
        for one in tables
    ]


def sequence_configs(*tables: Plain, features=None) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=one.name,
            embedding_dim=one.dim,
            num_embeddings=1 << 20,
            feature_names=(features or {}).get(one.name, [f"f_{one.name}"]),
        )
        for one in tables
    ]


def batch(keys: list[str], ids: list[int], size: int, seed: int, weighted=False, most=5):
    """Returns a KeyedJaggedTensor of `size` bags per feature with up to `most` of these ids each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(keys) * size,), generator=generator)
    pool = torch.tensor(ids, dtype=torch.int64)
    values = pool[torch.randint(len(pool), (int(lengths.sum()),), generator=generator)]
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights)


def decode(form: RowFormat, written: Tensor) -> Tensor:
    """Returns served rows as a reader has them, [M, D] float32, of written [M, row_bytes] uint8."""
    if not form.is_nbit:
        return written.contiguous().view(form.dtype).float()
    head, steps = written.tensor_split([SCALE_AND_BIAS_BYTES], dim=1)
    scale, bias = head.contiguous().view(torch.float16).float().split(1, dim=1)
    if form.dtype == INT4:
        steps = torch.stack([steps & 15, steps >> 4], dim=2).flatten(1)
    return steps.float() * scale + bias
