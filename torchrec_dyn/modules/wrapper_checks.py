"""Checks that nothing around an unsharded collection takes it for an ordinary module.

On several ranks, DistributedModelParallel without a sharder, DistributedDataParallel and `fully_shard` would
let each rank train rows of its own. TorchRec's sharders, which reach a collection inside TorchRec's own
modules, would make static tables of it. These are errors. On one rank the wrappers work. A call that
would take the rows of one rank of a sharded collection for all rows is an error, too.

No wrapper has a hook for modules inside the model. So the members that their constructors read look up the
call stack; every other caller gets what it gets from any module (docs/decisions/0025). Of a collection in its
plan without a sharder DistributedModelParallel reads nothing but the hash of the type. A sharder gets the
collection and its path, and finds the model in the same way. A collection that a model gets after the
constructor is found in its training forwards, and in its state dict, below those of
DistributedModelParallel.

Some tools know parameters and their gradients only. `AveragedModel` and `share_memory` would leave
the rows behind; `GradScaler` multiplies gradients that backward applies at once. TorchRec's
GradientClippingOptimizer clips nothing if some parameters are on the meta device. TorchRec's feature
processors replace the weights of a batch, by which LowestScore scores ids. Its sharders of towers know its
own collections only. These are errors, too.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import code_of
from torchrec_dyn.name_lists import listed

_DDP = code_of(DistributedDataParallel.__init__)
_DMP = code_of(DistributedModelParallel.__init__)
_DMP_CALLS = (
    code_of(DistributedModelParallel.__init__),
    code_of(DistributedModelParallel.forward),
    code_of(DistributedModelParallel.state_dict),
)
_DMP_SHARDS = code_of(DistributedModelParallel._shard_modules_impl)
_SHARD_MODULES = code_of(shard_modules)
_FULLY_SHARD = code_of(fully_shard)
_GET_MODEL_STATE_DICT = code_of(dcp_state_dict._get_model_state_dict)
_STATE_DICT_FUNCTIONS = code_of(dcp_state_dict._verify_options)
_AVERAGED = code_of(AveragedModel.__init__)
_SHARE_MEMORY = code_of(nn.Module.share_memory)
_REQUIRES_GRAD = code_of(nn.Module.requires_grad_)
_SCALED = code_of(GradScaler._maybe_opt_step)
_PROCESSED = code_of(FeatureProcessedEmbeddingBagCollection.__init__)
_CLIPPED = code_of(GradientClippingOptimizer.step)
_STATIC = (
    code_of(ShardedEmbeddingBagCollection.__init__),
    code_of(ShardedEmbeddingCollection.__init__),
)
_WHAT_TO_DO = (
    "Pass sharders=torchrec_dyn.default_sharders() to DistributedModelParallel, and the same sharders to "
    "the planner if you call it"
)


class FoundByType(ABCMeta):
    """Metaclass of the unsharded collections: DistributedModelParallel finds sharders in a dict by type.

    A collection in the plan without its sharder, as after a planner with other sharders, would be a KeyError.
    """

    def __hash__(cls) -> int:
        caller = sys._getframe().f_back
        if caller is not None and caller.f_code is _DMP_SHARDS:
            _check_sharder(cls, caller.f_locals)
        return super().__hash__()


def _check_sharder(kind: type, of_dmp: Any) -> None:
    """Checks that a DistributedModelParallel has a sharder for a type; `of_dmp`: its local variables.

    Raises:
        ValueError: if it has none.
    """
    kinds = list(of_dmp["self"]._sharder_map)
    if not any(known is kind for known in kinds):
        names = ", ".join(known.__name__ for known in kinds) or "nothing"
        raise ValueError(
            f"{of_dmp['module']._where()}: expected a sharder for the tables, which are in the plan of "
            f"DistributedModelParallel, got sharders of {names}. {_WHAT_TO_DO}."
        )


def check_not_in_dmp(where: str, tables: Iterable[str] | None = None) -> None:
    """Checks that no DistributedModelParallel of several ranks is built around the caller, or calls it.

    Calls are its constructor, its forward and its state dict. `tables` are named in the error.

    Raises:
        ValueError: if one does.
    """
    dmp = _local("self", *_DMP_CALLS)
    if dmp is not None:
        named = "" if tables is None else f"(tables={listed(list(tables))})"
        check_is_no_dmp(f"{where}{named}", dmp)


def check_is_no_dmp(where: str, model: nn.Module) -> None:
    """Checks that a model with unsharded tables is no DistributedModelParallel of several ranks.

    Raises:
        ValueError: if it is.
    """
    if isinstance(model, DistributedModelParallel) and model._env.process_group is not None:
        later = " A collection that a model gets later is not sharded."
        _check_one_rank(where, "DistributedModelParallel", model._env.process_group.size(), later)


def model_being_sharded() -> nn.Module | None:
    """Returns the model that is being sharded around the caller, None if a collection is sharded alone.

    The model is the DistributedModelParallel, or the module that `shard_modules` got.
    """
    dmp: nn.Module | None = _local("self", _DMP)
    return _local("module", _SHARD_MODULES) if dmp is None else dmp


def check_not_made_static(where: str, collection: nn.Module) -> None:
    """Checks that no static sharded collection of TorchRec's is being built of an unsharded collection.

    Raises:
        ValueError: if one is.
    """
    if _local("module", *_STATIC) is collection:
        raise ValueError(
            f"{where}: expected a sharder of torchrec_dyn, got TorchRec's, which makes static tables. "
            f"{_WHAT_TO_DO}. A managed-collision module cannot contain dynamic tables."
        )


def check_towers(model: nn.Module, sharders: Iterable[ModuleSharder[Any]]) -> None:
    """Checks that TorchRec's sharders of towers get no dynamic tables.

    Raises:
        ValueError: if they do.
    """
    kinds = {
        one.module_type: type(one).__name__
        for one in sharders
        if isinstance(one, (EmbeddingTowerSharder, EmbeddingTowerCollectionSharder))
    }
    for path, module in model.named_modules() if kinds else ():
        parts = module.modules() if type(module) in kinds else ()
        if any(isinstance(type(part), FoundByType) for part in parts):
            raise ValueError(
                f"{type(module).__name__}('{path}'): expected static tables under "
                f"{kinds[type(module)]}, got dynamic ones. Leave it out of the sharders: "
                "torchrec_dyn.default_sharders() shard the collection inside."
            )


def check_towers_of_dmp() -> None:
    """Checks the model of the DistributedModelParallel that is being built around the caller, if any.

    Rank 0 plans alone: the others would wait for it for ever.

    Raises:
        ValueError: as `check_towers`.
    """
    frame = _running(_DMP)
    if frame is not None:
        check_towers(frame.f_locals["module"], frame.f_locals["sharders"] or ())


def skip_in_ddp(where: str, name: str, placeholder: nn.Parameter) -> None:
    """Makes the DistributedDataParallel that is being built around the caller, if any, skip a placeholder.

    Raises:
        ValueError: if DistributedDataParallel has several ranks, or the model has nothing else to train.
    """
    ddp = _local("self", _DDP)
    if ddp is not None:
        _check_one_rank(where, "DistributedDataParallel", ddp.process_group.size())
        if not _has_dense_parameters(_local("module", _DDP)):
            raise ValueError(
                f"{where}: expected parameters to train beside an unsharded collection under "
                "DistributedDataParallel, which DistributedModelParallel puts around what no sharder shards, "
                f"got none. {_WHAT_TO_DO}."
            )
        # DDP compares this set with each name that the traversal yields, so the name is added in time. With a
        # mesh DDP traverses the model once before it makes the set.
        if hasattr(ddp, "parameters_to_ignore"):
            ddp.parameters_to_ignore.add(name)
        placeholder._ddp_ignored = True  # type: ignore[attr-defined]  # read in mixed precision


def _has_dense_parameters(module: nn.Module) -> bool:
    """Returns True if a parameter outside of unsharded collections requires a gradient."""
    # `named_modules` would ask the tables again.
    if isinstance(type(module), FoundByType):
        return False
    own = module._parameters.values()
    return any(one is not None and one.requires_grad for one in own) or any(
        map(_has_dense_parameters, module.children())
    )


def skipped_by_fully_shard(kind: type[nn.Module]) -> type[nn.Module]:
    """Makes `fully_shard` skip modules of a class on one rank; on several ranks it raises ValueError.

    `fully_shard` asks each module for its registry of composable APIs, and skips modules with "replicate".

    Returns:
        `kind`, for use as a decorator.
    """

    def registry(self: Any) -> dict[str, None] | None:
        mesh = _local("mesh", _FULLY_SHARD)
        if mesh is None:
            return None
        _check_one_rank(self.where, "fully_shard", mesh.size())
        return {"replicate": None}

    setattr(kind, REGISTRY_KEY, property(registry))
    return kind


def check_not_of_dmp(where: str) -> None:
    """Checks that no function of torch.distributed.checkpoint.state_dict got a DistributedModelParallel.

    Raises:
        ValueError: if one did. torch would look for its parameters by names that it does not have.
    """
    if isinstance(_local("model", _STATE_DICT_FUNCTIONS), DistributedModelParallel):
        raise ValueError(
            f"{where}: expected the module of a DistributedModelParallel in the functions of "
            "torch.distributed.checkpoint.state_dict, got the DistributedModelParallel itself, whose "
            "parameters have other names there. Pass dmp.module, or use dmp.state_dict()."
        )


def check_not_gathered(where: str) -> None:
    """Checks that the state dict of a sharded collection is not made for `full_state_dict=True`.

    torch would return a state dict with this rank's rows as if it were whole.

    Raises:
        ValueError: if it is.
    """
    info = _local("info", _GET_MODEL_STATE_DICT)
    if info is not None and info.full_state_dict:
        raise ValueError(
            f"{where}.state_dict: expected full_state_dict=False, got True: the rows stay on their ranks. "
            "Save with torch.distributed.checkpoint (DCP), then load into a model without sharding."
        )


def check_not_averaged(where: str) -> None:
    """Checks that the table is not copied for a model of averages.

    Raises:
        ValueError: if it is.
    """
    if _running(_AVERAGED) is not None:
        raise ValueError(
            f"{where}: expected a model without dynamic tables, got AveragedModel around one: it would copy "
            "the rows once and never average them. Average the dense part only, and evaluate it with the "
            "trained tables."
        )


def check_not_shared(where: str) -> None:
    """Checks that `share_memory` of a module is not called around the table.

    Raises:
        ValueError: if it is.
    """
    if _running(_SHARE_MEMORY) is not None:
        raise ValueError(
            f"{where}: expected rows of one process, got share_memory(): other processes would read and "
            "train copies of them. Call it on the dense part only. Shard the collection to train on several "
            "processes, or serve its rows (torchrec_dyn.serving) to read them in several."
        )


def check_trains(where: str, trained: Sequence[str]) -> None:
    """Checks that the parameters of no module around a sharded collection are being set to need no gradient.

    The rows of the tables `trained` are no parameters: they would be trained as before.

    Raises:
        ValueError: if they are, and some table is trained.
    """
    if torch.compiler.is_compiling() or not trained:
        return
    frame = _running(_REQUIRES_GRAD)
    if frame is not None and not frame.f_locals["requires_grad"]:
        raise ValueError(
            f"{where}: expected frozen tables under requires_grad_(False), got tables {listed(trained)}, "
            "which training would still update: their rows are no parameters. Call .table(name).freeze() of "
            "each on all ranks first."
        )


def check_unprocessed(options: Mapping[str, DynamicTableConfig], where: str) -> None:
    """Raises ValueError if a table in a feature-processed module scores ids by weights of a batch."""
    scored = [name for name, of_table in options.items() if of_table.scores_weights]
    if scored:
        raise ValueError(
            f"{where}: expected evictions that need no weights, since feature processors replace the weights "
            f"of a batch, got LowestScore of tables {listed(scored)}. Use LeastFrequentlyUsed, or the "
            "collection without processors."
        )


def is_being_processed(collection: nn.Module) -> bool:
    """Returns True if TorchRec's feature-processed module is being built around a collection."""
    frame = _running(_PROCESSED)
    return frame is not None and frame.f_locals.get("embedding_bag_collection") is collection


def check_step(where: str) -> None:
    """Checks what calls the optimizer of the rows.

    Raises:
        ValueError: torch's GradScaler calls, which has scaled the gradients of rows, or a
            GradientClippingOptimizer that clips.
    """
    frame = _running(_SCALED, _CLIPPED)
    if frame is None:
        return
    if frame.f_code is _SCALED and not hasattr(frame.f_locals["self"], "unscales_rows"):
        raise ValueError(
            f"{where}.step: expected gradients without a scale, got a step of GradScaler: the gradients of "
            "the rows are scaled. Train with bfloat16 autocast, which needs no scaler, with "
            "fused_params={'defer_updates': True} and torchrec_dyn.GradScaler, or with "
            "GradScaler(enabled=False)."
        )
    if frame.f_code is _CLIPPED and frame.f_locals["self"]._clipping != GradientClipping.NONE:
        raise ValueError(
            f"{where}.step: expected a step without clipping, got one of GradientClippingOptimizer, which "
            "clips nothing beside tables that update their own rows. Put it around the dense optimizer only, "
            "or call torchrec_dyn.clip_grad_norm_(model, max_norm) before step(), with "
            "fused_params={'defer_updates': True}."
        )


def _local(name: str, *codes: CodeType) -> Any:
    """Returns a local variable of the innermost running call of some functions; None if none is running."""
    # Without a process group nothing is wrapped, and traversals of a model keep their speed. A compiler
    # traces no constructor of a wrapper, and cannot trace frames.
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return None
    frame = _running(*codes)
    return None if frame is None else frame.f_locals.get(name)


def _running(*codes: CodeType) -> FrameType | None:
    """Returns the innermost running call of some functions; None if none is running."""
    frame: FrameType | None = sys._getframe(1)
    wanted = {id(code) for code in codes}  # code objects are compared field by field
    while frame is not None and id(frame.f_code) not in wanted:
        frame = frame.f_back
    return frame


def _check_one_rank(where: str, wrapper: str, world_size: int, more: str = "") -> None:
    if world_size > 1:
        raise ValueError(
            f"{where}: expected a sharded collection under {wrapper} on {world_size} ranks, got an "
            f"unsharded one: each rank would have rows of its own, not synchronized. {_WHAT_TO_DO}.{more}"
        )
