"""Two-tower retrieval: trains on pairs of user and item, then searches an index of all items with a row.

    torchrun --standalone --nproc-per-node 2 examples/ports/two_tower.py

A port of TorchRec's examples/retrieval. Users and items are raw 64-bit ids, and new ones keep arriving. The
index is made from the ids of the table: no list of items is kept beside the model.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_dyn as dyn

TASTES = 20  # a user likes the items of one taste
DIM = 16


class TwoTower(nn.Module):
    """Scores of all pairs of a batch: user tower times item tower."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=10_000_000, feature_names=[name]
            )
            for name in ("user", "item")
        ]
        self.ebc = dyn.DynamicEmbeddingBagCollection(tables)
        self.towers = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("user", "item")})

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Returns the normalised output of both towers, each [B, DIM]."""
        rows = self.ebc(features)
        return {
            name: nn.functional.normalize(tower(rows[name]), dim=1)
            for name, tower in self.towers.items()
        }


def pair_batch(users: Tensor, items: Tensor) -> KeyedJaggedTensor:
    """Returns one user and one item a sample; either may be empty."""
    both = torch.cat([users, items])
    size = max(users.numel(), items.numel())
    lengths = [torch.full((size,), int(ids.numel() > 0)) for ids in (users, items)]
    return KeyedJaggedTensor(["user", "item"], both, lengths=torch.cat(lengths))


def draw_clicks(step: int, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns raw ids of users and of items they clicked on; the numbers in use grow by the step."""
    users = torch.randint(1_000 + 5 * step, (size,), generator=draw)
    items = torch.randint(50 + step // 4, (size,), generator=draw) * TASTES + users % TASTES
    return raw("user", users), raw("item", items)


def raw(kind: str, numbers: Tensor) -> Tensor:
    """Returns ids spread over 64 bits, as hashes of names are."""
    return dyn.mixed_ids(numbers + {"user": 0, "item": 2**40}[kind])


def train(model: nn.Module, steps: int, draw: torch.Generator) -> list[float]:
    """Trains by softmax over the items of the batch, and returns the losses."""
    towers = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense, losses = torch.optim.Adam(towers.values(), lr=0.01), []
    for step in range(steps):
        users, items = draw_clicks(step, 256, draw)
        out = model(pair_batch(users, items))
        scores = 10 * out["user"] @ out["item"].T
        scores = scores.masked_fill(
            (items[None] == items[:, None]) & ~torch.eye(256, dtype=torch.bool), -1e9
        )  # the same item again is no negative
        loss = nn.functional.cross_entropy(scores, torch.arange(256))
        dense.zero_grad()
        loss.backward()  # also updates the rows
        dense.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def make_index(model: DistributedModelParallel) -> tuple[Tensor, Tensor]:
    """Returns the ids of all items, [R], and the item tower's output, [R, DIM]. Collective.

    Each rank computes a part of the items.
    """
    ids = dyn.read_ids(model.module.get_submodule("ebc"), "item")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = ids.tensor_split(world_size)[rank]
    vectors = model(pair_batch(mine[:0], mine))["item"]
    parts: list[Tensor] = [torch.empty(0)] * world_size
    dist.all_gather_object(parts, vectors)
    return ids, torch.cat(parts)


@torch.no_grad()
def hits_at_ten(model: DistributedModelParallel, draw: torch.Generator) -> float:
    """Returns the part of ten retrieved items that have the user's taste. Collective."""
    ids, index = make_index(model)
    numbers = torch.randint(1_000, (200,), generator=draw)
    queries = model(pair_batch(raw("user", numbers), numbers[:0]))["user"]
    found = ids[(queries @ index.T).topk(10).indices]
    tastes = torch.cat([raw("item", torch.arange(2**16))]).sort()
    of_item = tastes.indices[torch.searchsorted(tastes.values, found)] % TASTES
    return float((of_item == (numbers % TASTES)[:, None]).float().mean())


def main() -> None:
    """Runs the example on one rank of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same towers on every rank
    draw = torch.Generator().manual_seed(dist.get_rank())
    learning = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    model = DistributedModelParallel(
        TwoTower(), device=torch.device("cpu"), sharders=dyn.default_sharders(learning)
    )
    losses = train(model, steps, draw)
    model.eval()
    hits = hits_at_ten(model, draw)
    rows = dyn.read_num_rows(model.module.get_submodule("ebc"), "item")
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; items {rows}; of ten found {hits:.2f} fit"
        )
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
