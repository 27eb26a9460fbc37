"""Faults of arguments: each function changes one argument of an op; most results are invalid."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from op_cases import Arguments
from torch import Tensor

WILD = [
    *(-(2**63), -(2**63) + 1, -(2**62), -(2**32), -(2**31), -3, -2, -1, 0, 1, 2, 3, 4, 7, 8, 63),
    *(64, 2**20, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**61, 2**62, 2**63 - 1),
]
WILD_FLOATS = [
    *(0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 0.5, 1e-320, 1e300, -1e300, 1e19, float(2**63)),
    *(float("nan"), float("inf"), float("-inf")),
]
DTYPES = (
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64),
    *(torch.float16, torch.bfloat16, torch.complex64),
)


def a_number(rng: random.Random, tensor: Tensor) -> Any:
    """Returns a wild number that fits the dtype of a tensor."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.tensor(rng.choice(WILD_FLOATS), dtype=torch.float64).to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return rng.random() < 0.5
    limits = torch.iinfo(tensor.dtype)
    return min(max(rng.choice(WILD), limits.min), limits.max)


# Faults of one tensor: the new tensor, or None where the fault cannot be made. The tensor is not changed.


def other_dtype(rng: random.Random, tensor: Tensor) -> Tensor | None:
    return tensor.to(rng.choice([d for d in DTYPES if d != tensor.dtype]))


def other_device(_: random.Random, tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def sparse(_: random.Random, tensor: Tensor) -> Tensor:
    return tensor.to_sparse()


def strided(_: random.Random, tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def transposed(_: random.Random, tensor: Tensor) -> Tensor | None:
    return tensor.T.contiguous().T if tensor.dim() == 2 else None


def expanded(_: random.Random, tensor: Tensor) -> Tensor | None:
    return tensor[:1].expand(tensor.shape) if tensor.dim() and len(tensor) else None


def misaligned(rng: random.Random, tensor: Tensor) -> Tensor | None:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return None
    odd = rng.choice((1, 2, 3, 4, 7))
    memory = bytearray(tensor.numel() * tensor.element_size() + odd)
    moved = torch.frombuffer(memory, dtype=tensor.dtype, offset=odd, count=tensor.numel())
    return moved.copy_(tensor.flatten()).view(tensor.shape)


def inside_another(rng: random.Random, tensor: Tensor) -> Tensor:
    """A view of a part of a larger tensor: valid, but nothing outside the part may be written."""
    ends = torch.full((rng.randint(1, 9),), 3).to(tensor.dtype)
    whole = torch.cat([ends, tensor.flatten(), ends])
    return whole[len(ends) : len(ends) + tensor.numel()].view(tensor.shape)


def emptied(rng: random.Random, tensor: Tensor) -> Tensor:
    """A tensor whose memory is gone, or shorter than its shape says."""
    spoilt = tensor.clone()
    spoilt.untyped_storage().resize_(rng.choice((0, tensor.numel() * tensor.element_size() // 2)))
    return spoilt


def no_number(_: random.Random, tensor: Tensor) -> Tensor:
    return tensor.flatten()[:0].clone()


def no_line(_: random.Random, tensor: Tensor) -> Tensor | None:
    return tensor[:0].clone() if tensor.dim() else None


def one_less(_: random.Random, tensor: Tensor) -> Tensor | None:
    return tensor[:-1].clone() if tensor.dim() and len(tensor) else None


def one_more(_: random.Random, tensor: Tensor) -> Tensor | None:
    return torch.cat([tensor, tensor[-1:]]) if tensor.dim() and len(tensor) else None


def other_shape(rng: random.Random, tensor: Tensor) -> Tensor:
    shapes = [(-1,), (1, -1), (-1, 1, 1)] if tensor.numel() else [(0,), (0, 4), (5, 0)]
    return tensor.reshape(rng.choice(shapes)).clone()


def wild_numbers(rng: random.Random, tensor: Tensor) -> Tensor | None:
    if not tensor.numel():
        return None
    spoilt = tensor.clone()
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(tensor.numel())
        near = spoilt.view(-1)[place] + rng.choice((-1, 1)) if rng.random() < 0.3 else None
        spoilt.view(-1)[place] = a_number(rng, tensor) if near is None else near
    return spoilt


def all_wild(rng: random.Random, tensor: Tensor) -> Tensor | None:
    if tensor.numel() > 2**17:  # to move a map with one id in every slot takes quadratic time
        return None
    return torch.full_like(tensor, a_number(rng, tensor))


def other_order(rng: random.Random, tensor: Tensor) -> Tensor | None:
    """Two numbers, or all lines, change places."""
    if not tensor.numel() or not tensor.dim():
        return None
    if rng.random() < 0.5:
        return tensor[torch.tensor(rng.sample(range(len(tensor)), len(tensor)))]
    spoilt = tensor.clone()
    a, b = rng.randrange(tensor.numel()), rng.randrange(tensor.numel())
    spoilt.view(-1)[[a, b]] = spoilt.view(-1)[[b, a]]
    return spoilt


def line_twice(rng: random.Random, tensor: Tensor) -> Tensor | None:
    """One line replaces another, or is added: two segments of one bag, a repeated id."""
    if not tensor.dim() or not len(tensor):
        return None
    spoilt, line = tensor.clone(), tensor[rng.randrange(len(tensor))]
    if rng.random() < 0.5:
        return torch.cat([spoilt, line[None]])
    spoilt[rng.randrange(len(tensor))] = line
    return spoilt


FAULTS_OF_TENSORS: tuple[Callable[[random.Random, Tensor], Tensor | None], ...] = (
    *(other_dtype, other_device, sparse, strided, transposed, expanded, misaligned, emptied),
    *(inside_another, no_number, no_line, one_less, one_more, other_shape, all_wild),
    *(other_order, line_twice) * 2,
    *(wild_numbers,) * 6,
)
OF_TORCH = {"other_device", "sparse", "none"}  # torch finds the kernel, or says that there is none


def shared_with_another(rng: random.Random, given: Arguments, name: str) -> Tensor | None:
    """Returns a view of another argument's memory in the shape of this argument."""
    tensor = given[name]
    others = [
        other
        for key, value in given.items()
        for other in (value if isinstance(value, list) else [value])
        if key != name and isinstance(other, Tensor) and other.device.type == "cpu"
        and other.layout == torch.strided and other.is_contiguous() and tensor.numel()
        and other.untyped_storage().nbytes() >= other.numel() * other.element_size()
        and other.numel() * other.element_size() >= tensor.numel() * tensor.element_size()
    ]  # fmt: skip
    if not others or tensor.dtype == torch.bool:
        return None
    other = rng.choice(others)  # of one element, it may have any strides
    memory = other.as_strided((other.numel(),), (1,)).view(torch.uint8)
    if memory.storage_offset() % tensor.element_size():
        return None
    shared = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    if rng.random() < 0.8:
        shared.copy_(tensor)  # so that the shared numbers are valid for this argument
    return shared


def fault_of_tensor(rng: random.Random, given: Arguments, name: str) -> str | None:
    if rng.random() < 0.06 and (shared := shared_with_another(rng, given, name)) is not None:
        given[name] = shared
        return "overlapping"
    fault = rng.choice(FAULTS_OF_TENSORS)
    spoilt = fault(rng, given[name])
    if spoilt is None:
        return None
    given[name] = spoilt
    return fault.__name__


def fault_of_list(rng: random.Random, given: Arguments, name: str) -> str | None:
    blocks = [*given[name]]
    kind = rng.choice(("one", "one", "one", "all", "less", "twice", "order", "none_left"))
    fault = rng.choice(FAULTS_OF_TENSORS)
    if not blocks:
        return None
    place = rng.randrange(len(blocks))
    if kind in ("one", "all"):
        chosen = [place] if kind == "one" else range(len(blocks))
        for i in chosen:
            spoilt = fault(rng, blocks[i])
            if spoilt is None:
                return None
            blocks[i] = spoilt
        kind = fault.__name__
    elif kind == "less":
        del blocks[place]
    elif kind == "twice":
        if rng.random() < 0.5:
            blocks.append(blocks[place])
        else:
            blocks[rng.randrange(len(blocks))] = blocks[place]
        kind = "block_twice"
    elif kind == "order":
        rng.shuffle(blocks)
    else:
        blocks = []
    given[name] = blocks
    return kind


def fault_of_number(rng: random.Random, value: int | float) -> int | float:
    if isinstance(value, float):
        return rng.choice(WILD_FLOATS)
    near = rng.choice((value - 1, value + 1, 2 * value, -value))
    return min(max(rng.choice((near, rng.choice(WILD), rng.choice(WILD))), -(2**63)), 2**63 - 1)


def fault_of_numbers(
    rng: random.Random, values: Sequence[int | float], wild: Sequence[int | float]
) -> list[int | float]:
    spoilt = [*values]
    kind = rng.choice(("wild", "wild", "less", "more"))
    if kind == "more" or not spoilt:
        return [*spoilt, wild[wild.index(1)]]
    place = rng.randrange(len(spoilt))
    if kind == "less":
        del spoilt[place]
    else:
        spoilt[place] = rng.choice(wild)
    return spoilt


def spoil(rng: random.Random, schema: Any, given: Arguments) -> list[str]:
    """Makes one to three faults in place; returns what they are, `argument: fault`."""
    faults: list[str] = []
    wanted = rng.choice((1, 1, 1, 2, 3))
    for _ in range(8 * wanted):  # an argument may have no fault left
        if len(faults) == wanted:
            break
        argument = rng.choice(schema.arguments)
        name, value, kind = argument.name, given[argument.name], "number"
        if any(fault.startswith(f"{name}: ") for fault in faults):
            continue
        if isinstance(value, Tensor):
            if rng.random() < 0.02:
                given[name], kind = None, "none"
            else:
                kind = fault_of_tensor(rng, given, name)
        elif isinstance(value, bool):
            given[name] = not value
        elif isinstance(value, (int, float)):
            given[name] = fault_of_number(rng, value)
        elif isinstance(value, torch.dtype):
            given[name] = rng.choice(DTYPES)
        elif isinstance(value, list) and "Tensor" in str(argument.type):
            kind = fault_of_list(rng, given, name)
        elif isinstance(value, list):
            wild = WILD if "int" in str(argument.type) else WILD_FLOATS
            given[name] = fault_of_numbers(rng, value, wild)
        else:  # left out
            continue
        if kind is not None:
            faults.append(f"{name}: {kind}")
    return faults
