"""The port that README shows, as it is written there: it trains more ids than the old modulus."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import workers
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.models.dlrm import DLRM

import torchrec_dyn as dyn

README = Path(__file__).resolve().parents[2] / "README.md"
NAMES = ["user", "item"]
OF_DLRM = (
    "dense_in_features=4, dense_arch_layer_sizes=[8, 64], over_arch_layer_sizes=[8, 1], "
    "dense_device=device"
)


def make_tables(num_embeddings: int) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(num_embeddings, 64, name, feature_names=[name]) for name in NAMES]


def port() -> str:
    [diff] = re.findall(r"^```diff\n(.*?)^```$", README.read_text(), re.M | re.S)
    return diff


def old_modulus() -> int:
    return int(re.search(r"^-num_embeddings = ([\d_]+)", port(), re.M)[1])


def train_the_port() -> tuple[list[int], float]:
    """Returns the rows of each table after two steps, and the largest number of an initial row."""
    # Two tables of 50,000,000 rows of 64 float32 do not fit.
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu", ddr_cap=8 * 1024**3)
    raw_ids = torch.arange(old_modulus() + 5) * 7919 - 2**62
    names = {
        **{"torch": torch, "DLRM": DLRM, "EmbeddingBagCollection": EmbeddingBagCollection},
        **{"DistributedModelParallel": DistributedModelParallel, "make_tables": make_tables},
        **{"topology": topology, "batch_size": 8, "group": dist.group.WORLD},
        **{"device": torch.device("cpu"), "raw_ids": raw_ids},
    }
    lines = [line[1:] for line in port().splitlines() if line[0] != "-"]
    exec("\n".join(lines).replace("...", OF_DLRM), names)
    unsharded = torch.nn.Sequential(dyn.DynamicEmbeddingBagCollection(names["tables"]))
    with pytest.raises(PlannerError):  # which is why README has make_planner
        EmbeddingShardingPlanner(topology, 8).plan(unsharded, names["sharders"])
    model, ids = names["model"], names["ids"]
    lengths = torch.tensor([ids.numel() - 7, *[1] * 7, *[1] * 8])
    for first in (ids, ids + 1):
        batch = KeyedJaggedTensor(NAMES, torch.cat([first, first[:8]]), lengths=lengths)
        model(torch.ones(8, 4), batch).mean().backward()
    sparse = model.module.sparse_arch.embedding_bag_collection
    rows, _ = dyn.lookup_rows(sparse, "user", ids[:100])
    return [dyn.read_num_rows(sparse, name) for name in NAMES], float(rows.abs().max())


def test_the_port_trains_more_ids_than_the_modulus() -> None:
    for rows, largest in workers.run(train_the_port, world_size=2):
        assert rows == [2 * (old_modulus() + 5), 16] and 0.009 < largest < 0.02
