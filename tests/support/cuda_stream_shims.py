"""Three shims that let TorchRec's CUDA-only pipelines run on the CPU, for tests alone.

They replace what only orders work between CUDA streams; on the CPU everything runs in program
order. No shim touches a collection of ours.
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

from torchrec_dyn.distributed.embedding_collection import SequenceContext

# What the pipelines hand from stream to stream: batches, outputs and contexts.
HANDED_ON = [KeyedJaggedTensor, KeyedTensor, EmbeddingBagCollectionContext,
             EmbeddingCollectionContext, SequenceContext]  # fmt: skip


def _record_nothing(self: Any, stream: Any) -> None:
    """CPU tensors know no streams."""


def _prefetch_in_order(
    context: Any, pipelined_modules: Any, device: Any, stream_context: Any, *streams: Any
) -> None:
    """TorchRec's prefetch_embeddings less its streams; without one TorchRec prefetches nothing."""
    for module in pipelined_modules:
        name = module.forward.name
        arrived = context.input_dist_tensors_requests.pop(name).wait()
        module_context = context.module_contexts.pop(name)
        module.prefetch(ctx=module_context, dist_input=arrived, forward_stream=None)
        context.module_input_post_prefetch[name] = arrived
        context.module_contexts_post_prefetch[name] = module_context


@contextmanager
def cuda_stream_shims() -> Iterator[None]:
    """Puts the shims in place for as long as the pipelines run."""
    make_forward = runtime_forwards.BaseForward.__init__

    def make_forward_on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        make_forward(self, *args, **kwargs)
        if self._stream is None:
            self._device = torch.device("cpu")  # TorchRec takes no stream for a CUDA device

    patches = [mock.patch.object(kind, "record_stream", _record_nothing) for kind in HANDED_ON]
    patches += [
        mock.patch.object(runtime_forwards.BaseForward, "__init__", make_forward_on_cpu),
        mock.patch.object(train_pipelines, "prefetch_embeddings", _prefetch_in_order),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
