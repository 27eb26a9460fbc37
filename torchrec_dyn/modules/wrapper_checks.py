"""Errors that an ordinary module would not need: wrappers, TorchRec's sharders and inference, checkpointing.

These mistakes would train or save wrong rows in silence: several ranks use an unsharded collection as one
model, TorchRec's sharder turns dynamic tables into static ones, two collections of a model have tables of one
name, or torch gathers a state dict from the rows of one rank. TorchRec's functions for inference would skip
the tables. Nothing but the caller tells these calls from
harmless ones, so `_running` looks for the caller on the stack (docs/dev/decisions/0025). A lookup in a
checkpointed function would count two steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _autograd
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard_modules

from torchrec_dyn.name_lists import listed

_WHAT_TO_DO = (
    "Pass sharders=torchrec_dyn.default_sharders() to DistributedModelParallel, and the same sharders to "
    "the planner if you call it"
)


def check_not_wrapped(where: str) -> None:
    """Raises ValueError in a forward of a DDP or DMP of several ranks: no sharder got the collection."""
    wrapper = _running("self", DistributedDataParallel.forward, DistributedModelParallel.forward)
    if isinstance(wrapper, DistributedDataParallel):
        _check_one_rank(where, "DistributedDataParallel", wrapper.process_group.size())
    elif wrapper is not None:
        check_is_no_dmp(where, wrapper)


def check_is_no_dmp(where: str, model: nn.Module) -> None:
    """Raises ValueError if a model with unsharded tables is a DMP of several ranks."""
    if isinstance(model, DistributedModelParallel) and model._env.process_group is not None:
        _check_one_rank(where, "DistributedModelParallel", model._env.process_group.size())


def skip_in_ddp(where: str, name: str, placeholder: nn.Parameter) -> None:
    """Makes the DDP that is being built, if any, skip a placeholder; ValueError if it has several ranks."""
    ddp = _running("self", DistributedDataParallel.__init__)
    if ddp is None:
        return
    _check_one_rank(where, "DistributedDataParallel", ddp.process_group.size())
    # With a mesh DDP traverses the model once before it makes the set.
    if hasattr(ddp, "parameters_to_ignore"):
        ddp.parameters_to_ignore.add(name)
    placeholder._ddp_ignored = True  # type: ignore[attr-defined]  # read in mixed precision


def skipped_by_fully_shard(kind: type[nn.Module]) -> type[nn.Module]:
    """Makes `fully_shard` skip a class, as modules with "replicate"; on several ranks it is a ValueError."""

    def registry(self: Any) -> dict[str, None] | None:
        mesh = _running("mesh", fully_shard)
        if mesh is None:
            return None
        _check_one_rank(self.where, "fully_shard", mesh.size())
        return {"replicate": None}

    setattr(kind, REGISTRY_KEY, property(registry))
    return kind


def check_not_made_static(where: str, collection: nn.Module) -> None:
    """Raises ValueError while TorchRec builds a static sharded collection from an unsharded one."""
    static = ShardedEmbeddingBagCollection.__init__, ShardedEmbeddingCollection.__init__
    if _running("module", *static) is collection:
        raise ValueError(
            f"{where}: expected a sharder of torchrec_dyn, got TorchRec's, which makes static tables. "
            f"{_WHAT_TO_DO}. A managed-collision module cannot contain dynamic tables."
        )


def model_being_sharded() -> nn.Module | None:
    """Returns the DMP, or the model of `shard_modules`, around a collection; None: it is sharded alone."""
    dmp: nn.Module | None = _running("self", DistributedModelParallel.__init__)
    return _running("module", shard_modules) if dmp is None else dmp


def check_not_gathered(where: str) -> None:
    """Raises ValueError if torch makes a state dict of a sharded collection with `full_state_dict=True`."""
    options = _running("info", dcp_state_dict._get_model_state_dict)
    if options is not None and options.full_state_dict:
        raise ValueError(
            f"{where}.state_dict: expected full_state_dict=False, got True: the rows stay on their ranks. "
            "Save with torch.distributed.checkpoint (DCP), then load into a model without sharding."
        )


def refuses_quantization(kind: type[nn.Module]) -> type[nn.Module]:
    """Makes modules of a class raise where TorchRec quantizes a model: torch sets their `qconfig` then."""

    def read(self: nn.Module) -> Any:
        try:
            return vars(self)["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    def write(self: nn.Module, value: Any) -> None:
        check_not_for_inference(self)
        vars(self)["qconfig"] = value

    def remove(self: nn.Module) -> None:
        del vars(self)["qconfig"]

    kind.qconfig = property(read, write, remove)  # type: ignore[attr-defined]
    return kind


def check_not_for_inference(module: nn.Module) -> None:
    """Raises ValueError in a call of torchrec.inference that would leave dynamic tables as they are."""
    calls = sys.modules.get("torchrec.inference.modules")  # training does not import it
    if calls is None:
        return
    skip = calls.quantize_embeddings, calls.quantize_inference_model, calls.shard_quant_model
    if (frame := _call_of(*skip)) is not None:
        where = getattr(module, "where", type(module).__name__)
        raise ValueError(
            f"{where}: expected no dynamic tables in {frame.f_code.co_name}, got one, which it would leave "
            "as it is. Build served tables from a checkpoint, torchrec_dyn.serving.build(..., "
            "rows=torch.int8), and put a ServingEmbeddingBagCollection or ServingEmbeddingCollection of "
            "torchrec_dyn.serving in the place of the collection."
        )


def check_runs_once(where: str, trained: Callable[[], Sequence[str]]) -> None:
    """Raises ValueError if a lookup of `trained()` tables is in a function that backward will run again."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    runs_again = hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__
    # Re-entrant checkpointing runs it in an autograd function, which takes forward-mode gradients away, too.
    runs_again = runs_again or not (
        torch.is_grad_enabled()
        or torch._C._is_fwd_grad_enabled()
        or torch.is_inference_mode_enabled()
    )
    if runs_again and (names := trained()):
        raise ValueError(
            f"{where}: expected a lookup of trained tables {listed(names)} outside of "
            "torch.utils.checkpoint, got one inside, which backward would run again: it would count two "
            "steps. Call the collection before the checkpointed function, and pass it the output."
        )


def _running(name: str, *functions: Callable[..., Any]) -> Any:
    """Returns a local variable of the innermost running call of some functions; None if none is running."""
    # Without a process group nothing is wrapped or sharded.
    frame = _call_of(*functions) if dist.is_initialized() else None
    return None if frame is None else frame.f_locals.get(name)


def _call_of(*functions: Callable[..., Any]) -> FrameType | None:
    """Returns the frame of the innermost running call of some functions; None if none is running."""
    if torch.compiler.is_compiling():  # a compiler cannot trace frames
        return None
    codes = {id(inspect.unwrap(function).__code__) for function in functions}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in codes:
        frame = frame.f_back
    return frame


def _check_one_rank(where: str, wrapper: str, world_size: int) -> None:
    if world_size > 1:
        raise ValueError(
            f"{where}: expected a sharded collection under {wrapper} on {world_size} ranks, got an "
            f"unsharded one: each rank would have rows of its own, not synchronized. {_WHAT_TO_DO}."
        )
