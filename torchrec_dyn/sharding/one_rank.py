"""The dists of a world of one rank: ids and outputs stay where they are.

TorchRec's dists would hand them to themselves, by exchanges of a rank with itself. What the stages return are
still awaitables: pipelines wait for them at their own times, and join the exchanges of several collections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_Value = TypeVar("_Value")


class Here(NoWait[_Value]):
    """An awaitable of a value that is here already."""

    def wait(self) -> _Value:
        """Returns the value after the callbacks, without TorchRec's entry in a profile."""
        value = self._obj
        for callback in self._callbacks:
            value = callback(value)
        return value


class ArrivedIds(KJTListSplitsAwaitable[Any]):
    """The ids of each sharding type, as if they had been sent. Pipelines take its `awaitables`."""

    def __init__(self, parts: Sequence[KeyedJaggedTensor], ctx: Any) -> None:
        super().__init__([Here(Here(part)) for part in parts], ctx)
        self._parts = list(parts)

    def _wait_impl(self) -> Any:
        return Here(KJTList(self._parts))


class StayingOutput(nn.Module):
    """The output dist of one rank; `stitch` puts pooled column shards in order, [B, D] to [B, D]."""

    def __init__(self, stitch: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._stitch = list(stitch)

    def forward(
        self, output: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Here[Tensor]:
        """Returns the output; TorchRec stitches that of a batch with a size per feature."""
        if sharding_ctx is None or not sharding_ctx.variable_batch_per_feature:
            for callback in self._stitch:
                output = callback(output)
        return Here(output)


def staying(output_dist: Any) -> StayingOutput:
    """Returns the output dist of one rank in place of TorchRec's, which knows the order of columns."""
    return StayingOutput(getattr(output_dist, "_callbacks", None) or [])
