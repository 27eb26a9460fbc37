"""What a training job saves beside its model: values by name, one file a rank."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchrec_dyn.checkpoint.entry_files import check_digest, digest_of
from torchrec_dyn.checkpoint_format import Entry, FileWriter
from torchrec_dyn.storage import lacks_memory


class SavedValue(NamedTuple):
    """The saved form of a value.

    Attributes:
        data: what torch.save wrote.
        is_of_rank: True if it is, or has inside, the position of a source that one rank has for itself.
    """

    data: bytes
    is_of_rank: bool


def saved_values(values: Mapping[str, Any], call: str) -> dict[str, SavedValue]:
    """Returns the saved form of each value: of an object with `state_dict` its state dict.

    Raises:
        ValueError: a value is one that torch.load does not read with `weights_only=True`, or the values
            have no names.
    """
    _check_named(values, call)
    saved = {}
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
                f"{call}: expected tensors, numbers, texts, lists and dicts in "
                f"extra[{name!r}], got {type(state).__name__} that weights_only=True refuses: "
                f"{''.join(str(error).splitlines()[:1])}"
            ) from error
        saved[name] = SavedValue(data, isinstance(value, DataLoader) or _is_of_rank(state))
    return saved


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


def digests_of(saved: Mapping[str, SavedValue]) -> dict[str, str | None]:
    """Returns a digest of each value, by which ranks see whether it is equal; None if it is of one rank."""
    return {name: None if one.is_of_rank else digest_of(one.data) for name, one in saved.items()}


def alike(digests: Sequence[Mapping[str, str | None]]) -> dict[str, bool]:
    """Returns for each value whether it fits any number of ranks, from the digests of each rank.

    Ranks that have trained equally many batches of sources of their own have equal positions, which
    nevertheless fit only as many ranks.
    """
    return {
        name: digest is not None and all(of_rank.get(name) == digest for of_rank in digests)
        for name, digest in digests[0].items()
    }


def options_of(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Returns the numbers of the parameter groups, such as the learning rate, by key of each parameter.

    TorchRec's optimizers leave them out of their state dicts, and schedulers go on from them.
    """
    options: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        numbers = {
            name: plain
            for name, one in group.items()
            if isinstance(plain := _plain(one), (int, float, tuple))
        }
        own = {id(parameter) for parameter in group["params"]}
        options |= {key: numbers for key, one in optimizer.params.items() if id(one) in own}
    return options


def _plain(value: Any) -> Any:
    """Returns a number of numpy or of a tensor as Python's own; other values as they are."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value.item() if type(value).__module__ == "numpy" and value.shape == () else value


def number_of(step: Any, call: str) -> Any:
    """Returns a step as a number of Python's own, as entry.json has it.

    Raises:
        ValueError: it is no finite number.
    """
    number = _plain(step)
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(
            f"{call}: expected a finite number as step, got {step!r}. Give the number of the step."
        )
    return number


def check_same_step(steps: Sequence[Any], call: str) -> None:
    """Raises ValueError unless all ranks gave the same step, from the steps by rank."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise ValueError(
                f"{call}: expected the same step on every rank, got {steps[0]} on rank 0 and "
                f"{step} on rank {rank}. Save when all ranks have trained the same steps, and "
                "give their number."
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
    saved: Mapping[str, SavedValue],
    options: Mapping[str, Mapping[str, Any]],
    folder: Path,
    rank: int,
) -> dict[str, str]:
    """Writes the values of a rank, and the numbers of the parameter groups; returns the file's digest."""
    memory = io.BytesIO()
    texts = {
        name: torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
        for name, one in saved.items()
    }
    torch.save({"values": texts, "options": dict(options)}, memory)
    file = FileWriter(folder / f"extra-{rank}.pt")
    try:
        file.write(0, memory.getvalue())
        file.commit()
        file.close()
    except BaseException:
        file.drop()
        raise
    return {Path(file.path).name: digest_of(memory.getvalue())}


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
    """Returns the values of a rank by name, and the numbers of the parameter groups.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be read.
    """
    path = entry.extra_of(min(rank, entry.world_size - 1))
    data = path.read_bytes()
    check_digest(path, digest_of(data), entry.digests.get(path.name))
    try:
        saved = _load(data)
        values = {name: _load(text.numpy().tobytes()) for name, text in saved["values"].items()}
        return values, saved["options"]
    except Exception as error:  # of zipfile, pickle and torch
        raise ValueError(
            f"{path}: expected values of torch.save, got {error}. It is damaged."
        ) from error


def checked_names(objects: Mapping[str, Any], left_out: Collection[str]) -> list[str]:
    """Returns the names of the values that are left out.

    Raises:
        ValueError: a value is to be loaded into what has no `load_state_dict`, or also left out, or the
            objects have no names.
    """
    _check_named(objects, "Checkpoints.restore")
    if isinstance(left_out, str) or not objects.keys().isdisjoint(left_out):
        raise ValueError(
            f"Checkpoints.restore: expected names that are not in extra in leave_out, got {left_out!r}. Give "
            "a list of other names."
        )
    for name, one in objects.items():
        if not hasattr(one, "load_state_dict"):
            raise ValueError(
                f"Checkpoints.restore: expected objects with load_state_dict in extra, got "
                f"{type(one).__name__} as {name!r}. Leave it out: the saved value is in what restore returns."
            )
    return list(left_out)


def hand_over(values: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Loads state dicts into objects of the same names.

    Raises:
        ValueError: a name was not saved.
    """
    missing = [name for name in objects if name not in values]
    if missing:
        raise ValueError(
            f"Checkpoints.restore: expected names among {sorted(values)} in extra, got {missing}."
        )
    for name, one in objects.items():
        one.load_state_dict(values[name])
