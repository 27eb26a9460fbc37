"""Trains online, saves full checkpoints and deltas, goes on after a crash, and serves what was saved.

.venv/bin/torchrun --nproc-per-node 2 examples/online.py FOLDER    # kill it, and start it again

A URL after the folder is where the checkpoints go instead, such as s3://bucket/run.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints, Positions

FOLDER, BATCHES = sys.argv[1], 40
CHECKPOINTS = sys.argv[2] if len(sys.argv) > 2 else f"{FOLDER}/checkpoints"
USERS = EmbeddingBagConfig(
    name="user", embedding_dim=8, num_embeddings=10**6, feature_names=["user"]
)
dist.init_process_group("gloo")
torch.manual_seed(0)  # the same batches on all ranks, of which each takes its part
ids = [torch.randint(100 * (number + 1), (1024,)) for number in range(BATCHES)]
ids = [one[dist.get_rank() :: dist.get_world_size()] for one in ids]
source = [KeyedJaggedTensor(["user"], one, lengths=torch.ones_like(one)) for one in ids]


class Model(torch.nn.Module):  # noqa: D101
    def __init__(self):
        super().__init__()
        self.sparse = dyn.DynamicEmbeddingBagCollection([USERS], fused_params={"optimizer": "ADAM"})

    def forward(self, batch):  # noqa: D102
        rows = self.sparse(batch).values()
        return (rows - 1).square().mean(), rows


sharders, device = [dyn.DynamicEmbeddingBagCollectionSharder()], torch.device("cpu")
model = DistributedModelParallel(Model(), sharders=sharders, device=device)
optimizer, positions = model.fused_optimizer, Positions(source, is_global=True)
checkpoints = Checkpoints(CHECKPOINTS, full_every=4)
checkpoints.restore(model, optimizer, extra={"position": positions})
# In production a process of its own, whose errors do not end the training: python -m torchrec_dyn follow
is_first = dist.get_rank() == 0
follower = serving.Follower(checkpoints.path, f"{FOLDER}/served") if is_first else None
pipeline, batches = TrainPipelineSparseDist(model, optimizer, device), iter(positions)
while positions.batches < BATCHES:
    pipeline.progress(batches)
    positions.step()
    if positions.batches % 10 == 0:
        extra = {"position": positions}
        checkpoints.save(model, optimizer, step=positions.batches, extra=extra)
        if follower and (followed := follower.poll()):
            name = f"{followed.entry.kind}-{followed.entry.sequence:08}"
            print(f"batch {positions.batches}: {name} is served", flush=True)
checkpoints.close()
del model, optimizer, pipeline, batches, checkpoints
gc.collect()  # a pipeline leaves reference cycles, which hold the process group
dist.destroy_process_group()
