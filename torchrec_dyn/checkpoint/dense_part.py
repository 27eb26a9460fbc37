"""What is saved beside the dynamic tables: the dense part, the optimizer's numbers, values of the caller.

The caller's values, and the numbers of the parameter groups, are in one file a rank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.checkpoint_format import Entry, Place, digest_of, write_file
from torchrec_dyn.ranks import Table
from torchrec_dyn.storage import lacks_memory

State = Mapping[str, Any]  # the state dicts of a model and its optimizer: "model" and "optimizer"


def check_optimizer(optimizer: Any, call: str) -> None:
    """Raises ValueError unless an optimizer names its parameters, as those of TorchRec do."""
    if not isinstance(optimizer, KeyedOptimizer):
        raise ValueError(
            f"{call}: expected TorchRec's KeyedOptimizer, got {type(optimizer).__name__}. Pass "
            "model.fused_optimizer, or a CombinedOptimizer of it and a KeyedOptimizerWrapper of the dense "
            "optimizer."
        )


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and those that it combines or wraps, also torch's."""
    yield optimizer
    for _, part in getattr(optimizer, "optimizers", ()):
        yield from optimizers_in(part)
    if hasattr(optimizer, "_optimizer"):  # of TorchRec's wrappers
        yield from optimizers_in(optimizer._optimizer)


def check_has_all(saved: Mapping[str, Any], optimizer: Any) -> None:
    """Raises ValueError if an optimizer has state that its state dict lacks.

    TorchRec's wrappers copy the dict of states of a CombinedOptimizer. What is added to one of the two later
    is missing in the other: the step of a WarmupOptimizer around it, the state that torch's optimizers make.
    """
    names = {id(parameter): name for name, parameter in optimizer.params.items()}
    held = {id(parameter) for part in optimizers_in(optimizer) for parameter in part.state}
    if lost := sorted({names.get(key, "a parameter") for key in held} - saved["state"].keys()):
        raise ValueError(
            f"Checkpoints.save: expected an optimizer whose state dict has all of its state, got a "
            f"{type(optimizer).__name__} without that of {', '.join(lost)}: a restored job would begin it "
            "again. Put one WarmupOptimizer around each part inside the CombinedOptimizer, not one around "
            "all, with a param_name of its own."
        )


def names_of_states(states: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, list[str]]:
    """Returns by table the names under which an optimizer's state dict has its state.

    A name may begin below the model, as of a collection's own optimizer, or with a name of the optimizer. The
    name of a dense parameter may end as one of a table, too, but its state has no config of the table.
    """
    by_config = {f"{table.name}.optimizer_config": table for table in tables}
    names: dict[str, list[str]] = {table.name: [] for table in tables}
    for name, state in states.items():
        for table in (by_config[key] for key in state if key in by_config):
            key = f".{table.key}.weight"
            if key.endswith(f".{name}") or f".{name}".endswith(key):
                names[table.name].append(name)
    return names


def split_state(state: State, tables: Sequence[Table]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states of dynamic tables in an optimizer's state dict, and state dicts without them."""
    states = state["optimizer"]["state"]
    names = {*chain(*names_of_states(states, tables).values())}
    dense = {name: states[name] for name in states if name not in names}
    return (
        {name: states[name] for name in names},
        {"model": state["model"], "optimizer": {**state["optimizer"], "state": dense}},
    )


def saved_values(
    values: Mapping[str, Any], call: str
) -> tuple[dict[str, bytes], dict[str, str | None]]:
    """Returns the saved form of each value, and digests by which ranks see whether it is equal."""
    _check_named(values, call)
    saved: dict[str, bytes] = {}
    digests: dict[str, str | None] = {}
    for name, value in values.items():
        state = value.state_dict() if hasattr(value, "state_dict") else value
        memory = io.BytesIO()
        try:
            torch.save(state, memory)
            data = memory.getvalue()
            _load(data)
        except Exception as error:  # torch raises pickle's errors and its own
            if lacks_memory(error):
                raise
            raise ValueError(
                f"{call}: expected tensors, numbers, texts, lists and dicts in extra[{name!r}], got "
                f"{type(state).__name__} that weights_only=True refuses: {str(error).partition(chr(10))[0]}"
            ) from error
        is_of_rank = isinstance(value, DataLoader) or _is_of_rank(state)
        saved[name] = data
        digests[name] = None if is_of_rank else digest_of(data)
    return saved, digests


def _check_named(values: Any, call: str) -> None:
    """Raises ValueError unless further values are given by name."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{call}: expected a dict by name as extra, got {type(values).__name__}. Give each value a name."
        )


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location=_place_of, weights_only=True)


def _place_of(storage: Any, location: str) -> Any:
    """Returns a storage on the device that it was saved from; where there is none, on the CPU."""
    try:
        return torch.serialization.default_restore_location(storage, location)
    except RuntimeError:
        return storage


def _is_of_rank(state: Any) -> bool:
    if isinstance(state, Mapping):  # of `Positions`, or one that has it inside
        return state.get("is_global") is False or any(map(_is_of_rank, state.values()))
    return isinstance(state, (list, tuple)) and any(map(_is_of_rank, state))


def alike(digests: Sequence[Mapping[str, str | None]]) -> dict[str, bool]:
    """Returns for each value whether it fits any number of ranks, from the digests of each rank.

    Ranks that have trained equally many batches of sources of their own have equal positions, which
    nevertheless fit only as many ranks.
    """
    return {
        name: digest is not None and all(other.get(name) == digest for other in digests)
        for name, digest in digests[0].items()
    }


def options_of(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Returns the numbers of the parameter groups, such as the learning rate, by key of each parameter."""
    options: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        numbers = {
            name: plain
            for name, option in group.items()
            if isinstance(plain := _plain(option), (int, float, tuple))
        }
        own = {id(parameter) for parameter in group["params"]}
        options |= {key: numbers for key, weight in optimizer.params.items() if id(weight) in own}
    return options


def _plain(value: Any) -> Any:
    """Returns a number of numpy or of a tensor as Python's own; other values as they are."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value.item() if type(value).__module__ == "numpy" and value.shape == () else value


def number_of(step: Any, call: str) -> Any:
    """Returns a step, a finite number, as one of Python's own."""
    number = _plain(step)
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(
            f"{call}: expected a finite number as step, got {step!r}. Give the number of the step."
        )
    return number


def check_same(call: str, what: str, by_rank: Sequence[Any], remedy: str) -> None:
    """Raises ValueError unless all ranks have the same step or kind of save."""
    if len(set(by_rank)) > 1:
        raise ValueError(
            f"{call}: expected the same {what} on every rank, got {[*by_rank]} by rank. {remedy}"
        )


def set_options(optimizer: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes numbers of parameter groups, as `options_of` returned them; a tensor stays one."""
    keys = {id(parameter): key for key, parameter in optimizer.params.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, number in options.get(keys.get(id(parameter), ""), {}).items():
                if isinstance(group.get(name), Tensor):
                    number = group[name].fill_(number)
                group[name] = number  # a learning rate of rows is written to the tables


def write_values(
    saved: Mapping[str, bytes], options: Mapping[str, Mapping[str, Any]], path: Place
) -> tuple[str, str]:
    """Writes the values of a rank, and numbers of parameter groups; returns the file's name and digest."""
    memory = io.BytesIO()
    values = {
        name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in saved.items()
    }
    torch.save({"values": values, "options": dict(options)}, memory)
    write_file(path, memory.getvalue())
    return path.name, digest_of(memory.getvalue())


def check_ranks(entry: Entry, world_size: int, left_out: Container[str]) -> None:
    """Raises ValueError if ranks had values of their own, but for those left out, and were another number."""
    own = [name for name, is_alike in entry.extra.items() if not is_alike and name not in left_out]
    if own and entry.world_size != world_size:
        raise ValueError(
            f"{entry.path}: expected {entry.world_size} ranks, each of which has its own {', '.join(own)}, "
            f"got {world_size}. Use as many ranks, or pass leave_out={own} to restore if these values are "
            "not needed. To change the number of ranks, save positions in a source whose batches all ranks "
            "share, Positions(source, is_global=True), and equal values on all ranks."
        )


def read_values(entry: Entry, rank: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the values of a rank by name, and the numbers of the parameter groups."""
    path = entry.extra_of(min(rank, entry.world_size - 1))
    saved = _load(entry.check_file(path.name))
    values = {name: _load(data.numpy().tobytes()) for name, data in saved["values"].items()}
    return values, saved["options"]


def checked_names(
    objects: Mapping[str, Any], left_out: Collection[str], on_damage: str
) -> list[str]:
    """Returns the names of the values that are left out, if the arguments of `restore` are right."""
    if on_damage not in ("raise", "previous"):
        raise ValueError(
            f'Checkpoints.restore: expected on_damage "raise" or "previous", got {on_damage!r}.'
        )
    _check_named(objects, "Checkpoints.restore")
    if isinstance(left_out, str) or not objects.keys().isdisjoint(left_out):
        raise ValueError(
            f"Checkpoints.restore: expected names that are not in extra in leave_out, got {left_out!r}. Give "
            "a list of other names."
        )
    for name, target in objects.items():
        if not hasattr(target, "load_state_dict"):
            raise ValueError(
                "Checkpoints.restore: expected objects with load_state_dict in extra, got "
                f"{type(target).__name__} as {name!r}. Leave it out: what restore returns has the value."
            )
    return list(left_out)


def missing_names(values: Mapping[str, Any], objects: Mapping[str, Any]) -> str:
    """Returns an error if an object has a name that was not saved; "" otherwise."""
    missing = [name for name in objects if name not in values]
    if not missing:
        return ""
    return f"Checkpoints.restore: expected names among {sorted(values)} in extra, got {missing}."
