"""Four shims that let TorchRec's CUDA-only pipelines run on the CPU, for tests only.

They replace code whose only purpose is to order work between CUDA streams; on the CPU everything runs in
program order. No shim changes a dynamic collection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.train_pipeline import runtime_forwards, train_pipelines

from torchrec_dyn.distributed.sharded_collections import SequenceContext

# The objects that pipelines pass from stream to stream: batches, outputs and contexts.
HANDED_ON = [KeyedJaggedTensor, KeyedTensor, EmbeddingBagCollectionContext,
             EmbeddingCollectionContext, SequenceContext]  # fmt: skip


def _record_nothing(self: Any, stream: Any) -> None:
    """Does nothing: CPU tensors have no streams."""


def _prefetch_in_order(
    context: Any, pipelined_modules: Any, device: Any, stream_context: Any, *streams: Any
) -> None:
    """Runs TorchRec's prefetch_embeddings without streams; TorchRec prefetches nothing without a stream."""
    for module in pipelined_modules:
        name = module.forward.name
        arrived = context.input_dist_tensors_requests.pop(name).wait()
        module_context = context.module_contexts.pop(name)
        module.prefetch(ctx=module_context, dist_input=arrived, forward_stream=None)
        context.module_input_post_prefetch[name] = arrived
        context.module_contexts_post_prefetch[name] = module_context


@contextmanager
def cuda_stream_shims() -> Iterator[None]:
    make_forward = runtime_forwards.BaseForward.__init__

    def make_forward_on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        make_forward(self, *args, **kwargs)
        if self._stream is None:
            self._device = torch.device("cpu")  # TorchRec takes no stream for a CUDA device

    patches = [mock.patch.object(kind, "record_stream", _record_nothing) for kind in HANDED_ON]
    patches += [
        mock.patch.object(runtime_forwards.BaseForward, "__init__", make_forward_on_cpu),
        mock.patch.object(train_pipelines, "prefetch_embeddings", _prefetch_in_order),
        # TorchRec 1.9 asks the stream for its device, which torch's stream of the CPU does not know.
        mock.patch.object(torch.cpu.Stream, "device", torch.device("cpu"), create=True),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
