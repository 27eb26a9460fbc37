"""What a training job saves beside its model: values by name, one file a rank."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrec_dyn.checkpoint_format import Entry, FileWriter


def values_as_bytes(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the saved form of each value: of an object with `state_dict` its state dict.

    Raises:
        ValueError: a value is one that torch.load does not read with `weights_only=True`.
    """
    saved = {}
    for name, value in values.items():
        state = value.state_dict() if hasattr(value, "state_dict") else value
        memory = io.BytesIO()
        torch.save(state, memory)
        saved[name] = memory.getvalue()
        try:
            torch.load(io.BytesIO(saved[name]), weights_only=True)
        except Exception as error:  # torch raises pickle's errors and its own
            raise ValueError(
                "Checkpoints.save: expected tensors, numbers, texts, lists and dicts in "
                f"extra[{name!r}], got {type(state).__name__} that weights_only=True refuses: "
                f"{str(error).splitlines()[0]}"
            ) from error
    return saved


def alike(saved: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns digests by which ranks see whether their values are equal."""
    return {name: hashlib.blake2b(value, digest_size=16).digest() for name, value in saved.items()}


def options_of(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Returns the numbers of the parameter groups, such as the learning rate, by key of each parameter.

    TorchRec's optimizers leave them out of their state dicts, and schedulers go on from them.
    """
    options: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        numbers = {name: one for name, one in group.items() if isinstance(one, (int, float, tuple))}
        own = {id(parameter) for parameter in group["params"]}
        options |= {key: numbers for key, one in optimizer.params.items() if id(one) in own}
    return options


def set_options(optimizer: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes numbers of parameter groups, as `options_of` returned them."""
    keys = {id(parameter): key for key, parameter in optimizer.params.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            group.update(options.get(keys.get(id(parameter), ""), {}))


def write_values(
    saved: Mapping[str, bytes],
    options: Mapping[str, Mapping[str, Any]],
    folder: Path,
    rank: int,
) -> None:
    """Writes the values of a rank, and the numbers of the parameter groups."""
    memory = io.BytesIO()
    texts = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8) for name, value in saved.items()
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


def check_ranks(entry: Entry, world_size: int) -> None:
    """Raises ValueError if ranks have values of their own and were another number."""
    own = ", ".join(name for name, is_alike in entry.extra.items() if not is_alike)
    if own and entry.world_size != world_size:
        raise ValueError(
            f"{entry.path}: expected {entry.world_size} ranks, each of which has its own {own}, got "
            f"{world_size}. Use as many ranks, or save a position that is the same on all ranks."
        )


def read_values(entry: Entry, rank: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the values of a rank by name, and the numbers of the parameter groups.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be read.
    """
    path = entry.extra_of(min(rank, entry.world_size - 1))
    data = path.read_bytes()
    try:
        saved = torch.load(io.BytesIO(data), weights_only=True)
        values = {
            name: torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True)
            for name, text in saved["values"].items()
        }
        return values, saved["options"]
    except Exception as error:  # of zipfile, pickle and torch
        raise ValueError(
            f"{path}: expected values of torch.save, got {error}. It is damaged."
        ) from error


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
