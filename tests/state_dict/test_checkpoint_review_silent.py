"""Two loads that went through in silence: found by a review of the checkpoint core."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import held, put, save, state_dict_of, tables_of
from checkpoint_small import case, on_one, read, sharded, step, unsharded
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan


class Beside(nn.Module):
    """A collection that nobody shards, beside a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = unsharded(case())
        self.dense = nn.Linear(2, 2)


def repeated_ids(path: str) -> str:
    module = Beside()
    collection = module.collection
    step(collection, [1, 2])
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({}), sharders=[]
    )
    state: dict[str, Any] = dict(model.state_dict())
    prefix = "collection.embedding_bags.t."
    del state[f"{prefix}checksum"], state[f"{prefix}config"]
    state |= {f"{prefix}weight": torch.ones(2, 8), f"{prefix}ids": torch.tensor([7, 7])}
    try:
        model.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return f"loaded, got {collection.table('t').ids().tolist()}"


def test_an_unsharded_collection_in_a_sharded_model_reports_what_is_wrong(tmp_path: Path) -> None:
    assert "repeated" in on_one(repeated_ids, tmp_path)


def without_checksums(path: str) -> str:
    trained, model = sharded(case()), sharded(case())
    step(trained, [1, 2, 3])
    save(trained, path)
    file = Path(path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for key in [one for one in metadata.state_dict_metadata if one.endswith("checksum")]:
        del metadata.state_dict_metadata[key]
    file.write_bytes(pickle.dumps(metadata))
    try:
        put(model, read(state_dict_of(model), path))
    except BaseException as error:  # DCP's is no Exception
        return str(error)
    return f"loaded {len(held(model))} tensors, {tables_of(model)[0].num_rows} rows unverified"


def test_a_checkpoint_that_lost_its_checksum(tmp_path: Path) -> None:
    assert "checksum" in on_one(without_checksums, tmp_path)
