"""A sequence model like BERT4Rec: predicts masked items from the items before and after them.

    torchrun --standalone --nproc-per-node 2 examples/ports/sequences.py

A port of TorchRec's examples/bert4rec. Items are raw 64-bit ids, and new ones keep arriving, so there is no
softmax over a vocabulary: the masked item is predicted among the items of the batch.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn

LENGTH, DIM = 12, 32
MASK = -1  # any int64 is an id, so the mask is an id too; it has a trained row like an item


class SequenceModel(nn.Module):
    """A transformer encoder over rows of a dynamic table."""

    def __init__(self) -> None:
        super().__init__()
        item = EmbeddingConfig(
            name="item",
            embedding_dim=DIM,
            num_embeddings=10_000_000,
            feature_names=["history", "target"],
        )
        self.ec = dyn.DynamicEmbeddingCollection(
            [item], dynamic=dyn.DynamicTableConfig(initializer=dyn.Normal(0.0, 0.1))
        )
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        layer = nn.TransformerEncoderLayer(
            DIM, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Returns the encoded histories, [B, LENGTH, DIM], and the rows of the targets, [B, DIM]."""
        rows = self.ec(features)
        histories = rows["history"].values().view(-1, LENGTH, DIM)
        return self.encoder(histories + self.position), rows["target"].values()


def draw_histories(step: int, size: int, draw: torch.Generator) -> Tensor:
    """Returns [size, LENGTH] raw ids: series with a constant step, through items whose number grows."""
    start = torch.randint(200 + step, (size, 1), generator=draw)
    stride = torch.randint(1, 4, (size, 1), generator=draw)
    return dyn.mixed_ids(start + stride * torch.arange(LENGTH))


def mask_one(histories: Tensor, draw: torch.Generator) -> tuple[KeyedJaggedTensor, Tensor]:
    """Masks one item of each history. Returns the features and the place of each mask, [B]."""
    size = len(histories)
    places = torch.randint(LENGTH, (size,), generator=draw)
    targets = histories[torch.arange(size), places]
    masked = histories.clone()
    masked[torch.arange(size), places] = MASK
    features = KeyedJaggedTensor(
        ["history", "target"],
        torch.cat([masked.flatten(), targets]),
        lengths=torch.tensor([LENGTH] * size + [1] * size),
    )
    return features, places


def step_of(
    model: nn.Module, step: int, draw: torch.Generator, size: int = 128
) -> tuple[Tensor, float]:
    """Returns the loss of a batch, and the part of masks whose item has the highest score."""
    features, places = mask_one(draw_histories(step, size, draw), draw)
    encoded, targets = model(features)
    scores = encoded[torch.arange(size), places] @ targets.T
    ids = features["target"].values()
    same = (ids[None] == ids[:, None]) & ~torch.eye(size, dtype=torch.bool)
    scores = scores.masked_fill(same, -1e9)  # the same item again is no negative
    right = (scores.argmax(1) == torch.arange(size)).float().mean()
    return nn.functional.cross_entropy(scores, torch.arange(size)), float(right)


def train(model: DistributedModelParallel, steps: int, draw: torch.Generator) -> list[float]:
    """Trains for some steps; returns for each the part of masked items that were found."""
    encoder = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.Adam(encoder.values(), lr=0.003)
    results = []
    for step in range(steps):
        loss, right = step_of(model, step, draw)
        dense.zero_grad()
        loss.backward()  # also updates the rows
        dense.step()
        results.append(right)
    return results


def main() -> None:
    """Runs the example on one rank of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same encoder on every rank
    draw = torch.Generator().manual_seed(dist.get_rank())
    learning = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    model = DistributedModelParallel(
        SequenceModel(), device=torch.device("cpu"), sharders=dyn.default_sharders(learning)
    )
    results = train(model, steps, draw)
    model.eval()
    with torch.no_grad():
        _, right = step_of(model, steps, draw)
    rows = dyn.read_num_rows(model.module.get_submodule("ec"), "item")
    if dist.get_rank() == 0:
        print(f"right of 128 at first {results[0]:.2f}, in evaluation {right:.2f}; items {rows}")
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
