"""Read-only collections on the CPU, from a checkpoint and the deltas after it.

The calls in their order::

    serving.build("checkpoint/1000", "served", rows=torch.int8)
    ebc = serving.ServingEmbeddingBagCollection("served", tables)     # maps the files: starts at once
    pooled = ebc(features)
    serving.apply_delta("served", "deltas/1100")                      # in this process or another
    ebc.refresh()                                                     # serves the delta from now on

Processes that serve the same directory share its pages. Where the file system gives pages of 2 MiB (ext4 of
Linux 6.16, a tmpfs mounted with huge=always), large requests are a quarter to a third faster.

Imports `modules`, `checkpoint_format`, `storage` and the ground; needs no table of a training model. Start
with `modules`; `manifest` describes the directory, and `follower` keeps it at the newest checkpoint.
"""

from torchrec_dyn.serving.builder import apply_delta, build, build_again
from torchrec_dyn.serving.export import compile_program, export_program
from torchrec_dyn.serving.files import SecondWriter
from torchrec_dyn.serving.follower import Followed, Follower, ForkedChain, follow
from torchrec_dyn.serving.generation import verify
from torchrec_dyn.serving.modules import ServingEmbeddingBagCollection, ServingEmbeddingCollection
from torchrec_dyn.serving.row_format import ROW_DTYPES

__all__ = [
    "Followed",
    "Follower",
    "ForkedChain",
    "SecondWriter",
    "ServingEmbeddingBagCollection",
    "ServingEmbeddingCollection",
    "apply_delta",
    "build",
    "build_again",
    "compile_program",
    "export_program",
    "follow",
    "verify",
]
