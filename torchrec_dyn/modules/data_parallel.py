"""Support of DistributedDataParallel around a model that holds unsharded dynamic collections.

DDP would broadcast and bucket the placeholder parameters, which have no storage. It skips parameters listed
in `_ddp_params_and_buffers_to_ignore`, but it reads this list from the outermost module only, which is the
user's. So DDP's constructor is wrapped, once, to add the names of the placeholders to that list. Models
without dynamic tables are not affected.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_dyn.modules.unsharded_table import UnshardedTable


def teach_ddp_to_skip_placeholders() -> None:
    """Wraps DDP's constructor; a second call does nothing."""
    constructor: Any = DistributedDataParallel.__init__
    if hasattr(constructor, "skips_placeholders"):
        return

    @functools.wraps(constructor)
    def skipping(
        self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        _skip_placeholders(module)
        constructor(self, module, *args, **kwargs)

    skipping.skips_placeholders = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = skipping  # type: ignore[method-assign]


def _skip_placeholders(module: nn.Module) -> None:
    placeholders = [
        f"{path}.weight" if path else "weight"
        for path, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, UnshardedTable)
    ]
    if not placeholders:
        return
    ignored: Any = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, {*ignored, *placeholders}
    )
    if dist.get_world_size() > 1:
        warnings.warn(
            f"DistributedDataParallel: expected sharded dynamic tables, got {len(placeholders)} "
            "unsharded tables, "
            f"first '{placeholders[0]}'. Each rank trains its own rows, and these are not "
            "synchronised. "
            "Shard the collection with DistributedModelParallel.",
            UserWarning,
            stacklevel=3,
        )
